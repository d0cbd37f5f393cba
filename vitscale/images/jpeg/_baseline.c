/* Decode a box of an ordinary JPEG: one Huffman scan, 8 bits, grey or YCbCr 4:4:4, 4:2:2, 4:2:0.
 *
 * Owns: which images are supported, which blocks a box needs, rows of MCUs.
 * Leaves out: headers (libjpeg reads them), bits (_huffman.c), arithmetic (_blocks.c).
 *
 * Any fault of a file (an invalid code, a missing marker, a value out of range) ends the attempt;
 * then libjpeg decodes from the start.
 */
#include "_baseline.h"

#include <stdlib.h>

#include "_blocks.h"
#include "_huffman.h"

#if HAS_FAST_BASELINE

#define BLOCK 8
#define MAX_BANDS 3
#define MAX_TABLES 2
#define CHANNELS 3
#define LEAST_WIDTH 16 /* libjpeg does not interpolate colours of very narrow images */
#define ONLY_DC (STEPS_TO_END + 2) /* the step at which a block with DC only ends */

struct span {
    JDIMENSION first, stop; /* in blocks of one component, or in MCUs */
};

/* MCUs that hold the blocks of a box. */
struct area {
    struct span columns, rows;
};

/* One component. */
struct band {
    int16_t pair[PAIR_SIZE] __attribute__((aligned(32)));
    int16_t quant[128] __attribute__((aligned(32)));
    JDIMENSION across, down; /* blocks in an MCU */
    struct area blocks; /* of the box */
    const struct huffman *dc, *ac;
    uint32_t last_dc;
    uint8_t *waiting; /* target of the first block of the pair; NULL: empty */
    uint8_t *samples; /* of the latest two rows of MCUs */
    size_t stride;
};

struct baseline {
    struct band bands[MAX_BANDS];
    struct huffman dc[MAX_TABLES], ac[MAX_TABLES];
    struct scan scan;
    struct bit_reader in;
    struct box box;
    struct sink *sink;
    JDIMENSION width, height, mcus_across, mcus_down, done; /* rows given to `sink` */
    struct area mcus;   /* of the box */
    struct area *parts; /* of each part of `sink` */
    uint8_t *is_wanted; /* [mcus_across] whether a part needs this MCU of the row */
    size_t segment, interval, until_restart;
    struct entries entries;
    size_t entry, place; /* the number of the next entry, and the bits before it */
    int num_bands, halves_rows;
    uint8_t *rgb, *chroma[2];
    uint16_t *sums;
};

/* Zigzag step -> position in a pair of blocks; steps past 63 map to unused space. */
static const uint8_t places[256] = {
    0,   1,   16,  32,  17,  2,   3,   18,  33,  48,  64,  49,  34,  19,  4,   5,
    20,  35,  50,  65,  80,  96,  81,  66,  51,  36,  21,  6,   7,   22,  37,  52,
    67,  82,  97,  112, 113, 98,  83,  68,  53,  38,  23,  39,  54,  69,  84,  99,
    114, 115, 100, 85,  70,  55,  71,  86,  101, 116, 117, 102, 87,  103, 118, 119,
    [64 ... 255] = NOWHERE,
};

static int takes(const struct jpeg_decompress_struct *codec)
{
    const jpeg_component_info *info = codec->comp_info;
    int i;

    if (codec->progressive_mode || codec->arith_code || codec->data_precision != 8 ||
        codec->comps_in_scan != codec->num_components || codec->Ss != 0 ||
        codec->Se != BLOCK * BLOCK - 1 || codec->Ah != 0 || codec->Al != 0 ||
        codec->image_width < LEAST_WIDTH)
        return 0;
    if (codec->num_components == 1)
        return codec->jpeg_color_space == JCS_GRAYSCALE;
    if (codec->num_components != MAX_BANDS || codec->jpeg_color_space != JCS_YCbCr)
        return 0;
    for (i = 0; i < MAX_BANDS; i++)
        if (codec->cur_comp_info[i] != info + i ||
            (i > 0 && (info[i].h_samp_factor != 1 || info[i].v_samp_factor != 1)))
            return 0;
    return info->v_samp_factor >= 1 && info->v_samp_factor <= info->h_samp_factor &&
           info->h_samp_factor <= 2;
}

/* Blocks that hold samples [first, last], and their neighbours where `halved`. */
static struct span blocks_of(JDIMENSION first, JDIMENSION last, JDIMENSION size, int halved)
{
    struct span span;

