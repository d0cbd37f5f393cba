/* Bilinear and bicubic resampling in integers, bit for bit as torch does it for uint8.
 *
 * Owns: the weights, the two passes, and their AVX2 forms.
 * Leaves out: decoding the rows (_region.c).
 *
 * torch's rules, which Pillow's antialiased resizing shares: weights in double precision, rounded
 * to 16 bits with the largest common exponent; horizontally first, rounded and clipped to uint8,
 * then vertically. A mirrored output costs nothing: the horizontal weights are reversed.
 */
#include "_resample.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 1
#include <immintrin.h>
#else
#define HAS_AVX2 0
#endif

#define CHANNELS 3
#define MAX_PRECISION 22

static double linear(double x)
{
    x = fabs(x);
    return x < 1 ? 1 - x : 0;
}

/* Keys' cubic; torch takes a = -0.5 with antialiasing (as Pillow) and -0.75 without (as OpenCV). */
static double cubic(double x, double a)
{
    x = fabs(x);
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

/* Taps of one output position: returns how many, their weights in `w`, the first in *first. */
static int smooth_taps(int i, int num_in, double scale, int is_cubic, double *w, int *first)
{
    double reach = (is_cubic ? 2 : 1) * (scale > 1 ? scale : 1), shrink = scale > 1 ? 1 / scale : 1;
    double center = scale * (i + 0.5), total = 0;
    int start = (int)(center - reach + 0.5), stop = (int)(center + reach + 0.5), j;

    start = start < 0 ? 0 : start;
    stop = stop > num_in ? num_in : stop;
    for (j = 0; j < stop - start; j++) {
        double x = (j + start - center + 0.5) * shrink;
        w[j] = is_cubic ? cubic(x, -0.5) : linear(x);
        total += w[j];
    }
    for (j = 0; j < stop - start && total != 0; j++)
        w[j] /= total;
    *first = start;
    return stop - start;
}

static int sharp_taps(int i, int num_in, double scale, int is_cubic, double *w, int *first)
{
    int reach = is_cubic ? 2 : 1, index, low, start, stop, j, k = 0;
    double place = scale * (i + 0.5) - 0.5, rest;

    if (!is_cubic && place < 0)
        place = 0;
    index = (int)(float)place;
    index -= (float)index > (float)place; /* rounded down; floorf would take longer than all else */
    index = index > num_in - 1 ? num_in - 1 : index;
    rest = place - index;
    rest = rest < 0 ? 0 : rest > 1 ? 1 : rest;
    low = index - reach + 1;
    start = low < 0 ? 0 : low;
    stop = index + reach + 1 > num_in ? num_in : index + reach + 1;
    for (j = 0; j < stop - start; j++)
        w[j] = 0;
    for (j = 0; j < 2 * reach; j++) { /* taps past an edge use the edge */
        double x = j + 1 - reach - rest;
        k = low + j <= 0 ? 0 : low + j >= num_in - 1 ? stop - start - 1 : low + j - start;
        w[k] += is_cubic ? cubic(x, -0.75) : linear(x);
    }
    *first = start;
    return stop - start;
}

static int16_t rounded(double weight, int precision)
{
    weight *= 1 << precision;
    return (int16_t)(int)(weight < 0 ? weight - 0.5 : weight + 0.5);
}

static int axis_open(struct axis *axis, int num_in, int size, int is_cubic, int antialias, int flip)
{
    double scale = (double)num_in / size, largest = 0;
    int bound = (int)ceil((is_cubic ? 2 : 1) * (antialias && scale > 1 ? scale : 1)) * 2 + 1;
    double *exact = malloc(sizeof *exact * bound * size);
    int *counts = malloc(sizeof *counts * size);
    int i, j, most = 1;

    axis->first = malloc(sizeof *axis->first * size);
    if (exact == NULL || counts == NULL || axis->first == NULL)
        goto done;
    for (i = 0; i < size; i++) {
        double *w = exact + (size_t)i * bound;
        int *first = axis->first + (flip ? size - 1 - i : i);
        counts[i] = (antialias ? smooth_taps : sharp_taps)(i, num_in, scale, is_cubic, w, first);
        most = counts[i] > most ? counts[i] : most;
        for (j = 0; j < counts[i]; j++)
            largest = w[j] > largest ? w[j] : largest;
    }
    for (axis->precision = 0; axis->precision < MAX_PRECISION; axis->precision++)
        if ((int)(0.5 + largest * (1 << (axis->precision + 1))) >= 1 << 15)
            break;
    axis->num_taps = most + most % 2;
    axis->weights = calloc((size_t)size * axis->num_taps, sizeof *axis->weights);
    if (axis->weights == NULL)
        goto done;
    for (i = 0; i < size; i++) {
        int place = flip ? size - 1 - i : i, latest = num_in - axis->num_taps, shift = 0;
        /* Unused taps must not exceed the row (except one, if the row is shorter). */
        if (axis->first[place] > latest) {
            shift = axis->first[place] - (latest < 0 ? 0 : latest);
            axis->first[place] -= shift;
        }
        for (j = 0; j < counts[i]; j++)
            axis->weights[(size_t)place * axis->num_taps + shift + j] =
                rounded(exact[(size_t)i * bound + j], axis->precision);
    }
done:
    free(exact);
    free(counts);
    return axis->weights == NULL ? -1 : 0;
}

static uint8_t clipped(int32_t value)
{
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static void row_portable(const struct resampler *r, const uint8_t *row, uint8_t *strip)
{
    const struct axis *x = &r->x;
    const int32_t half = 1 << (x->precision - 1);
    const int16_t *w = x->weights;
    int i, k;

    for (i = 0; i < r->columns; i++, w += x->num_taps) {
        const uint8_t *taps = row + (size_t)x->first[i] * CHANNELS;
        int32_t red = half, green = half, blue = half;
        for (k = 0; k < x->num_taps; k++, taps += CHANNELS) {
            red += w[k] * taps[0];
            green += w[k] * taps[1];
            blue += w[k] * taps[2];
        }
        strip[i] = clipped(red >> x->precision);
        strip[r->stride + i] = clipped(green >> x->precision);
        strip[2 * r->stride + i] = clipped(blue >> x->precision);
    }
}

static const uint8_t *strip_of(const struct resampler *r, int y)
{
    return r->strips + (size_t)y * CHANNELS * r->stride;
}

static void column_portable(const struct resampler *r, int i, int c, uint8_t *out)
{
    const struct axis *y = &r->y;
    const int16_t *w = y->weights + (size_t)i * y->num_taps;
    const uint8_t *strip = strip_of(r, y->first[i]) + (size_t)c * r->stride;
    int32_t sums[32]; /* blocks of a size that compilers vectorise; strips are padded */
    int j, k, m;

    for (j = 0; j < r->columns; j += 32) {
        const uint8_t *taps = strip + j;
        for (m = 0; m < 32; m++)
            sums[m] = 1 << (y->precision - 1);
        for (k = 0; k < y->num_taps; k++, taps += (size_t)r->stride * CHANNELS)
            for (m = 0; m < 32; m++)
                sums[m] += w[k] * taps[m];
        for (m = 0; m < 32 && j + m < r->columns; m++)
            out[j + m] = clipped(sums[m] >> y->precision);
    }
}

#if HAS_AVX2
#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE __attribute__((target("avx2"), always_inline)) static inline

/* Weights in register order, [columns / 2, num_taps / 2, 2, 4, 2]: one output position per
 * 128 bit half; in a half, a pair of taps is repeated for R, G, B and an unused lane. */
static int lanes_open(struct resampler *r)
{
    const struct axis *x = &r->x;
    size_t num = (size_t)(r->columns + 7) / 8 * 8, pairs = (size_t)x->num_taps / 2, i, k, c;

    r->lanes = calloc(num * pairs * 8, sizeof *r->lanes);
    r->offsets = calloc(num, sizeof *r->offsets); /* 0 past the last: their results are unused */
    if (r->lanes == NULL || r->offsets == NULL)
        return -1;
    for (i = 0; i < (size_t)r->columns; i++) {
        r->offsets[i] = x->first[i] * CHANNELS;
        for (k = 0; k < pairs; k++)
            for (c = 0; c < 4; c++)
                memcpy(r->lanes + ((i / 2 * pairs + k) * 2 + i % 2) * 8 + c * 2,
                       x->weights + i * x->num_taps + k * 2, 2 * sizeof(int16_t));
    }
    return 0;
}

AVX2_INLINE __m256i two_positions(const uint8_t *row, const int32_t *offsets, const int16_t *w,
                                  int pairs, __m256i half, __m128i shift)
{
    /* Bytes r g b R G B ... of two pixels to 16 bit pairs (r R) (g G) (b B) (0 0). */
    const __m256i pairs_of = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1,
                                              -1, 0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1,
                                              -1, -1);
    const uint8_t *a = row + offsets[0], *b = row + offsets[1];
    __m256i sum = half;
    int k;

    for (k = 0; k < pairs; k++) {
        __m128i first = _mm_loadu_si128((const __m128i *)(a + 6 * k));
        __m128i second = _mm_loadu_si128((const __m128i *)(b + 6 * k));
        __m256i taps = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
        __m256i weights = _mm256_loadu_si256((const __m256i *)(w + 16 * k));
        taps = _mm256_shuffle_epi8(taps, pairs_of);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(taps, weights));
    }
    return _mm256_sra_epi32(sum, shift);
}

