/* Decode one box of a JPEG, without the rest of the image, and resample it row by row.
 *
 * Owns: the calls to libjpeg-turbo, and every check that untrusted bytes need.
 * Leaves out: resampling (_resample.c), unsupported images (decoders.py).
 *
 * Rows above the box are entropy-decoded only, rows below are not read at all, and to the left and
 * right only whole blocks that touch the box are transformed. Any error or warning of the library
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
    struct box box;
    struct resampler *sink; /* takes the rows of the box; NULL: read the header only */
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
            resampler_take_row(request->sink, (int)done, rows[i] + margin);
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

static int run_unlocked(struct request *request, uint8_t *out)
{
    char text[JMSG_LENGTH_MAX];
    int failed;

    Py_BEGIN_ALLOW_THREADS
    failed = run(request, text);
    if (!failed && out != NULL)
        resampler_finish(request->sink, out);
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

static int crop_unlocked(struct request *request, int rows, int columns, const int *options,
                         uint8_t *out)
{
    struct resampler resampler;
    int failed;

    failed = resampler_open(&resampler, (int)request->box.width, (int)request->box.height, rows,
                            columns, options[0], options[1], options[2], options[3]);
    if (failed)
        PyErr_NoMemory();
    else {
        request->sink = &resampler;
        failed = run_unlocked(request, out);
    }
    resampler_close(&resampler);
    return failed;
}

static PyObject *crop(PyObject *module, PyObject *arguments)
{
    struct request request = {0};
    Py_buffer data, out, known;
    PyObject *size;
    Py_ssize_t left, top, width, height, rows, columns;
    int options[4], failed = -1; /* cubic, antialias, flip, allow AVX2 */

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*(nnnn)w*Opppkpy*", &data, &left, &top, &width, &height, &out,
                          &size, &options[0], &options[1], &options[2], &request.max_pixels,
                          &options[3], &known))
        return NULL;
    if (read_size(size, &rows, &columns))
        ; /* the error is set */
    else if (left < 0 || top < 0 || width < 1 || height < 1 || left > JPEG_MAX_DIMENSION ||
        top > JPEG_MAX_DIMENSION || width > JPEG_MAX_DIMENSION || height > JPEG_MAX_DIMENSION)
        PyErr_SetString(PyExc_ValueError, "the box does not lie inside the image");
    else if (rows < 1 || rows > MAX_SIZE || columns < 1 || columns > MAX_SIZE ||
             (unsigned long)(columns * height) > request.max_pixels)
        PyErr_SetString(PyExc_ValueError, "the output is larger than allowed");
    else if (out.len != rows * columns * CHANNELS)
        PyErr_SetString(PyExc_ValueError, "the buffer does not have the size of the output");
    else {
        request.data = data.buf;
        request.num_bytes = (unsigned long)data.len;
        request.allow_baseline = options[3];
        request.entries.bytes = known.buf;
        request.entries.num_bytes = (size_t)known.len;
        request.box.left = (JDIMENSION)left;
        request.box.top = (JDIMENSION)top;
        request.box.width = (JDIMENSION)width;
        request.box.height = (JDIMENSION)height;
        failed = crop_unlocked(&request, (int)rows, (int)columns, options, out.buf);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    PyBuffer_Release(&known);
    if (failed)
        return NULL;
    return PyBool_FromLong(request.was_baseline);
}

static PyMethodDef methods[] = {
    {"size", size, METH_VARARGS, "size(data, max_pixels) -> (width, height)"},
    {"entries", entries, METH_VARARGS, "entries(data, each, max_pixels) -> bytes"},
    {"crop", crop, METH_VARARGS,
     "crop(data, (left, top, width, height), out, size, cubic, antialias, flip, max_pixels, "
     "allow_avx2, entries): fills out with planes; size is a side or (rows, columns)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_region", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__region(void)
{
    return PyModule_Create(&definition);
}