    if (halved) {
        JDIMENSION end = (size + 1) / 2 - 1;
        first = first / 2 > 0 ? first / 2 - 1 : 0;
        last = last / 2 < end ? last / 2 + 1 : end;
    }
    span.first = first / BLOCK;
    span.stop = last / BLOCK + 1;
    return span;
}

static void include(struct span *mcus, struct span blocks, JDIMENSION each)
{
    JDIMENSION first = blocks.first / each, stop = (blocks.stop + each - 1) / each;

    mcus->first = first < mcus->first ? first : mcus->first;
    mcus->stop = stop > mcus->stop ? stop : mcus->stop;
}

/* Blocks of one component that hold samples of a box. */
static struct area blocks_around(const struct baseline *b, int c, const struct box *box)
{
    const struct band *band = &b->bands[c], *light = &b->bands[0];
    struct area area;

    area.columns = blocks_of(box->left, box->left + box->width - 1, b->width,
                             light->across != band->across);
    area.rows = blocks_of(box->top, box->top + box->height - 1, b->height,
                          light->down != band->down);
    return area;
}

static struct area mcus_around(const struct baseline *b, const struct box *box)
{
    struct area mcus = {{b->mcus_across, 0}, {b->mcus_down, 0}};
    int c;

    for (c = 0; c < b->num_bands; c++) {
        struct area blocks = blocks_around(b, c, box);
        include(&mcus.columns, blocks.columns, b->bands[c].across);
        include(&mcus.rows, blocks.rows, b->bands[c].down);
    }
    return mcus;
}

static void lay_out(struct baseline *b, const struct jpeg_decompress_struct *codec)
{
    const jpeg_component_info *info = codec->comp_info;
    int grey = b->num_bands == 1, i; /* then an MCU is one block, for any factors */
    JDIMENSION across = grey ? 1 : (JDIMENSION)info->h_samp_factor;
    JDIMENSION down = grey ? 1 : (JDIMENSION)info->v_samp_factor;

    b->halves_rows = down == 2;
    b->mcus_across = (b->width + across * BLOCK - 1) / (across * BLOCK);
    b->mcus_down = (b->height + down * BLOCK - 1) / (down * BLOCK);
    for (i = 0; i < b->num_bands; i++) {
        b->bands[i].across = i == 0 ? across : 1;
        b->bands[i].down = i == 0 ? down : 1;
        b->bands[i].blocks = blocks_around(b, i, &b->box);
    }
    b->mcus = mcus_around(b, &b->box);
}

/* The box of a part of `sink`, in the image. */
static struct box box_of(const struct baseline *b, const struct part *part)
{
    struct box box;

    box.left = b->box.left + (JDIMENSION)part->left;
    box.top = b->box.top + (JDIMENSION)part->top;
    box.width = (JDIMENSION)part->resampler.width;
    box.height = (JDIMENSION)part->resampler.height;
    return box;
}

static int open_table(struct huffman *table, const JHUFF_TBL *stored, int is_dc)
{
    if (stored == NULL)
        return -1;
    return huffman_open(table, stored->bits, stored->huffval, is_dc);
}

static int open_tables(struct baseline *b, const struct jpeg_decompress_struct *codec)
{
    int i, k, dc_is_open[MAX_TABLES] = {0}, ac_is_open[MAX_TABLES] = {0};

    for (i = 0; i < b->num_bands; i++) {
        const jpeg_component_info *info = codec->comp_info + i;
        int dc = info->dc_tbl_no, ac = info->ac_tbl_no, quant = info->quant_tbl_no;
        if (dc < 0 || dc >= MAX_TABLES || ac < 0 || ac >= MAX_TABLES || quant < 0 ||
            quant >= NUM_QUANT_TBLS || codec->quant_tbl_ptrs[quant] == NULL)
            return -1;
        if (!dc_is_open[dc] && open_table(&b->dc[dc], codec->dc_huff_tbl_ptrs[dc], 1))
            return -1;
        if (!ac_is_open[ac] && open_table(&b->ac[ac], codec->ac_huff_tbl_ptrs[ac], 0))
            return -1;
        if (!ac_is_open[ac])
            huffman_open_pairs(&b->ac[ac]);
        dc_is_open[dc] = ac_is_open[ac] = 1;
        b->bands[i].dc = &b->dc[dc];
        b->bands[i].ac = &b->ac[ac];
        for (k = 0; k < BLOCK * BLOCK; k++) {
            unsigned value = codec->quant_tbl_ptrs[quant]->quantval[k];
            if (value > 255)
                return -1;
            b->bands[i].quant[k / BLOCK * 16 + k % BLOCK] = (int16_t)value;
            b->bands[i].quant[k / BLOCK * 16 + BLOCK + k % BLOCK] = (int16_t)value;
        }
    }
    return 0;
}

