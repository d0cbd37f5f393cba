/* Decode Huffman codes of baseline JPEGs: the inner loop, which takes most of the time.
 *
 * Owns: the bits of a scan, the tables, decoding and skipping of one block.
 * Leaves out: the layout of blocks and the meaning of coefficients (_baseline.c).
 *
 * Table entries contain codes with the values that follow, two or more at a time, so that a lookup
 * takes one shift and one load. The tables are built for each image, in loops that compilers
 * vectorise.
 */
#ifndef VITSCALE_HUFFMAN_H
#define VITSCALE_HUFFMAN_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_FAST_BASELINE 1
#define FAST __attribute__((target("avx2,bmi,bmi2")))
#define FAST_INLINE __attribute__((target("avx2,bmi,bmi2"), always_inline)) static inline
#else
#define HAS_FAST_BASELINE 0
#endif

/* The tables of an image fit together into 32 KiB, the usual L1 cache. */
#define LOOK_BITS 10
#define DC_LOOK_BITS 8
/* An MCU of 10 blocks cannot read further before the end is checked: 10 * 64 * 27 bits. */
#define SCAN_PADDING 4096

/* Steps lead from one coefficient to the next nonzero one. */
#define STEPS_TO_END 128 /* the end of a block */
#define STEPS_OF_ERROR 192

/* An entry: bits 0-5 code and value together, 6-10 code, 11-14 value, 16-23 steps before it. */
struct huffman {
    uint32_t look[1 << LOOK_BITS]; /* entries by the next bits; 0: the code is longer */
    /* One or two symbols that fit into LOOK_BITS with their values; 0: not even one does. Bits
     * 0-7 length; 8-15, 16-23 steps to the two places; 24-31 steps in all; 32-47, 48-63 values. */
    uint64_t pairs[1 << LOOK_BITS];
    uint16_t skip[1 << LOOK_BITS]; /* up to four: bits 0-5 length, 8-15 steps; 0: none */
    uint32_t upper[17];            /* exclusive upper bound of codes up to this length */
    int32_t delta[17];             /* from a code of this length to its index in `symbols` */
    uint8_t symbols[256];
    int is_dc;
};

/* The entropy-coded bytes of a scan without stuffing, padded with zeros. */
struct scan {
    uint8_t *bytes;
    size_t *ends; /* of the segments between restart markers */
    size_t num_segments;
};

struct bit_reader {
    const uint8_t *next;
    uint64_t bits; /* left-aligned; the bits after the first `count` agree with `next` */
    int count;
};

/* `lengths`: number of codes of 1 to 16 bits at [1] to [16]. -1: invalid table. */
int huffman_open(struct huffman *table, const uint8_t *lengths, const uint8_t *symbols, int is_dc);
/* Further tables that take_block and skip_block need, for AC only. */
void huffman_open_pairs(struct huffman *table);
/* The entry of a code that is longer than the `look` table covers. */
uint32_t huffman_long(const struct huffman *table, uint64_t bits, unsigned look_bits);
/* From the first byte after a scan's header. -1: out of memory, or not one complete scan with the
 * expected restart markers, up to the end marker. Call `scan_close` in both cases. */
int scan_open(struct scan *scan, const uint8_t *data, size_t num_bytes, size_t most_segments);
void scan_close(struct scan *scan);

#if HAS_FAST_BASELINE
FAST_INLINE void refill(struct bit_reader *in)
{
    uint64_t word;
    memcpy(&word, in->next, sizeof word);
    in->bits |= __builtin_bswap64(word) >> in->count;
    in->next += (63 - in->count) >> 3;
    in->count |= 56;
}

FAST_INLINE uint32_t next_entry(struct bit_reader *in, const struct huffman *table,
                                unsigned look_bits)
{
    uint32_t entry = table->look[in->bits >> (64 - look_bits)];
    if (__builtin_expect(entry == 0, 0))
        entry = huffman_long(table, in->bits, look_bits);
    return entry;
}

/* The value of an entry whose code is at the front of the bits; consumes both. */
FAST_INLINE int take_value(struct bit_reader *in, uint32_t entry)
{
    unsigned size = entry >> 11 & 15;
    uint64_t rest = in->bits << (entry >> 6 & 31);
    uint64_t value = (rest >> 1) >> (63 - size);
    /* A leading 0 marks a negative number: the negative of the inverted bits. */
    uint64_t low = (((uint64_t)1 << size) - 1) & ~(uint64_t)((int64_t)rest >> 63);

    in->bits <<= entry & 63;
    in->count -= (int)(entry & 63);
    return (int)(value - low);
}

