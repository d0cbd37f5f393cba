"""Check that a JPEG decodes without any warning.

Leaves out: pixels for training (`decoders`), what Pillow accepts (data_prep). Needs no torch, which
data preparation never imports.
"""

from __future__ import annotations


def decode_strictly(data: bytes | memoryview) -> None:
    """Raises ValueError if libjpeg-turbo would repair, guess or skip anything.

    All coefficients are decoded at any output size, so an eighth of the size is enough. CMYK and
    YCCK are decoded as CMYK, other colour spaces as grey.
    """
    import simplejpeg

    space = simplejpeg.decode_jpeg_header(data)[2]
    target = "CMYK" if space in ("CMYK", "YCCK") else "GRAY"
    simplejpeg.decode_jpeg(data, colorspace=target, min_height=1, min_width=1, strict=True)