static int open_memory(struct baseline *b)
{
    size_t width = b->box.width;
    int i;

    b->is_wanted = malloc(b->mcus_across);
    b->parts = malloc((size_t)b->sink->num_parts * sizeof *b->parts);
    if (b->is_wanted == NULL || b->parts == NULL)
        return -1;
    for (i = 0; i < b->sink->num_parts; i++) {
        struct box box = box_of(b, &b->sink->parts[i]);
        b->parts[i] = mcus_around(b, &box);
    }
    for (i = 0; i < b->num_bands; i++) {
        struct band *band = &b->bands[i];
        size_t columns = band->blocks.columns.stop - band->blocks.columns.first;
        band->stride = columns * BLOCK + SAMPLE_PADDING;
        band->samples = calloc(2 * band->down * BLOCK, band->stride);
        if (band->samples == NULL)
            return -1;
    }
    for (i = 0; i < 2; i++)
        b->chroma[i] = calloc(width + 2 * SAMPLE_PADDING, 1);
    b->sums = calloc(width + 2 * SAMPLE_PADDING, sizeof *b->sums);
    b->rgb = calloc((width + SAMPLE_PADDING) * CHANNELS + ROW_PADDING, 1);
    return b->chroma[0] && b->chroma[1] && b->sums && b->rgb ? 0 : -1;
}

static void close_memory(struct baseline *b)
{
    int i;

    for (i = 0; i < b->num_bands; i++)
        free(b->bands[i].samples);
    free(b->chroma[0]);
    free(b->chroma[1]);
    free(b->sums);
    free(b->rgb);
    free(b->parts);
    free(b->is_wanted);
    scan_close(&b->scan);
}

/* Bits of the scan consumed so far. */
static size_t place_of(const struct baseline *b, const struct bit_reader *in)
{
    return (size_t)(in->next - b->scan.bytes) * 8 - (size_t)in->count;
}

/* Continues after a restart marker; -1 unless exactly the bits before it were consumed. */
static int next_segment(struct baseline *b, struct bit_reader *in, size_t segment)
{
    size_t start = segment ? b->scan.ends[segment - 1] : 0;
    int i;

    if (segment != b->segment) {
        size_t place = place_of(b, in);
        if (segment == b->scan.num_segments || place > start * 8 || place + 7 < start * 8)
            return -1;
    }
    b->segment = segment;
    b->until_restart = b->interval;
    in->next = b->scan.bytes + start;
    in->bits = 0;
    in->count = 0;
    for (i = 0; i < b->num_bands; i++)
        b->bands[i].last_dc = 0;
    return 0;
}

FAST_INLINE int is_in(struct span span, JDIMENSION place)
{
    return place >= span.first && place < span.stop;
}

static uint8_t *row_of(const struct band *band, JDIMENSION y)
{
    return band->samples + y % (2 * band->down * BLOCK) * band->stride;
}

static int fill_block(struct band *band, int dc, uint8_t *to)
{
    int level = dc * band->quant[0], i;

    if (level < -8192 || level > 8191)
        return -1;
    level = ((level * 4 + 16) >> 5) + 128;
    for (i = 0; i < BLOCK; i++, to += band->stride)
        memset(to, level < 0 ? 0 : level > 255 ? 255 : level, BLOCK);
    return 0;
}

FAST_INLINE void clear_pair(int16_t *pair)
{
    typedef int16_t row __attribute__((vector_size(32), may_alias));
    int i;

    for (i = 0; i < BLOCK; i++)
        ((row *)pair)[i] = (row){0};
}

FAST_INLINE int keep_block(struct band *band, struct bit_reader *in, JDIMENSION column,
                           JDIMENSION row)
{
    uint8_t *to = row_of(band, row * BLOCK) + (size_t)(column - band->blocks.columns.first) * BLOCK;
    int16_t *block = band->waiting ? band->pair + BLOCK : band->pair;
    uint8_t *first = band->waiting;
    unsigned end;

    if (first == NULL)
        clear_pair(band->pair);
    end = take_block(in, band->dc, band->ac, &band->last_dc, places, block);
    if (end == 0)
        return -1;
    if (end == ONLY_DC) {
        int dc = block[0];
        block[0] = 0;
        return fill_block(band, dc, to);
    }
    band->waiting = first == NULL ? to : NULL;
    return first == NULL ? 0 : blocks_transform(band->pair, band->quant, first, to, band->stride);
}