AVX2_INLINE void row_of_pairs(const struct resampler *r, const uint8_t *row, uint8_t *strip,
                              int pairs)
{
    /* r g b x of the four positions of a half to rrrr gggg bbbb. */
    const __m256i planes = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1,
                                            0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1);
    const __m256i half = _mm256_set1_epi32(1 << (r->x.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(r->x.precision);
    const int16_t *w = r->lanes;
    int i, k;

    for (i = 0; i < r->columns; i += 8) {
        __m256i two[4], bytes;
        __m128i even, odd, red_green;
        for (k = 0; k < 4; k++, w += 16 * pairs)
            two[k] = two_positions(row, r->offsets + i + 2 * k, w, pairs, half, shift);
        bytes = _mm256_packus_epi16(_mm256_packs_epi32(two[0], two[1]),
                                    _mm256_packs_epi32(two[2], two[3]));
        bytes = _mm256_shuffle_epi8(bytes, planes);
        even = _mm256_castsi256_si128(bytes);
        odd = _mm256_extracti128_si256(bytes, 1);
        red_green = _mm_unpacklo_epi8(even, odd);
        _mm_storel_epi64((__m128i *)(strip + i), red_green);
        _mm_storeh_pd((double *)(strip + r->stride + i), _mm_castsi128_pd(red_green));
        _mm_storel_epi64((__m128i *)(strip + 2 * r->stride + i), _mm_unpackhi_epi8(even, odd));
    }
}

/* The usual numbers of taps get loops of known length. */
AVX2 static void row_avx2(const struct resampler *r, const uint8_t *row, uint8_t *strip)
{
    switch (r->x.num_taps) {
    case 2: row_of_pairs(r, row, strip, 1); break;
    case 4: row_of_pairs(r, row, strip, 2); break;
    case 6: row_of_pairs(r, row, strip, 3); break;
    case 8: row_of_pairs(r, row, strip, 4); break;
    default: row_of_pairs(r, row, strip, r->x.num_taps / 2);
    }
}

AVX2_INLINE void column_of_pairs(const struct resampler *r, const uint8_t *strip,
                                 const int16_t *weights, uint8_t *out, int pairs)
{
    const __m256i half = _mm256_set1_epi32(1 << (r->y.precision - 1));
    const __m256i zero = _mm256_setzero_si256();
    const __m128i shift = _mm_cvtsi32_si128(r->y.precision);
    const size_t next = (size_t)r->stride * CHANNELS;
    int j, k;

    for (j = 0; j < r->columns; j += 32) {
        __m256i a0 = half, a1 = half, b0 = half, b1 = half, a, b, low, high, weight;
        const uint8_t *taps = strip + j;
        for (k = 0; k < pairs; k++, taps += 2 * next) {
            int32_t both;
            memcpy(&both, weights + 2 * k, sizeof both);
            weight = _mm256_set1_epi32(both);
            a = _mm256_loadu_si256((const __m256i *)taps);
            b = _mm256_loadu_si256((const __m256i *)(taps + next));
            low = _mm256_unpacklo_epi8(a, b);
            high = _mm256_unpackhi_epi8(a, b);
            a0 = _mm256_add_epi32(a0, _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), weight));
            a1 = _mm256_add_epi32(a1, _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), weight));
            b0 = _mm256_add_epi32(b0, _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), weight));
            b1 = _mm256_add_epi32(b1, _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), weight));
        }
        low = _mm256_packs_epi32(_mm256_sra_epi32(a0, shift), _mm256_sra_epi32(a1, shift));
        high = _mm256_packs_epi32(_mm256_sra_epi32(b0, shift), _mm256_sra_epi32(b1, shift));
        low = _mm256_packus_epi16(low, high);
        if (j + 32 <= r->columns)
            _mm256_storeu_si256((__m256i *)(out + j), low);
        else {
            uint8_t rest[32];
            _mm256_storeu_si256((__m256i *)rest, low);
            memcpy(out + j, rest, (size_t)(r->columns - j));
        }
    }
}

