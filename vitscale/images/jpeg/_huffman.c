/* Build Huffman tables and remove byte stuffing from a scan; see _huffman.h. */
#include "_huffman.h"

#include <stdlib.h>

#define MAX_DC_BITS 11 /* of differences in 8 bit images; more is invalid */
#define MAX_AC_BITS 10

#if HAS_FAST_BASELINE
#define WIDE FAST
#else
#define WIDE
#endif

static uint32_t entry_of(const struct huffman *table, unsigned symbol, unsigned code_bits)
{
    unsigned size = symbol & 15, steps = table->is_dc ? 0 : symbol >> 4;

    if (!table->is_dc && size == 0 && steps != 15)
        steps = STEPS_TO_END;
    return (code_bits + size) | code_bits << 6 | size << 11 | steps << 16;
}

int huffman_open(struct huffman *table, const uint8_t *lengths, const uint8_t *symbols, int is_dc)
{
    unsigned bits, i, num = 0, code = 0, look_bits = is_dc ? DC_LOOK_BITS : LOOK_BITS;

    memset(table->look, 0, sizeof table->look);
    table->is_dc = is_dc;
    table->upper[0] = 0;
    for (bits = 1; bits <= 16; bits++, code <<= 1) {
        unsigned most = is_dc ? MAX_DC_BITS : MAX_AC_BITS;
        table->delta[bits] = (int32_t)num - (int32_t)code;
        if (num + lengths[bits] > 256 || code + lengths[bits] > 1u << bits)
            return -1;
        for (i = 0; i < lengths[bits]; i++, num++, code++) {
            unsigned symbol = symbols[num], j;
            if ((is_dc ? symbol : symbol & 15) > most)
                return -1;
            table->symbols[num] = (uint8_t)symbol;
            if (bits <= look_bits)
                for (j = 0; j < 1u << (look_bits - bits); j++)
                    table->look[(code << (look_bits - bits)) + j] = entry_of(table, symbol, bits);
        }
        table->upper[bits] = code << (16 - bits);
    }
    return 0;
}

uint32_t huffman_long(const struct huffman *table, uint64_t bits, unsigned look_bits)
{
    uint32_t front = (uint32_t)(bits >> 48);
    unsigned length;

    for (length = look_bits + 1; length <= 16; length++)
        if (front < table->upper[length]) {
            int32_t place = (int32_t)(front >> (16 - length)) + table->delta[length];
            return entry_of(table, table->symbols[place], length);
        }
    return (uint32_t)STEPS_OF_ERROR << 16;
}

#define MASK ((1u << LOOK_BITS) - 1)

/* Bits 0-5 length, 8-15 steps, 16-31 value; the value is undefined if the length exceeds the known
 * bits, and the entry is 0 if even the code does. */
WIDE static void open_singles(const struct huffman *table, uint32_t *restrict singles)
{
    uint32_t i;

    for (i = 0; i <= MASK; i++) {
        uint32_t entry = table->look[i], length = entry & 63, code = entry >> 6 & 31;
        uint32_t size = entry >> 11 & 15, steps = entry >> 16;
        uint32_t rest = i << (32 - LOOK_BITS) << code, low = (1u << size) - 1;
        uint32_t value = (rest >> 1) >> (31 - size);
        value -= rest >> 31 ? 0 : low;
        singles[i] = entry ? length | (steps + 1) << 8 | value << 16 : 0;
    }
}

WIDE static void open_skip(const uint32_t *restrict from, uint32_t *restrict to)
{
    uint32_t i;

    for (i = 0; i <= MASK; i++) {
        uint32_t one = from[i] & 0xffff, length = one & 63;
        uint32_t other = from[i << length & MASK] & 0xffff, all = one + other;
        /* Not past the end, nor so far that steps equal an end. */
        uint32_t fits = (other != 0) & (one < STEPS_TO_END << 8) &
                        (length + (other & 63) <= LOOK_BITS) &
                        ((one >> 8) + (other >> 8 & 127) <= 63); /* no branch: vectorises */
        to[i] = fits ? all : one;
    }
}

WIDE static void open_pairs(const uint32_t *restrict singles, uint64_t *restrict pairs)
{
    uint32_t i;

    for (i = 0; i <= MASK; i++) {
        uint32_t one = singles[i], length = one & 63, steps = one >> 8 & 255;
        uint32_t other = singles[i << length & MASK], more = other >> 8 & 255;
        uint32_t fits =
            (other != 0) & (steps < STEPS_TO_END) & (length + (other & 63) <= LOOK_BITS);
        uint32_t places = length | (steps - 1) << 8, values = one >> 16;
        places += fits ? (other & 63) | (steps + more - 1) << 16 | (steps + more) << 24
                       : steps << 16 | steps << 24;
        values |= fits ? other & 0xffff0000 : 0;
        pairs[i] = one && length <= LOOK_BITS ? places | (uint64_t)values << 32 : 0;
    }
}

void huffman_open_pairs(struct huffman *table)
{
    uint32_t singles[1 << LOOK_BITS], doubles[1 << LOOK_BITS], fours[1 << LOOK_BITS], i;

    open_singles(table, singles);
    open_skip(singles, doubles);
    open_skip(doubles, fours);
    for (i = 0; i <= MASK; i++)
        table->skip[i] = (uint16_t)fours[i];
    open_pairs(singles, table->pairs);
}

int scan_open(struct scan *scan, const uint8_t *data, size_t num_bytes, size_t most_segments)
{
    const uint8_t *end = data + num_bytes, *marker;
    uint8_t *to;

    scan->num_segments = 0;
    scan->bytes = NULL;
    scan->ends = NULL;
    if (most_segments < 1 || most_segments > num_bytes)
        return -1;
    scan->ends = malloc(sizeof *scan->ends * most_segments);
    scan->bytes = to = malloc(num_bytes + SCAN_PADDING);
    if (scan->ends == NULL || to == NULL)
        return -1;
    for (;; data = marker + 2) {
        marker = memchr(data, 0xff, (size_t)(end - data));
        if (marker == NULL || marker + 1 == end)
            return -1;
        memcpy(to, data, (size_t)(marker - data));
        to += marker - data;
        if (marker[1] == 0) {
            *to++ = 0xff;
            continue;
        }
        if (scan->num_segments == most_segments)
            return -1;
        scan->ends[scan->num_segments++] = (size_t)(to - scan->bytes);
        if (marker[1] == 0xd9)
            break;
        if (marker[1] != 0xd0 + (scan->num_segments - 1) % 8)
            return -1;
    }
    memset(to, 0, SCAN_PADDING);
    return scan->num_segments == most_segments ? 0 : -1;
}

void scan_close(struct scan *scan)
{
    free(scan->bytes);
    free(scan->ends);
}
