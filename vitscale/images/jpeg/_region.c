/* Decode boxes of a JPEG, without the rest of the image, and resample them row by row.
 *
 * Owns: the calls to libjpeg-turbo, and every check that untrusted bytes need.
 * Leaves out: resampling (_resample.c), unsupported images (decoders.py).
 *
 * One pass decodes the smallest box around all of them. Rows above it are entropy-decoded only, rows
 * below are not read at all, and to the left and right only whole blocks that touch it are
 * transformed. Any error or warning of the library
 * is a ValueError; the caller then uses Pillow.
 */
#include <Python.h>

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#include <jerror.h>

#include "_baseline.h"
#include "_resample.h"

#ifndef LIBJPEG_TURBO_VERSION_NUMBER
#error "libjpeg-turbo is needed: other libjpegs cannot skip scanlines"
#endif

#define CHANNELS 3
/* Columns beside the box: colours at its edge are interpolated with those of the neighbours. */
#define MARGIN 2
#define MAX_ROWS 4 /* libjpeg hands out at most this many rows at once (vertical sampling) */
#define MAX_SIZE 4096
#define MAX_BOXES 64
#define MAX_SCANS 100 /* progressive files have about 10; each scan visits the whole image */

struct guard {
    struct jpeg_error_mgr base; /* first, so that libjpeg's pointer is ours */
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    char text[JMSG_LENGTH_MAX];
};

struct request {
    const unsigned char *data;
    unsigned long num_bytes;
    unsigned long max_pixels;
    struct box box;    /* around those of `sink` */
    struct sink *sink; /* takes the rows of the box; NULL: read the header only */
    int allow_baseline;     /* our own decoder, for images that it supports */
    struct entries entries; /* known, or found if `each` is not 0 */
    unsigned each;
    JDIMENSION image_width, image_height;
    int was_baseline;
};

static void give_up(j_common_ptr codec)
{
    struct guard *guard = (struct guard *)codec->err;
    guard->base.format_message(codec, guard->text);
    longjmp(guard->escape, 1);
}

static void refuse(j_common_ptr codec, const char *why)
{
    struct guard *guard = (struct guard *)codec->err;
    snprintf(guard->text, sizeof guard->text, "%s", why);
    longjmp(guard->escape, 1);
}

/* Level -1 is a warning: data are lost or inconsistent. Higher levels are traces. */
static void on_message(j_common_ptr codec, int level)
{
    if (level < 0)
        give_up(codec);
}

static void stay_silent(j_common_ptr codec)
{
    (void)codec;
}

static void on_progress(j_common_ptr codec)
{
    if (codec->is_decompressor && ((j_decompress_ptr)codec)->input_scan_number > MAX_SCANS)
        refuse(codec, "more scans than any sensible file has");
}

static void check_kind(j_decompress_ptr codec, const struct request *request)
{
    J_COLOR_SPACE space = codec->jpeg_color_space;
    int is_grey = space == JCS_GRAYSCALE && codec->num_components == 1;
    int is_colour = (space == JCS_YCbCr || space == JCS_RGB) && codec->num_components == 3;

    if (codec->data_precision != 8 || codec->arith_code || !(is_grey || is_colour))
        refuse((j_common_ptr)codec, "not an 8 bit grey, YCbCr or RGB image");
    if ((unsigned long long)codec->image_width * codec->image_height > request->max_pixels)
        refuse((j_common_ptr)codec, "more pixels than allowed");
}

static void check_box(j_decompress_ptr codec, const struct box *box)
{
    if (box->width < 1 || box->height < 1 || box->left >= codec->image_width ||
        box->top >= codec->image_height || box->width > codec->image_width - box->left ||
        box->height > codec->image_height - box->top)
        refuse((j_common_ptr)codec, "the box does not lie inside the image");
}

static void read_box(j_decompress_ptr codec, const struct request *request)
{
    const struct box *box = &request->box;
    JDIMENSION first, last, span, done = 0, num, i;
    size_t row_bytes = (size_t)box->width * CHANNELS, margin;
    JSAMPARRAY rows;

    codec->out_color_space = JCS_RGB;
    /* Pillow's settings, for equal pixels; the fast ones would gain 2 to 8 %. */
    codec->dct_method = JDCT_ISLOW;
    codec->do_fancy_upsampling = TRUE;
    jpeg_start_decompress(codec);
    first = box->left > MARGIN ? box->left - MARGIN : 0;
    last = box->left + box->width;
    last = codec->image_width - last > MARGIN ? last + MARGIN : codec->image_width;
    span = last - first;
    jpeg_crop_scanline(codec, &first, &span); /* moves the left edge to a whole block */
    margin = (size_t)(box->left - first) * CHANNELS;
    if (first > box->left || margin + row_bytes > (size_t)span * CHANNELS ||
        span != codec->output_width || codec->output_components != CHANNELS)
        refuse((j_common_ptr)codec, "libjpeg cut another box than it was asked for");
    /* From libjpeg's pool, so that a jump out of it leaks nothing; wide enough for all vectors. */
    rows = codec->mem->alloc_sarray((j_common_ptr)codec, JPOOL_IMAGE,
                                    span * CHANNELS + 2 * ROW_PADDING, MAX_ROWS);
    for (i = 0; i < MAX_ROWS; i++)
        memset(rows[i] + (size_t)span * CHANNELS, 0, 2 * ROW_PADDING);
    if (box->top > 0 && jpeg_skip_scanlines(codec, box->top) != box->top)
        refuse((j_common_ptr)codec, "rows above the box are missing");
    while (done < box->height) {
        num = jpeg_read_scanlines(codec, rows, MAX_ROWS);
        if (num < 1 || num > MAX_ROWS)
            refuse((j_common_ptr)codec, "rows of the box are missing");
        for (i = 0; i < num && done < box->height; i++, done++)
            sink_take_row(request->sink, (int)done, rows[i] + margin);
    }
}