AVX2 static void column_avx2(const struct resampler *r, int i, int c, uint8_t *out)
{
    const uint8_t *strip = strip_of(r, r->y.first[i]) + (size_t)c * r->stride;
    const int16_t *w = r->y.weights + (size_t)i * r->y.num_taps;

    switch (r->y.num_taps) {
    case 2: column_of_pairs(r, strip, w, out, 1); break;
    case 4: column_of_pairs(r, strip, w, out, 2); break;
    case 6: column_of_pairs(r, strip, w, out, 3); break;
    case 8: column_of_pairs(r, strip, w, out, 4); break;
    default: column_of_pairs(r, strip, w, out, r->y.num_taps / 2);
    }
}
#endif

int resampler_open(struct resampler *r, int width, int height, int rows, int columns,
                   int is_cubic, int antialias, int flip, int allow_avx2)
{
    int i, k;

    memset(r, 0, sizeof *r);
    r->width = width;
    r->height = height;
    r->rows = rows;
    r->columns = columns;
    r->stride = (columns + 31) / 32 * 32;
    if (axis_open(&r->x, width, columns, is_cubic, antialias, flip) ||
        axis_open(&r->y, height, rows, is_cubic, antialias, 0))
        return -1;
    /* One row more: if the input has fewer rows than taps, an unused tap exceeds it. */
    r->strips = malloc((size_t)(height + 1) * CHANNELS * r->stride);
    r->is_used = calloc((size_t)height, 1);
    if (r->strips == NULL || r->is_used == NULL)
        return -1;
    for (i = 0; i < rows; i++)
        for (k = 0; k < r->y.num_taps && r->y.first[i] + k < height; k++)
            r->is_used[r->y.first[i] + k] = 1;
    (void)allow_avx2;
#if HAS_AVX2
    r->with_avx2 = allow_avx2 && __builtin_cpu_supports("avx2");
    if (r->with_avx2)
        return lanes_open(r);
#endif
    return 0;
}

