/* Rows of RGB pixels in, a square of planes out: the resampling of torch's uint8 images. */
#ifndef VITSCALE_RESAMPLE_H
#define VITSCALE_RESAMPLE_H

#include <stdint.h>

/* Bytes behind a row that may be read, never used. */
#define ROW_PADDING 32

struct axis {
    int num_taps;     /* of every output position, even; unused ones have weight 0 */
    int precision;    /* weights are multiples of 2 ** -precision */
    int32_t *first;   /* [size] input position of the first tap */
    int16_t *weights; /* [size, num_taps] */
};

struct resampler {
    int width, height, size; /* of the input; side of the output */
    int with_avx2;
    int stride; /* bytes between rows of one plane in `strips` */
    struct axis x, y;
    int16_t *lanes;   /* weights of x as AVX2 wants them; see _resample.c */
    int32_t *offsets; /* bytes to the first tap of x, for AVX2 */
    uint8_t *is_used; /* [height] 0 where no output row looks at an input row */
    uint8_t *strips;  /* [height + 1, 3, stride] rows after the horizontal pass */
};

/* 0, or -1 if memory is short; `resampler_close` is due in both cases. */
int resampler_open(struct resampler *r, int width, int height, int size, int is_cubic,
                   int antialias, int flip, int allow_avx2);
/* One row of width * 3 bytes, ROW_PADDING readable bytes behind it. */
void resampler_take_row(struct resampler *r, int y, const uint8_t *row);
/* out: [3, size, size] */
void resampler_finish(const struct resampler *r, uint8_t *out);
void resampler_close(struct resampler *r);

#endif