/* Transform a pair that has no second block. */
static int finish_pair(struct band *band)
{
    uint8_t *first = band->waiting;

    band->waiting = NULL;
    return first ? blocks_transform(band->pair, band->quant, first, NULL, band->stride) : 0;
}

static size_t entry_size(const struct baseline *b)
{
    return 2 + 2 * (size_t)b->num_bands;
}

static JDIMENSION entries_across(const struct baseline *b, JDIMENSION each)
{
    return (b->mcus_across + each - 1) / each;
}

static int entries_fit(const struct baseline *b, const struct entries *entries)
{
    const uint8_t *bytes = entries->bytes;
    size_t num_mcus = (size_t)b->mcus_across * b->mcus_down;

    if (entries->num_bytes < ENTRY_HEADER || bytes[0] != ENTRY_VERSION || bytes[1] == 0 ||
        b->interval != num_mcus)
        return 0;
    return entries->num_bytes ==
           ENTRY_HEADER + (size_t)entries_across(b, bytes[1]) * b->mcus_down * entry_size(b);
}

static unsigned two_bytes(const uint8_t *from)
{
    return from[0] | (unsigned)from[1] << 8;
}

/* Go on at the last entry at or before an MCU, which must be behind the last one. Returns its
 * column, or `mcus_across` if it lies outside the scan. */
FAST static JDIMENSION enter(struct baseline *b, JDIMENSION row, JDIMENSION column)
{
    JDIMENSION each = b->entries.bytes[1];
    size_t size = entry_size(b), number = (size_t)row * entries_across(b, each) + column / each;
    const uint8_t *record = b->entries.bytes + ENTRY_HEADER + number * size;
    unsigned rest;
    int i;

    for (; b->entry <= number; b->entry++)
        b->place += two_bytes(b->entries.bytes + ENTRY_HEADER + b->entry * size);
    if (b->place >= b->scan.ends[0] * 8)
        return b->mcus_across;
    rest = b->place % 8;
    b->in.next = b->scan.bytes + b->place / 8;
    b->in.bits = 0;
    b->in.count = 0;
    refill(&b->in);
    b->in.bits <<= rest;
    b->in.count -= (int)rest;
    for (i = 0; i < b->num_bands; i++)
        b->bands[i].last_dc = (uint32_t)(int16_t)two_bytes(record + 2 + 2 * i);
    return column / each * each;
}

/* MCUs [from, stop) of a row; `any`: some of their blocks are needed. */
FAST static int read_mcus(struct baseline *b, JDIMENSION row, JDIMENSION from, JDIMENSION stop,
                          int any)
{
    struct bit_reader in = b->in;
    const uint8_t *end = b->scan.bytes + b->scan.ends[b->scan.num_segments - 1] + BLOCK;
    JDIMENSION column, i, k;
    int c;

    for (column = from; column < stop; column++) {
        if (b->until_restart == 0 && next_segment(b, &in, b->segment + 1))
            return -1;
        b->until_restart--;
        for (c = 0; c < b->num_bands; c++) {
            struct band *band = &b->bands[c];
            for (k = row * band->down; k < (row + 1) * band->down; k++) {
                int row_is_in = any && is_in(band->blocks.rows, k);
                for (i = column * band->across; i < (column + 1) * band->across; i++)
                    if (row_is_in && is_in(band->blocks.columns, i)) {
                        if (keep_block(band, &in, i, k))
                            return -1;
                    } else if (!skip_block(&in, band->dc, band->ac, &band->last_dc))
                        return -1;
            }
        }
        if (in.next > end)
            return -1;
    }
    b->in = in;
    return 0;
}

/* Samples of a colour for `columns` of row y, one for each pixel; `room` is for interpolated ones. */
static const uint8_t *chroma_of(const struct baseline *b, int c, JDIMENSION y, struct span columns,
                                uint8_t *room)
{
    const struct band *band = &b->bands[c];
    JDIMENSION halves = b->bands[0].across, first = columns.first / halves, row = y, other = y;
    JDIMENSION last = (columns.stop - 1) / halves;
    JDIMENSION width = (b->width + halves - 1) / halves;
    size_t offset = first - (size_t)band->blocks.columns.first * BLOCK;
    const uint8_t *near;

    if (b->halves_rows) {
        row = y / 2;
        other = y % 2 == 0 ? (row > 0 ? row - 1 : 0) : row;
        if (y % 2 == 1 && row + 1 < (b->height + 1) / 2)
            other = row + 1;
    }
    near = row_of(band, row) + offset;
    if (halves == 1)
        return near;
    blocks_double(near, b->halves_rows ? row_of(band, other) + offset : NULL, (int)first,
                  (int)(last + 1 - first), (int)width, b->sums, room);
    return room + columns.first % 2;
}

