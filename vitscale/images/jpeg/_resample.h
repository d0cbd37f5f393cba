/* Resample rows of RGB pixels to planes, like torch for uint8. */
#ifndef VITSCALE_RESAMPLE_H
#define VITSCALE_RESAMPLE_H

#include <stdint.h>

/* Bytes past the end of a row that may be read but are not used. */
#define ROW_PADDING 32

struct axis {
    int num_taps;     /* of every output position, even; unused ones have weight 0 */
    int precision;    /* weights are multiples of 2 ** -precision */
    int32_t *first;   /* [size] input position of the first tap */
    int16_t *weights; /* [size, num_taps] */
};

struct resampler {
    int width, height; /* of the input */
    int rows, columns; /* of the output */
    int with_avx2;
    int stride; /* bytes between rows of one plane in `strips` */
    struct axis x, y;
    int16_t *lanes;   /* weights of x for AVX2; see _resample.c */
    int32_t *offsets; /* bytes to the first tap of x, for AVX2 */
    uint8_t *is_used; /* [height] 0 for input rows that no output row uses */
    uint8_t *strips;  /* [height + 1, 3, stride] rows after the horizontal pass */
};

/* 0, or -1 if out of memory; call `resampler_close` in both cases. */
int resampler_open(struct resampler *r, int width, int height, int rows, int columns,
                   int is_cubic, int antialias, int flip, int allow_avx2);
/* A used row, of width * 3 bytes, followed by ROW_PADDING readable bytes. */
void resampler_take_row(struct resampler *r, int y, const uint8_t *row);
/* out: [3, rows, columns] */
void resampler_finish(const struct resampler *r, uint8_t *out);
void resampler_close(struct resampler *r);

/* A box of an image whose rows pass by once, and its resampler. */
struct part {
    int left, top; /* in the rows that pass by */
    struct resampler resampler;
};

/* Several boxes, which may overlap: each row is given to all that it touches. */
struct sink {
    int num_parts;
    struct part *parts;
};

/* Whether a resampler uses some of this row, and then which of its pixels, from *first to *stop. */
int sink_needs_row(const struct sink *sink, int y, int *first, int *stop);
/* The needed pixels of a row of all boxes, followed by ROW_PADDING readable bytes. */
void sink_take_row(struct sink *sink, int y, const uint8_t *row);

#endif
