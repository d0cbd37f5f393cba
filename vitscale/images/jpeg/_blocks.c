/* Inverse DCT, chroma interpolation and RGB in AVX2; bit for bit as libjpeg-turbo.
 *
 * Owns: arithmetic on samples. The DCT is that of Loeffler, Ligtenberg and Moschytz (1989) in 13
 * bit fixed point, rounded like libjpeg's accurate DCT; colours follow JFIF in 16 bits.
 * Leaves out: memory of samples (_baseline.c).
 */
#include "_blocks.h"

#include "_huffman.h"

#if HAS_FAST_BASELINE
#include <immintrin.h>

#define DCT_BITS 13
#define PASS1_BITS 2

/* Pairs of factors for sums of two products, in 32 bit lanes; the first is the lower half. */
#define FACTORS(a, b) _mm256_set1_epi32((int)((uint32_t)(uint16_t)(a) | (uint32_t)(b) << 16))

struct wide {
    __m256i low, high; /* 32 bit sums of columns 0-3 and 4-7, of both blocks */
};

FAST_INLINE struct wide products(struct wide pairs, __m256i factors)
{
    struct wide sum = {_mm256_madd_epi16(pairs.low, factors),
                       _mm256_madd_epi16(pairs.high, factors)};
    return sum;
}

FAST_INLINE struct wide paired(__m256i a, __m256i b)
{
    struct wide both = {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
    return both;
}

FAST_INLINE struct wide plus(struct wide a, struct wide b)
{
    struct wide sum = {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
    return sum;
}

FAST_INLINE struct wide minus(struct wide a, struct wide b)
{
    struct wide sum = {_mm256_sub_epi32(a.low, b.low), _mm256_sub_epi32(a.high, b.high)};
    return sum;
}

/* 16 bit numbers as multiples of 2 ** -DCT_BITS */
FAST_INLINE struct wide scaled(__m256i a)
{
    const __m256i zero = _mm256_setzero_si256();
    struct wide found = {_mm256_srai_epi32(_mm256_unpacklo_epi16(zero, a), 16 - DCT_BITS),
                         _mm256_srai_epi32(_mm256_unpackhi_epi16(zero, a), 16 - DCT_BITS)};
    return found;
}

FAST_INLINE __m256i rounded(struct wide a, int shift)
{
    const __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    return _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(a.low, half), shift),
                              _mm256_srai_epi32(_mm256_add_epi32(a.high, half), shift));
}

/* Eight numbers of each column, in place. */
FAST_INLINE void dct_of_columns(__m256i *v, int shift)
{
    struct wide z26 = paired(v[2], v[6]), z71 = paired(v[7], v[1]), z53 = paired(v[5], v[3]);
    struct wide z = paired(_mm256_add_epi16(v[7], v[3]), _mm256_add_epi16(v[5], v[1]));
    struct wide t3 = products(z26, FACTORS(10703, 4433)), t2 = products(z26, FACTORS(4433, -10704));
    struct wide t0 = scaled(_mm256_add_epi16(v[0], v[4])),
                t1 = scaled(_mm256_sub_epi16(v[0], v[4]));
    struct wide t10 = plus(t0, t3), t13 = minus(t0, t3), t11 = plus(t1, t2), t12 = minus(t1, t2);
    struct wide z3 = products(z, FACTORS(-6436, 9633)), z4 = products(z, FACTORS(9633, 6437));

    t0 = plus(products(z71, FACTORS(-4927, -7373)), z3);
    t3 = plus(products(z71, FACTORS(-7373, 4926)), z4);
    t1 = plus(products(z53, FACTORS(-4176, -20995)), z4);
    t2 = plus(products(z53, FACTORS(-20995, 4177)), z3);
    v[0] = rounded(plus(t10, t3), shift);
    v[7] = rounded(minus(t10, t3), shift);
    v[1] = rounded(plus(t11, t2), shift);
    v[6] = rounded(minus(t11, t2), shift);
    v[2] = rounded(plus(t12, t1), shift);
    v[5] = rounded(minus(t12, t1), shift);
    v[3] = rounded(plus(t13, t0), shift);
    v[4] = rounded(minus(t13, t0), shift);
}