/* Give `sink` the pixels of a row of the box that it needs; those beside them are undefined. */
static void give_row(struct baseline *b, JDIMENSION y)
{
    const uint8_t *light = row_of(&b->bands[0], y);
    int row = (int)(y - b->box.top), first, stop;
    struct span columns; /* in pixels of the image */
    uint8_t *rgb;

    if (!sink_needs_row(b->sink, row, &first, &stop))
        return;
    columns.first = b->box.left + (JDIMENSION)first;
    columns.stop = b->box.left + (JDIMENSION)stop;
    light += columns.first - (size_t)b->bands[0].blocks.columns.first * BLOCK;
    rgb = b->rgb + (size_t)first * CHANNELS;
    if (b->num_bands == 1)
        blocks_grey_to_rgb(light, stop - first, rgb);
    else
        blocks_to_rgb(light, chroma_of(b, 1, y, columns, b->chroma[0]),
                      chroma_of(b, 2, y, columns, b->chroma[1]), stop - first, rgb);
    sink_take_row(b->sink, row, b->rgb);
}

/* All rows of the box above `ready`. */
static void give_rows(struct baseline *b, JDIMENSION ready)
{
    JDIMENSION bottom = b->box.top + b->box.height;

    for (; b->done < ready && b->done < bottom; b->done++)
        give_row(b, b->done);
}

/* Fill `is_wanted` for a row of MCUs. */
FAST static void mark_wanted(struct baseline *b, JDIMENSION row)
{
    int i;

    memset(b->is_wanted, 0, b->mcus_across);
    for (i = 0; i < b->sink->num_parts; i++) {
        struct span columns = b->parts[i].columns;
        if (is_in(b->parts[i].rows, row))
            memset(b->is_wanted + columns.first, 1, columns.stop - columns.first);
    }
}

/* Read the MCUs of a row that a part needs, from column `from`. Returns the column behind the last
 * MCU that was read or skipped, -1 if the image is damaged. */
static long read_wanted(struct baseline *b, JDIMENSION row, JDIMENSION from)
{
    JDIMENSION first = from, stop, each = b->entries.num_bytes ? b->entries.bytes[1] : 0;
    int is_entered = !each;

    mark_wanted(b, row);
    for (;; first = stop) {
        while (first < b->mcus.columns.stop && !b->is_wanted[first])
            first++;
        if (first == b->mcus.columns.stop)
            return from;
        for (stop = first; stop < b->mcus.columns.stop && b->is_wanted[stop]; stop++)
            ;
        /* An entry point between the last MCUs and these saves the way there. */
        if (each && (!is_entered || first / each * each > from))
            from = enter(b, row, first);
        is_entered = 1;
        if (from == b->mcus_across || read_mcus(b, row, from, first, 0) ||
            read_mcus(b, row, first, stop, 1))
            return -1;
        from = stop;
    }
}

static int read_rows(struct baseline *b)
{
    size_t skipped = (size_t)b->mcus.rows.first * b->mcus_across / b->interval * b->interval;
    JDIMENSION row = (JDIMENSION)(skipped / b->mcus_across), each = b->bands[0].down * BLOCK;
    JDIMENSION from = (JDIMENSION)(skipped % b->mcus_across);
    long reached;
    int i;

    b->segment = skipped / b->interval; /* segments above the box are skipped entirely */
    if (next_segment(b, &b->in, b->segment))
        return -1;
    if (b->entries.num_bytes)
        row = b->mcus.rows.first;
    for (; row < b->mcus.rows.first; row++, from = 0)
        if (read_mcus(b, row, from, b->mcus_across, 0))
            return -1;
    for (; row < b->mcus.rows.stop; row++, from = 0) {
        reached = read_wanted(b, row, from);
        if (reached < 0)
            return -1;
        for (i = 0; i < b->num_bands; i++)
            if (finish_pair(&b->bands[i]))
                return -1;
        if (row + 1 < b->mcus.rows.stop && !b->entries.num_bytes &&
            read_mcus(b, row, (JDIMENSION)reached, b->mcus_across, 0))
            return -1;
        /* The last row of an MCU is interpolated with the first row of the next. */
        give_rows(b, (row + 1) * each - (b->halves_rows && row + 1 < b->mcus_down));
    }
    return place_of(b, &b->in) <= b->scan.ends[b->segment] * 8 ? 0 : -1;
}

