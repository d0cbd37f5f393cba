/* Undo the filters of PNG rows: Sub, Up, Average, Paeth (PNG specification, section 9).
 *
 * A pixel depends on its left neighbour, so pixels are decoded one by one. With SSE2, which every
 * x86-64 processor has, all samples of a pixel are decoded together.
 */
#include "_filters.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define INLINE __attribute__((always_inline)) static inline
#define MAX_SAMPLES 4

/* a left, b above, c above left. The specification's choice of the nearest to a + b - c, without
 * distances, as in stb_image. */
INLINE int paeth(int a, int b, int c)
{
    int threshold = 3 * c - b - a, low = a < b ? a : b, high = a < b ? b : a;
    int nearest = high <= threshold ? low : c;

    return threshold <= low ? high : nearest;
}

INLINE void plain(int filter, const uint8_t *coded, const uint8_t *above, uint8_t *row,
                  size_t num_bytes, size_t samples)
{
    int a[MAX_SAMPLES] = {0}, c[MAX_SAMPLES] = {0};
    size_t i, k;

    for (i = 0; i < num_bytes; i += samples)
        for (k = 0; k < samples; k++) {
            int b = above[i + k], predicted = a[k];
            if (filter == FILTER_AVERAGE)
                predicted = (a[k] + b) >> 1;
            else if (filter == FILTER_PAETH)
                predicted = paeth(a[k], b, c[k]);
            a[k] = (coded[i + k] + predicted) & 255;
            c[k] = b;
            row[i + k] = (uint8_t)a[k];
        }
}

#ifdef __SSE2__
INLINE __m128i load(const uint8_t *from, size_t num_bytes)
{
    int32_t word = 0;

    memcpy(&word, from, num_bytes);
    return _mm_cvtsi32_si128(word);
}

INLINE void store(uint8_t *to, __m128i pixel)
{
    int32_t word = _mm_cvtsi128_si32(pixel);

    memcpy(to, &word, 4);
}

INLINE __m128i either(__m128i mask, __m128i yes, __m128i no)
{
    return _mm_or_si128(_mm_and_si128(mask, yes), _mm_andnot_si128(mask, no));
}

INLINE __m128i average(__m128i a, __m128i b)
{
    /* The instruction rounds up, PNG rounds down. */
    __m128i odd = _mm_and_si128(_mm_xor_si128(a, b), _mm_set1_epi8(1));

    return _mm_sub_epi8(_mm_avg_epu8(a, b), odd);
}

/* 16-bit lanes. `rest` is 3 c - b, which does not wait for a. */
INLINE __m128i paeth_lanes(__m128i a, __m128i b, __m128i c, __m128i rest)
{
    __m128i threshold = _mm_sub_epi16(rest, a);
    __m128i low = _mm_min_epi16(a, b), high = _mm_max_epi16(a, b);
    __m128i nearest = either(_mm_cmpgt_epi16(high, threshold), c, low);

    return either(_mm_cmpgt_epi16(threshold, low), nearest, high);
}

/* 3 or 4 samples. The fourth byte of a pixel of 3 is overwritten by the next pixel. */
INLINE void vectors(int filter, const uint8_t *coded, const uint8_t *above, uint8_t *row,
                    size_t num_bytes, size_t samples)
{
    const __m128i zero = _mm_setzero_si128(), bytes = _mm_set1_epi16(255);
    __m128i a = zero, c = zero; /* bytes; 16-bit lanes for Paeth */
    size_t i, last = num_bytes - samples;

    for (i = 0; i <= last; i += samples) {
        __m128i x = load(coded + i, i < last ? 4 : samples), b = load(above + i, 4);
        if (filter == FILTER_PAETH) {
            x = _mm_unpacklo_epi8(x, zero);
            b = _mm_unpacklo_epi8(b, zero);
            __m128i rest = _mm_sub_epi16(_mm_add_epi16(_mm_add_epi16(c, c), c), b);
            a = _mm_and_si128(_mm_add_epi16(x, paeth_lanes(a, b, c, rest)), bytes);
            c = b;
            store(row + i, _mm_packus_epi16(a, a));
            continue;
        }
        a = _mm_add_epi8(x, filter == FILTER_SUB ? a : average(a, b));
        store(row + i, a);
    }
}
#define DECODE_3_4 vectors
#else
#define DECODE_3_4 plain
#endif

/* Called with a constant, so that each filter gets loops of its own. */
INLINE void decode(int filter, const uint8_t *coded, const uint8_t *above, uint8_t *row,
                   size_t num_bytes, size_t samples)
{
    switch (samples) {
    case 1: plain(filter, coded, above, row, num_bytes, 1); break;
    case 2: plain(filter, coded, above, row, num_bytes, 2); break;
    case 3: DECODE_3_4(filter, coded, above, row, num_bytes, 3); break;
    default: DECODE_3_4(filter, coded, above, row, num_bytes, 4);
    }
}

void undo_filter(int filter, const uint8_t *coded, const uint8_t *above, uint8_t *row,
                 size_t num_bytes, size_t samples)
{
    size_t i;

    switch (filter) {
    case FILTER_SUB: decode(FILTER_SUB, coded, above, row, num_bytes, samples); break;
    case FILTER_UP:
        for (i = 0; i < num_bytes; i++)
            row[i] = (uint8_t)(coded[i] + above[i]);
        break;
    case FILTER_AVERAGE: decode(FILTER_AVERAGE, coded, above, row, num_bytes, samples); break;
    case FILTER_PAETH: decode(FILTER_PAETH, coded, above, row, num_bytes, samples); break;
    default: memcpy(row, coded, num_bytes);
    }
}
