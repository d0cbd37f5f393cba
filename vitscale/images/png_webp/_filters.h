/* Undo the filters of PNG rows of 8-bit samples. */
#ifndef VITSCALE_FILTERS_H
#define VITSCALE_FILTERS_H

#include <stddef.h>
#include <stdint.h>

enum { FILTER_NONE, FILTER_SUB, FILTER_UP, FILTER_AVERAGE, FILTER_PAETH, NUM_FILTERS };

/* Bytes past the end of `row` and `above` that are accessed; `coded` is read to its end only. */
#define FILTER_PADDING 4

/* Decode the first `num_bytes` of a row: whole pixels of `samples` bytes, 1 to 4, at least one.
 * above: the row above, decoded; zeros above the first row. */
void undo_filter(int filter, const uint8_t *coded, const uint8_t *above, uint8_t *row,
                 size_t num_bytes, size_t samples);

#endif
