"""Whether a JPEG decodes without a single warning.

Owns: the one call of libjpeg-turbo that makes an error of every warning.
Leaves out: pixels for training (`decoding`), what Pillow takes (`data_prep`). Needs no torch, which
data preparation never imports.
"""

from __future__ import annotations


def decode_strictly(data: bytes | memoryview) -> None:
    """Raises ValueError where libjpeg-turbo repairs, guesses or skips something.

    Everything coded is decoded; faults show there, so that an eighth of the size is enough. Other
    colour spaces than grey, YCbCr and RGB are decoded as CMYK.
    """
    import simplejpeg

    space = simplejpeg.decode_jpeg_header(data)[2]
    target = "CMYK" if space in ("CMYK", "YCCK") else "GRAY"
    simplejpeg.decode_jpeg(data, colorspace=target, min_height=1, min_width=1, strict=True)