/* Runs without the interpreter's lock. Returns 0, or -1 with the reason in `text`. */
static int run(struct request *request, char *text)
{
    struct jpeg_decompress_struct codec;
    struct guard guard;

    memset(&codec, 0, sizeof codec);
    memset(&guard, 0, sizeof guard);
    codec.err = jpeg_std_error(&guard.base);
    guard.base.error_exit = give_up;
    guard.base.emit_message = on_message;
    guard.base.output_message = stay_silent;
    guard.progress.progress_monitor = on_progress;
    if (setjmp(guard.escape)) {
        jpeg_destroy_decompress(&codec);
        memcpy(text, guard.text, sizeof guard.text);
        return -1;
    }
    jpeg_create_decompress(&codec);
    codec.progress = &guard.progress;
    jpeg_mem_src(&codec, (unsigned char *)request->data, request->num_bytes);
    jpeg_read_header(&codec, TRUE);
    check_kind(&codec, request);
    request->image_width = codec.image_width;
    request->image_height = codec.image_height;
    if (request->sink != NULL) {
        check_box(&codec, &request->box);
        request->was_baseline =
            request->allow_baseline &&
            baseline_read(&codec, &request->box, &request->entries, request->sink);
        if (!request->was_baseline)
            read_box(&codec, request);
    }
    if (request->each != 0)
        baseline_find_entries(&codec, request->each, &request->entries);
    jpeg_destroy_decompress(&codec); /* frees everything, at any stage of decoding */
    return 0;
}

/* outs: where the pixels of each part of `sink` go. */
static int run_unlocked(struct request *request, uint8_t *const *outs)
{
    char text[JMSG_LENGTH_MAX];
    int failed, i;

    Py_BEGIN_ALLOW_THREADS
    failed = run(request, text);
    for (i = 0; !failed && request->sink != NULL && i < request->sink->num_parts; i++)
        resampler_finish(&request->sink->parts[i].resampler, outs[i]);
    Py_END_ALLOW_THREADS
    if (failed)
        PyErr_SetString(PyExc_ValueError, text);
    return failed;
}

static PyObject *size(PyObject *module, PyObject *arguments)
{
    struct request request = {0};
    Py_buffer data;
    int failed;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*k", &data, &request.max_pixels))
        return NULL;
    request.data = data.buf;
    request.num_bytes = (unsigned long)data.len;
    failed = run_unlocked(&request, NULL);
    PyBuffer_Release(&data);
    if (failed)
        return NULL;
    return Py_BuildValue("II", request.image_width, request.image_height);
}

static PyObject *entries(PyObject *module, PyObject *arguments)
{
    struct request request = {0};
    Py_buffer data;
    PyObject *found = NULL;
    int each, failed = -1;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*ik", &data, &each, &request.max_pixels))
        return NULL;
    request.data = data.buf;
    request.num_bytes = (unsigned long)data.len;
    request.each = (unsigned)each;
    if (each < 1 || each > UINT8_MAX)
        PyErr_SetString(PyExc_ValueError, "an entry is at each 1 to 255 MCUs");
    else
        failed = run_unlocked(&request, NULL);
    PyBuffer_Release(&data);
    if (!failed)
        found = PyBytes_FromStringAndSize((const char *)request.entries.bytes,
                                          (Py_ssize_t)request.entries.num_bytes);
    free(request.entries.bytes);
    return found;
}

/* An integer, the side of a square, or (rows, columns). Returns 0, or -1 with an error set. */
static int read_size(PyObject *size, Py_ssize_t *rows, Py_ssize_t *columns)
{
    if (PyTuple_Check(size))
        return PyArg_ParseTuple(size, "nn", rows, columns) ? 0 : -1;
    *rows = *columns = PyNumber_AsSsize_t(size, PyExc_OverflowError);
    return PyErr_Occurred() ? -1 : 0;
}

/* One box and what becomes of it. */
struct crop {
    Py_ssize_t left, top, width, height, rows, columns;
    int cubic, antialias, flip;
    Py_buffer out; /* released by the caller */
};

