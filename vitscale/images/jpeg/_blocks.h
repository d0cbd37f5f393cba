/* Coefficients to samples to RGB, equal to libjpeg-turbo's accurate settings. AVX2 only. */
#ifndef VITSCALE_BLOCKS_H
#define VITSCALE_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

/* Coefficients of two blocks side by side: row i of the first at 16 i, of the second at 16 i + 8.
 * Unused space after them takes coefficients past step 63. */
#define PAIR_SIZE (128 + 16)
#define NOWHERE 128
/* Samples that may be read and written past the end of a row. */
#define SAMPLE_PADDING 64

/* Inverse DCT of both blocks, 8 rows of 8 samples each; `second` may be NULL. `quant` is [128],
 * every row twice. Returns nonzero if coefficients are so large that decoders differ. */
int blocks_transform(const int16_t *pair, const int16_t *quant, uint8_t *first, uint8_t *second,
                     size_t stride);
/* One row of chroma, `num` samples [from, from + num) of `width`, to twice as many. `far` is the
 * neighbouring row to interpolate with, NULL if rows are not halved. `sums` has space for
 * num + SAMPLE_PADDING. */
void blocks_double(const uint8_t *near, const uint8_t *far, int from, int num, int width,
                   uint16_t *sums, uint8_t *out);
/* `num` pixels of three planes to interleaved RGB. */
void blocks_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int num, uint8_t *out);
void blocks_grey_to_rgb(const uint8_t *y, int num, uint8_t *out);

#endif
