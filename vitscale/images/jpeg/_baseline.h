/* A box of an ordinary JPEG, decoded without libjpeg: the same rows, in about half the time. */
#ifndef VITSCALE_BASELINE_H
#define VITSCALE_BASELINE_H

#include <stdio.h>

#include <jpeglib.h>

#include "_resample.h"

struct box {
    JDIMENSION left, top, width, height;
};

/* After jpeg_read_header, with the box inside the image. 1: `sink` has all rows. 0: not an image
 * for this decoder, or something about it is odd; libjpeg, whose state is as before, is to judge. */
int baseline_read(const struct jpeg_decompress_struct *codec, const struct box *box,
                  struct resampler *sink);

#endif
