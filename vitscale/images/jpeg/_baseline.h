/* Decode a box of an ordinary JPEG without libjpeg: the same rows in about half the time. */
#ifndef VITSCALE_BASELINE_H
#define VITSCALE_BASELINE_H

#include <stdio.h>

#include <jpeglib.h>

#include "_resample.h"

struct box {
    JDIMENSION left, top, width, height;
};

/* Places where decoding can start: in each row of MCUs, every `each` of them. Two bytes, version and
 * `each`; then for each place, little-endian: 2 bytes, bits of the scan without stuffing since the
 * place before; and 2 bytes for each component, its DC value there, signed. */
#define ENTRY_VERSION 1
#define ENTRY_HEADER 2

struct entries {
    uint8_t *bytes;
    size_t num_bytes; /* 0: none */
};

/* After jpeg_read_header, with the box inside the image. 1: `sink` has all rows. 0: the
 * image is not supported or has a fault; libjpeg, whose state is unchanged, must decode it.
 * `entries` of another number of places are not used. */
int baseline_read(const struct jpeg_decompress_struct *codec, const struct box *box,
                  const struct entries *entries, struct sink *sink);
/* Find the entry points of an image. 0: not supported, damaged, with restart markers, which do the
 * same, or out of memory; otherwise free `entries->bytes`. */
int baseline_find_entries(const struct jpeg_decompress_struct *codec, unsigned each,
                          struct entries *entries);

#endif
