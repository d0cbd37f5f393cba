/* Turn the inflated bytes of a PNG into pixels: undo the filters, convert to RGB, and resample.
 *
 * Owns: every check of sizes and of the inflated bytes, which are untrusted.
 * Leaves out: chunks and inflating (png.py), filters (_filters.c), resampling (../jpeg/_resample.c).
 *
 * Rows below the box and columns to its right are not decoded. Rows above it are, from the last one
 * whose filter does not use the row above. A wrong filter or colour index is a ValueError; the
 * caller then uses Pillow.
 */
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "../jpeg/_resample.h"
#include "_filters.h"

#define CHANNELS 3
#define MAX_COLOURS 256
#define MAX_SIDE 1000000 /* PNG allows more; such images are left to Pillow */
#define MAX_SIZE 4096    /* of the output, as for JPEG */
#define MAX_PIXELS 178956970

enum { GREY = 0, RGB = 2, PALETTE = 3, GREY_ALPHA = 4, RGB_ALPHA = 6 };

struct image {
    const uint8_t *coded; /* [height, 1 + width * samples]: the filter's number, then the row */
    size_t width, height, samples;
    int colour;
    uint32_t palette[MAX_COLOURS]; /* 3 bytes in memory's order, and one unused */
    unsigned num_colours;
};

struct box {
    size_t left, top, width, height;
};

static const uint8_t *row_of(const struct image *image, size_t y)
{
    return image->coded + y * (1 + image->width * image->samples);
}

/* Pixels to 3 bytes each. One byte past the end of `rgb` is overwritten.
 * Returns 0, or -1 for a colour that the palette does not have. */
static int to_rgb(const struct image *image, const uint8_t *pixels, size_t num, uint8_t *rgb)
{
    const size_t samples = image->samples;
    unsigned largest = 0;
    size_t i;

    switch (image->colour) {
    case PALETTE:
        for (i = 0; i < num; i++) {
            largest = pixels[i] > largest ? pixels[i] : largest;
            memcpy(rgb + CHANNELS * i, &image->palette[pixels[i]], 4);
        }
        return largest < image->num_colours ? 0 : -1;
    case RGB_ALPHA:
        for (i = 0; i < num; i++)
            memcpy(rgb + CHANNELS * i, pixels + 4 * i, 4);
        return 0;
    default: /* grey, perhaps with alpha */
        for (i = 0; i < num; i++)
            memset(rgb + CHANNELS * i, pixels[samples * i], CHANNELS);
        return 0;
    }
}

/* Gives the rows of the box to `sink`, or writes them to `pixels` if that is NULL.
 * Returns NULL, or what is wrong. */
static const char *decode(const struct image *image, const struct box *box, struct resampler *sink,
                          uint8_t *pixels)
{
    const size_t num_bytes = (box->left + box->width) * image->samples;
    const size_t row_size = num_bytes + ROW_PADDING, rgb_bytes = box->width * CHANNELS;
    uint8_t *memory, *row, *above, *rgb, *swapped;
    const char *wrong = NULL;
    size_t y;

    for (y = 0; y < image->height; y++)
        if (*row_of(image, y) >= NUM_FILTERS)
            return "unknown filter";
    memory = calloc(2 * row_size + rgb_bytes + ROW_PADDING, 1);
    if (memory == NULL)
        return "out of memory";
    row = memory;
    above = row + row_size;
    rgb = above + row_size;
    for (y = box->top; y > 0 && *row_of(image, y) > FILTER_SUB; y--)
        ;
    for (; y < box->top + box->height; y++) {
        const uint8_t *coded = row_of(image, y), *done = row + box->left * image->samples;
        undo_filter(*coded, coded + 1, above, row, num_bytes, image->samples);
        if (y >= box->top) {
            if (image->colour != RGB && to_rgb(image, done, box->width, rgb)) {
                wrong = "a colour that the palette does not have";
                break;
            }
            if (image->colour != RGB)
                done = rgb;
            if (sink != NULL)
                resampler_take_row(sink, (int)(y - box->top), done);
            else
                memcpy(pixels + (y - box->top) * rgb_bytes, done, rgb_bytes);
        }
        swapped = above;
        above = row;
        row = swapped;
    }
    free(memory);
    return wrong;
}

