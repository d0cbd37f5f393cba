/* Decode a box of an ordinary JPEG without libjpeg: the same rows in about half the time. */
#ifndef VITSCALE_BASELINE_H
#define VITSCALE_BASELINE_H

#include <stdio.h>

#include <jpeglib.h>

#include "_resample.h"

struct box {
    JDIMENSION left, top, width, height;
};

/* After jpeg_read_header, with the box inside the image. 1: `sink` has all rows. 0: the
 * image is not supported or has a fault; libjpeg, whose state is unchanged, must decode it. */
int baseline_read(const struct jpeg_decompress_struct *codec, const struct box *box,
                  struct resampler *sink);

#endif