/* Returns 0, or -1 with an error set. */
static int read_crop(PyObject *tuple, unsigned long max_pixels, struct crop *crop)
{
    PyObject *size;

    if (!PyArg_ParseTuple(tuple, "(nnnn)w*Oppp", &crop->left, &crop->top, &crop->width,
                          &crop->height, &crop->out, &size, &crop->cubic, &crop->antialias,
                          &crop->flip))
        return -1;
    if (read_size(size, &crop->rows, &crop->columns))
        return -1;
    if (crop->left < 0 || crop->top < 0 || crop->width < 1 || crop->height < 1 ||
        crop->left > JPEG_MAX_DIMENSION || crop->top > JPEG_MAX_DIMENSION ||
        crop->width > JPEG_MAX_DIMENSION || crop->height > JPEG_MAX_DIMENSION)
        PyErr_SetString(PyExc_ValueError, "the box does not lie inside the image");
    else if (crop->rows < 1 || crop->rows > MAX_SIZE || crop->columns < 1 ||
             crop->columns > MAX_SIZE || (unsigned long)(crop->columns * crop->height) > max_pixels)
        PyErr_SetString(PyExc_ValueError, "the output is larger than allowed");
    else if (crop->out.len != crop->rows * crop->columns * CHANNELS)
        PyErr_SetString(PyExc_ValueError, "the buffer does not have the size of the output");
    else
        return 0;
    return -1;
}

/* The smallest box around all of them. */
static struct box box_around(const struct crop *crops, int num)
{
    Py_ssize_t left = crops[0].left, top = crops[0].top, right = left, bottom = top;
    struct box box;
    int i;

    for (i = 0; i < num; i++) {
        const struct crop *crop = &crops[i];
        left = crop->left < left ? crop->left : left;
        top = crop->top < top ? crop->top : top;
        right = crop->left + crop->width > right ? crop->left + crop->width : right;
        bottom = crop->top + crop->height > bottom ? crop->top + crop->height : bottom;
    }
    box.left = (JDIMENSION)left;
    box.top = (JDIMENSION)top;
    box.width = (JDIMENSION)(right - left);
    box.height = (JDIMENSION)(bottom - top);
    return box;
}

static int crop_unlocked(struct request *request, const struct crop *crops, int num,
                         int allow_avx2)
{
    struct part *parts = calloc((size_t)num, sizeof *parts);
    uint8_t *outs[MAX_BOXES];
    struct sink sink = {num, parts};
    int failed = parts == NULL, i;

    request->box = box_around(crops, num);
    for (i = 0; i < num && !failed; i++) {
        const struct crop *crop = &crops[i];
        outs[i] = crop->out.buf;
        parts[i].left = (int)(crop->left - (Py_ssize_t)request->box.left);
        parts[i].top = (int)(crop->top - (Py_ssize_t)request->box.top);
        failed = resampler_open(&parts[i].resampler, (int)crop->width, (int)crop->height,
                                (int)crop->rows, (int)crop->columns, crop->cubic, crop->antialias,
                                crop->flip, allow_avx2);
    }
    if (failed)
        PyErr_NoMemory();
    else {
        request->sink = &sink;
        failed = run_unlocked(request, outs);
    }
    for (i = 0; i < num && parts != NULL; i++)
        resampler_close(&parts[i].resampler);
    free(parts);
    return failed;
}

static PyObject *crop(PyObject *module, PyObject *arguments)
{
    struct request request = {0};
    struct crop crops[MAX_BOXES];
    Py_buffer data, known;
    PyObject *list;
    Py_ssize_t num;
    int allow_avx2, i, failed = 0;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*O!kpy*", &data, &PyList_Type, &list, &request.max_pixels,
                          &allow_avx2, &known))
        return NULL;
    memset(crops, 0, sizeof crops);
    num = PyList_Size(list);
    if (num < 1 || num > MAX_BOXES) {
        PyErr_SetString(PyExc_ValueError, "1 to 64 boxes are allowed");
        failed = -1;
    }
    for (i = 0; i < num && !failed; i++)
        failed = read_crop(PyList_GetItem(list, i), request.max_pixels, &crops[i]);
    if (!failed) {
        request.data = data.buf;
        request.num_bytes = (unsigned long)data.len;
        request.allow_baseline = allow_avx2;
        request.entries.bytes = known.buf;
        request.entries.num_bytes = (size_t)known.len;
        failed = crop_unlocked(&request, crops, (int)num, allow_avx2);
    }
    for (i = 0; i < MAX_BOXES; i++)
        PyBuffer_Release(&crops[i].out);
    PyBuffer_Release(&data);
    PyBuffer_Release(&known);
    if (failed)
        return NULL;
    return PyBool_FromLong(request.was_baseline);
}

static PyMethodDef methods[] = {
    {"size", size, METH_VARARGS, "size(data, max_pixels) -> (width, height)"},
    {"entries", entries, METH_VARARGS, "entries(data, each, max_pixels) -> bytes"},
    {"crop", crop, METH_VARARGS,
     "crop(data, [((left, top, width, height), out, size, cubic, antialias, flip)], max_pixels, "
     "allow_avx2, entries): fills each out with planes; size is a side or (rows, columns)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_region", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__region(void)
{
    return PyModule_Create(&definition);
}