void resampler_take_row(struct resampler *r, int y, const uint8_t *row)
{
    uint8_t *strip = r->strips + (size_t)y * CHANNELS * r->stride;

#if HAS_AVX2
    if (r->with_avx2) {
        row_avx2(r, row, strip);
        return;
    }
#endif
    row_portable(r, row, strip);
}

void resampler_finish(const struct resampler *r, uint8_t *out)
{
    int i, c;

    for (c = 0; c < CHANNELS; c++)
        for (i = 0; i < r->rows; i++, out += r->columns) {
#if HAS_AVX2
            if (r->with_avx2) {
                column_avx2(r, i, c, out);
                continue;
            }
#endif
            column_portable(r, i, c, out);
        }
}

void resampler_close(struct resampler *r)
{
    free(r->x.first);
    free(r->x.weights);
    free(r->y.first);
    free(r->y.weights);
    free(r->lanes);
    free(r->offsets);
    free(r->is_used);
    free(r->strips);
}

/* A part covers the rows from its top to its top plus its height. */
static int part_needs_row(const struct part *part, int y)
{
    int row = y - part->top;

    return row >= 0 && row < part->resampler.height && part->resampler.is_used[row];
}

int sink_needs_row(const struct sink *sink, int y, int *first, int *stop)
{
    int i;

    *first = INT_MAX;
    *stop = 0;
    for (i = 0; i < sink->num_parts; i++) {
        const struct part *part = &sink->parts[i];
        int right = part->left + part->resampler.width;
        if (!part_needs_row(part, y))
            continue;
        *first = part->left < *first ? part->left : *first;
        *stop = right > *stop ? right : *stop;
    }
    return *stop > 0;
}

void sink_take_row(struct sink *sink, int y, const uint8_t *row)
{
    int i;

    for (i = 0; i < sink->num_parts; i++) {
        struct part *part = &sink->parts[i];
        if (part_needs_row(part, y))
            resampler_take_row(&part->resampler, y - part->top,
                               row + (size_t)part->left * CHANNELS);
    }
}