/* Returns 0, or -1 with an error set. */
static int read_image(struct image *image, const Py_buffer *coded, Py_ssize_t width,
                      Py_ssize_t height, const Py_buffer *palette)
{
    static const size_t samples_of[] = {1, 0, 3, 1, 2, 0, 4};
    const uint8_t *colours = palette->buf;
    Py_ssize_t i;

    if (width < 1 || height < 1 || width > MAX_SIDE || height > MAX_SIDE || image->colour < 0 ||
        image->colour > RGB_ALPHA || samples_of[image->colour] == 0 ||
        palette->len % CHANNELS != 0 || palette->len > MAX_COLOURS * CHANNELS) {
        PyErr_SetString(PyExc_ValueError, "not an image that is supported");
        return -1;
    }
    image->coded = coded->buf;
    image->width = (size_t)width;
    image->height = (size_t)height;
    image->samples = samples_of[image->colour];
    if ((size_t)coded->len != image->height * (1 + image->width * image->samples)) {
        PyErr_SetString(PyExc_ValueError, "the bytes do not have the size of the image");
        return -1;
    }
    for (i = 0; i < palette->len / CHANNELS; i++)
        memcpy(&image->palette[i], colours + CHANNELS * i, CHANNELS);
    image->num_colours = (unsigned)(palette->len / CHANNELS);
    return 0;
}

static int run_unlocked(const struct image *image, const struct box *box, struct resampler *sink,
                        uint8_t *out)
{
    const char *wrong;

    Py_BEGIN_ALLOW_THREADS
    wrong = decode(image, box, sink, out);
    if (wrong == NULL && sink != NULL)
        resampler_finish(sink, out);
    Py_END_ALLOW_THREADS
    if (wrong != NULL)
        PyErr_SetString(PyExc_ValueError, wrong);
    return wrong == NULL ? 0 : -1;
}

static PyObject *whole(PyObject *module, PyObject *arguments)
{
    struct image image = {0};
    struct box box = {0};
    Py_buffer coded, palette, out;
    Py_ssize_t width, height;
    int failed = -1;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*(nni)y*w*", &coded, &width, &height, &image.colour,
                          &palette, &out))
        return NULL;
    if (read_image(&image, &coded, width, height, &palette))
        ; /* the error is set */
    else if (out.len != width * height * CHANNELS)
        PyErr_SetString(PyExc_ValueError, "the buffer does not have the size of the image");
    else {
        box.width = image.width;
        box.height = image.height;
        failed = run_unlocked(&image, &box, NULL, out.buf);
    }
    PyBuffer_Release(&coded);
    PyBuffer_Release(&palette);
    PyBuffer_Release(&out);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static int crop_unlocked(const struct image *image, const struct box *box, int rows, int columns,
                         const int *options, uint8_t *out)
{
    struct resampler resampler;
    int failed;

    failed = resampler_open(&resampler, (int)box->width, (int)box->height, rows, columns,
                            options[0], options[1], options[2], options[3]);
    if (failed)
        PyErr_NoMemory();
    else
        failed = run_unlocked(image, box, &resampler, out);
    resampler_close(&resampler);
    return failed;
}

static PyObject *crop(PyObject *module, PyObject *arguments)
{
    struct image image = {0};
    Py_buffer coded, palette, out;
    Py_ssize_t image_width, image_height, left, top, width, height, rows, columns;
    int options[4], failed = -1; /* cubic, antialias, flip, allow AVX2 */

    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*(nni)y*(nnnn)w*(nn)pppp", &coded, &image_width,
                          &image_height, &image.colour, &palette, &left, &top, &width, &height,
                          &out, &rows, &columns, &options[0], &options[1], &options[2],
                          &options[3]))
        return NULL;
    if (read_image(&image, &coded, image_width, image_height, &palette))
        ; /* the error is set */
    else if (left < 0 || top < 0 || width < 1 || height < 1 || left >= image_width ||
             top >= image_height || width > image_width - left || height > image_height - top)
        PyErr_SetString(PyExc_ValueError, "the box does not lie inside the image");
    else if (rows < 1 || rows > MAX_SIZE || columns < 1 || columns > MAX_SIZE ||
             columns > MAX_PIXELS / height)
        PyErr_SetString(PyExc_ValueError, "the output is larger than allowed");
    else if (out.len != rows * columns * CHANNELS)
        PyErr_SetString(PyExc_ValueError, "the buffer does not have the size of the output");
    else {
        struct box box = {(size_t)left, (size_t)top, (size_t)width, (size_t)height};
        failed = crop_unlocked(&image, &box, (int)rows, (int)columns, options, out.buf);
    }
    PyBuffer_Release(&coded);
    PyBuffer_Release(&palette);
    PyBuffer_Release(&out);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"whole", whole, METH_VARARGS, "whole(coded, (width, height, colour), palette, out)"},
    {"crop", crop, METH_VARARGS,
     "crop(coded, (width, height, colour), palette, (left, top, width, height), out, (rows, "
     "columns), cubic, antialias, flip, allow_avx2): fills out with planes"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_png", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__png(void)
{
    return PyModule_Create(&definition);
}