/* Adds to *last; returns 0, or nonzero for an invalid code. */
FAST_INLINE uint32_t take_dc(struct bit_reader *in, const struct huffman *dc, uint32_t *last)
{
    uint32_t entry;

    refill(in);
    entry = next_entry(in, dc, DC_LOOK_BITS);
    *last += (uint32_t)take_value(in, entry);
    return entry >> 16;
}

/* Whether a block may end at this step: full, or with an end code at step 1 to 63. */
FAST_INLINE int ended_well(unsigned step)
{
    return step == 64 || (step > STEPS_TO_END + 1 && step <= STEPS_TO_END + 64);
}

/* The rest of a block, symbol by symbol. */
FAST_INLINE unsigned take_singly(struct bit_reader *in, const struct huffman *ac,
                                 const uint8_t *places, int16_t *block)
{
    unsigned step = 1;

    while (step < 64) {
        uint32_t entry;
        refill(in);
        entry = next_entry(in, ac, LOOK_BITS);
        step += entry >> 16;
        block[places[step++]] = (int16_t)take_value(in, entry);
    }
    return step;
}

FAST_INLINE unsigned take_pair(struct bit_reader *in, const struct huffman *ac, unsigned step,
                               const uint8_t *places, int16_t *block)
{
    uint64_t pair = ac->pairs[in->bits >> (64 - LOOK_BITS)];

    if (__builtin_expect(pair == 0, 0)) {
        uint32_t entry = next_entry(in, ac, LOOK_BITS);
        step += entry >> 16;
        block[places[step++]] = (int16_t)take_value(in, entry);
        return step;
    }
    in->bits <<= pair & 63;
    in->count -= (int)(pair & 63);
    block[places[step + (pair >> 8 & 255)]] = (int16_t)(pair >> 32);
    /* Without a second symbol: writes 0 where the next coefficient will be. */
    block[places[step + (pair >> 16 & 255)]] = (int16_t)(pair >> 48);
    return step + (pair >> 24 & 255);
}

/* Decode a block into the zeros at `block`; `places` maps [256] steps, those past 63 to unused
 * space. Returns the step at which it ended, 0: invalid. */
FAST_INLINE unsigned take_block(struct bit_reader *in, const struct huffman *dc,
                                const struct huffman *ac, uint32_t *last, const uint8_t *places,
                                int16_t *block)
{
    unsigned step = 1, i;
    uint32_t bad = take_dc(in, dc, last);
    struct bit_reader start = *in;

    block[0] = (int16_t)*last;
    for (;;) { /* of 56 bits at least 29 are left here, and no symbol has more than 26 */
        step = take_pair(in, ac, step, places, block);
        if (step > 63)
            break;
        refill(in);
        step = take_pair(in, ac, step, places, block);
        if (step > 63)
            break;
    }
    /* The second symbol of a pair may follow a full block and belong to the next. */
    if (__builtin_expect(step != 64 && !ended_well(step), 0)) {
        *in = start;
        for (i = 1; i < 64; i++)
            block[places[i]] = 0;
        step = take_singly(in, ac, places, block);
    }
    return bad || !ended_well(step) ? 0 : step;
}

FAST_INLINE unsigned skip_several(struct bit_reader *in, const struct huffman *ac, unsigned step)
{
    uint32_t several = ac->skip[in->bits >> (64 - LOOK_BITS)];

    if (__builtin_expect(several == 0, 0)) {
        uint32_t entry = next_entry(in, ac, LOOK_BITS);
        several = (entry & 63) | ((entry >> 16) + 1) << 8;
    }
    in->bits <<= several & 63;
    in->count -= (int)(several & 63);
    return step + (several >> 8);
}

/* The same without coefficients; returns 0 if the block is invalid. */
FAST_INLINE unsigned skip_block(struct bit_reader *in, const struct huffman *dc,
                                const struct huffman *ac, uint32_t *last)
{
    uint32_t bad = take_dc(in, dc, last);
    struct bit_reader start = *in;
    unsigned step = 1;

    for (;;) {
        step = skip_several(in, ac, step);
        if (step > 63)
            break;
        refill(in);
        step = skip_several(in, ac, step);
        if (step > 63)
            break;
    }
    if (__builtin_expect(step != 64 && !ended_well(step), 0)) {
        static const uint8_t nowhere[256];
        int16_t unused;
        *in = start;
        step = take_singly(in, ac, nowhere, &unused);
    }
    return bad || !ended_well(step) ? 0 : step;
}
#endif

#endif