/* Transpose each block. */
FAST_INLINE void transpose(__m256i *v)
{
    __m256i a[8], b[8];
    int i;

    for (i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_epi16(v[2 * i], v[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi16(v[2 * i], v[2 * i + 1]);
    }
    for (i = 0; i < 2; i++) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpackhi_epi32(a[i], a[i + 2]);
        b[i + 4] = _mm256_unpacklo_epi32(a[i + 4], a[i + 6]);
        b[i + 6] = _mm256_unpackhi_epi32(a[i + 4], a[i + 6]);
    }
    for (i = 0; i < 2; i++) {
        v[4 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]);
        v[4 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
        v[4 * i + 2] = _mm256_unpacklo_epi64(b[i + 2], b[i + 6]);
        v[4 * i + 3] = _mm256_unpackhi_epi64(b[i + 2], b[i + 6]);
    }
}

/* Columns of 16 bit numbers around 0 to rows of samples, two in each half of rows[4]. */
FAST_INLINE void rows_of_samples(const __m256i *v, __m256i *rows)
{
    __m256i p[4], u[4], w[4];
    int i;

    for (i = 0; i < 4; i++)
        p[i] = _mm256_packs_epi16(v[i], v[i + 4]);
    for (i = 0; i < 2; i++) {
        u[i] = _mm256_unpacklo_epi8(p[2 * i], p[2 * i + 1]);
        u[i + 2] = _mm256_unpackhi_epi8(p[2 * i], p[2 * i + 1]);
    }
    for (i = 0; i < 2; i++) {
        w[i] = _mm256_unpacklo_epi16(u[2 * i], u[2 * i + 1]);
        w[i + 2] = _mm256_unpackhi_epi16(u[2 * i], u[2 * i + 1]);
    }
    for (i = 0; i < 2; i++) {
        rows[2 * i] = _mm256_unpacklo_epi32(w[2 * i], w[2 * i + 1]);
        rows[2 * i + 1] = _mm256_unpackhi_epi32(w[2 * i], w[2 * i + 1]);
    }
    for (i = 0; i < 4; i++)
        rows[i] = _mm256_add_epi8(rows[i], _mm256_set1_epi8(-128));
}

FAST_INLINE void store_block(const __m128i *rows, uint8_t *to, size_t stride)
{
    int i;

    for (i = 0; i < 4; i++, to += 2 * stride) {
        _mm_storel_epi64((__m128i *)to, rows[i]);
        _mm_storel_epi64((__m128i *)(to + stride), _mm_unpackhi_epi64(rows[i], rows[i]));
    }
}

FAST int blocks_transform(const int16_t *pair, const int16_t *quant, uint8_t *first,
                          uint8_t *second, size_t stride)
{
    __m256i v[8], rows[4], beyond = _mm256_setzero_si256();
    __m128i half[4];
    int i;

    for (i = 0; i < 8; i++) {
        __m256i stored = _mm256_load_si256((const __m256i *)pair + i);
        __m256i factor = _mm256_load_si256((const __m256i *)quant + i), sign;
        v[i] = _mm256_mullo_epi16(stored, factor);
        sign = _mm256_srai_epi16(v[i], 15);
        beyond = _mm256_or_si256(beyond, _mm256_srli_epi16(_mm256_xor_si256(v[i], sign), 13));
        sign = _mm256_xor_si256(sign, _mm256_mulhi_epi16(stored, factor));
        beyond = _mm256_or_si256(beyond, sign);
    }
    dct_of_columns(v, DCT_BITS - PASS1_BITS);
    transpose(v);
    dct_of_columns(v, DCT_BITS + PASS1_BITS + 3);
    rows_of_samples(v, rows);
    for (i = 0; i < 4; i++)
        half[i] = _mm256_castsi256_si128(rows[i]);
    store_block(half, first, stride);
    if (second != NULL) {
        for (i = 0; i < 4; i++)
            half[i] = _mm256_extracti128_si256(rows[i], 1);
        store_block(half, second, stride);
    }
    return !_mm256_testz_si256(beyond, beyond);
}

FAST void blocks_double(const uint8_t *near, const uint8_t *far, int from, int num, int width,
                        uint16_t *sums, uint8_t *out)
{
    /* sums[i + 1] belongs to sample from + i; one more on both sides, repeated at an edge. */
    int first = from > 0 ? -1 : 0, last = from + num < width ? num : num - 1, i;

    if (far == NULL)
        for (i = first; i <= last; i++)
            sums[i + 1] = near[i];
    else
        for (i = first; i <= last; i++)
            sums[i + 1] = (uint16_t)(3 * near[i] + far[i]);
    if (first == 0)
        sums[0] = sums[1];
    if (last == num - 1)
        sums[num + 1] = sums[num];
    for (i = 0; i < num; i += 16) {
        __m256i own = _mm256_loadu_si256((const __m256i *)(sums + i + 1));
        __m256i before = _mm256_loadu_si256((const __m256i *)(sums + i));
        __m256i behind = _mm256_loadu_si256((const __m256i *)(sums + i + 2));
        own = _mm256_add_epi16(own, _mm256_add_epi16(own, own));
        before = _mm256_add_epi16(own, before);
        behind = _mm256_add_epi16(own, behind);
        if (far == NULL) {
            before = _mm256_srli_epi16(_mm256_add_epi16(before, _mm256_set1_epi16(1)), 2);
            behind = _mm256_srli_epi16(_mm256_add_epi16(behind, _mm256_set1_epi16(2)), 2);
        } else {
            before = _mm256_srli_epi16(_mm256_add_epi16(before, _mm256_set1_epi16(8)), 4);
            behind = _mm256_srli_epi16(_mm256_add_epi16(behind, _mm256_set1_epi16(7)), 4);
        }
        before = _mm256_or_si256(before, _mm256_slli_epi16(behind, 8));
        _mm256_storeu_si256((__m256i *)(out + 2 * i), before);
    }
}

/* 16 pixels of three planes to 48 bytes. */
FAST_INLINE void store_rgb(__m128i r, __m128i g, __m128i b, uint8_t *out)
{
    const __m128i red = _mm_setr_epi8(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5);
    const __m128i green = _mm_setr_epi8(5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10);
    const __m128i blue = _mm_setr_epi8(10, 5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15);
    const __m128i mask0 = _mm_setr_epi8(-1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1);
    const __m128i mask1 = _mm_setr_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0);

    r = _mm_shuffle_epi8(r, red);
    g = _mm_shuffle_epi8(g, green);
    b = _mm_shuffle_epi8(b, blue);
    _mm_storeu_si128((__m128i *)out, _mm_blendv_epi8(_mm_blendv_epi8(b, g, mask1), r, mask0));
    _mm_storeu_si128((__m128i *)(out + 16),
                     _mm_blendv_epi8(_mm_blendv_epi8(r, b, mask1), g, mask0));
    _mm_storeu_si128((__m128i *)(out + 32),
                     _mm_blendv_epi8(_mm_blendv_epi8(g, r, mask1), b, mask0));
}