/* 0: not supported. */
static int open_image(struct baseline *b, const struct jpeg_decompress_struct *codec,
                      const struct box *box)
{
    size_t num_mcus;

    memset(b, 0, sizeof *b);
    if (!takes(codec) || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") ||
        !__builtin_cpu_supports("bmi2"))
        return 0;
    b->box = *box;
    b->width = codec->image_width;
    b->height = codec->image_height;
    b->num_bands = codec->num_components;
    b->done = box->top;
    lay_out(b, codec);
    num_mcus = (size_t)b->mcus_across * b->mcus_down;
    b->interval = codec->restart_interval ? codec->restart_interval : num_mcus;
    return open_tables(b, codec) == 0 &&
           scan_open(&b->scan, codec->src->next_input_byte, codec->src->bytes_in_buffer,
                     (num_mcus + b->interval - 1) / b->interval) == 0;
}

int baseline_read(const struct jpeg_decompress_struct *codec, const struct box *box,
                  const struct entries *entries, struct sink *sink)
{
    struct baseline b;
    int is_read = open_image(&b, codec, box);

    b.sink = sink;
    is_read = is_read && open_memory(&b) == 0;
    if (is_read) {
        if (entries_fit(&b, entries))
            b.entries = *entries;
        is_read = read_rows(&b) == 0;
    }
    close_memory(&b);
    return is_read;
}

/* The record of the place that was reached; -1 if it is too far or too large. */
static int add_entry(struct baseline *b, uint8_t *record)
{
    size_t place = place_of(b, &b->in), bits = place - b->place;
    int i;

    if (bits > UINT16_MAX)
        return -1;
    record[0] = (uint8_t)bits;
    record[1] = (uint8_t)(bits >> 8);
    for (i = 0; i < b->num_bands; i++) {
        int32_t dc = (int32_t)b->bands[i].last_dc;
        if (dc < INT16_MIN || dc > INT16_MAX)
            return -1;
        record[2 + 2 * i] = (uint8_t)dc;
        record[3 + 2 * i] = (uint8_t)((uint32_t)dc >> 8);
    }
    b->place = place;
    return 0;
}

static int find_entries(struct baseline *b, JDIMENSION each, struct entries *entries)
{
    size_t size = entry_size(b), start, end;
    JDIMENSION row, from, stop;
    uint8_t *record;

    entries->num_bytes =
        ENTRY_HEADER + (size_t)entries_across(b, each) * b->mcus_down * size;
    entries->bytes = record = malloc(entries->num_bytes);
    if (record == NULL || next_segment(b, &b->in, b->segment))
        return -1;
    *record++ = ENTRY_VERSION;
    *record++ = (uint8_t)each;
    for (row = 0; row < b->mcus_down; row++)
        for (from = 0; from < b->mcus_across; from = stop, record += size) {
            stop = b->mcus_across - from > each ? from + each : b->mcus_across;
            if (add_entry(b, record) || read_mcus(b, row, from, stop, 0))
                return -1;
        }
    start = place_of(b, &b->in);
    end = b->scan.ends[0] * 8;
    return start <= end && start + 7 >= end ? 0 : -1;
}

int baseline_find_entries(const struct jpeg_decompress_struct *codec, unsigned each,
                          struct entries *entries)
{
    const struct box whole = {0, 0, codec->image_width, codec->image_height};
    struct baseline b;
    int is_found = open_image(&b, codec, &whole) && !codec->restart_interval;

    entries->bytes = NULL;
    is_found = is_found && find_entries(&b, each, entries) == 0;
    if (!is_found) {
        free(entries->bytes);
        entries->bytes = NULL;
        entries->num_bytes = 0;
    }
    close_memory(&b);
    return is_found;
}

#else
int baseline_read(const struct jpeg_decompress_struct *codec, const struct box *box,
                  const struct entries *entries, struct sink *sink)
{
    (void)codec;
    (void)box;
    (void)entries;
    (void)sink;
    return 0;
}

int baseline_find_entries(const struct jpeg_decompress_struct *codec, unsigned each,
                          struct entries *entries)
{
    (void)codec;
    (void)each;
    (void)entries;
    return 0;
}
#endif