FAST_INLINE __m128i samples(__m256i a)
{
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(a, a), 0x08);
    return _mm256_castsi256_si128(packed);
}

/* (2 * factor * a + 2 ** 16) / 2 ** 17, rounded down */
FAST_INLINE __m256i share_of(__m256i a, int factor)
{
    a = _mm256_mulhi_epi16(_mm256_add_epi16(a, a), _mm256_set1_epi16((short)factor));
    return _mm256_srai_epi16(_mm256_add_epi16(a, _mm256_set1_epi16(1)), 1);
}

FAST void blocks_to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int num,
                        uint8_t *out)
{
    const __m256i middle = _mm256_set1_epi16(128), half = _mm256_set1_epi32(1 << 15);
    int i;

    for (i = 0; i < num; i += 16, out += 48) {
        __m256i light = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(y + i)));
        __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(cb + i)));
        __m256i r = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(cr + i)));
        __m256i low, high, green;
        b = _mm256_sub_epi16(b, middle);
        r = _mm256_sub_epi16(r, middle);
        /* Green takes -0.34414 of blue and -0.71414 of red, the latter as 0.28586 - 1. */
        low = _mm256_madd_epi16(_mm256_unpacklo_epi16(b, r), FACTORS(-22554, 18734));
        high = _mm256_madd_epi16(_mm256_unpackhi_epi16(b, r), FACTORS(-22554, 18734));
        low = _mm256_srai_epi32(_mm256_add_epi32(low, half), 16);
        high = _mm256_srai_epi32(_mm256_add_epi32(high, half), 16);
        green = _mm256_sub_epi16(_mm256_packs_epi32(low, high), r);
        /* Red 1 + 0.402, blue 2 - 0.228. */
        r = _mm256_add_epi16(r, share_of(r, 26345));
        b = _mm256_add_epi16(_mm256_add_epi16(b, b), share_of(b, -14942));
        store_rgb(samples(_mm256_add_epi16(light, r)), samples(_mm256_add_epi16(light, green)),
                  samples(_mm256_add_epi16(light, b)), out);
    }
}

FAST void blocks_grey_to_rgb(const uint8_t *y, int num, uint8_t *out)
{
    int i;

    for (i = 0; i < num; i += 16, out += 48) {
        __m128i all = _mm_loadu_si128((const __m128i *)(y + i));
        store_rgb(all, all, all, out);
    }
}
#endif
