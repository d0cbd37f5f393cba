"""Image bytes and a crop box to pixels of the output size, by the fastest decoder there is.

Owns: the decoders by name, which images each of them takes, and what they have in common.
Leaves out: boxes and the reference (`images`), reading bytes (`loader`).

The boxes are the same with every decoder, and so is every pixel (docs/decoding.md, "Same pixels").
Pillow is the judge: what a fast decoder does not know (PNG, CMYK, 12 bit, ...) or finds damaged
goes to Pillow, and Pillow's pixels or Pillow's error come back. So a sample that can be read with
one decoder can be read with all of them.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from PIL import Image

from vitscale.config.errors import UserError
from vitscale.images import crops
from vitscale.images.crops import MAX_PIXELS, CropRequest

AUTO = "auto"
# A JPEG that does not end like one may be cut short; beyond its crop a decoder would not notice.
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
INTERPOLATIONS = ("bilinear", "bicubic")
# Colour spaces that simplejpeg turns into RGB as Pillow does.
SIMPLEJPEG_SPACES = ("YCbCr", "RGB", "Gray")


class Decoder(Protocol):
    """Stateless, hence safe to copy into worker processes and to call from several threads."""

    def size(self, data: bytes) -> tuple[int, int]:
        """Width and height, from the header alone. Raises OSError or ValueError if unreadable."""
        ...

    def crop(
        self, data: bytes, request: CropRequest, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The requested pixels, uint8 [3, S, S]; `out`, if given, is filled and returned.

        Raises OSError or ValueError if the image is unreadable or smaller than the box.
        """
        ...


def _is_whole_jpeg(data: bytes) -> bool:
    return data.startswith(JPEG_START) and data.endswith(JPEG_END)


class PillowDecoder:
    """Every format, any machine; the reference for the others."""

    def size(self, data: bytes) -> tuple[int, int]:
        with crops.open_image(data) as image:
            return image.size

    def crop(
        self, data: bytes, request: CropRequest, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        pixels = crops.crop_and_resize(crops.decode(data), request)
        return pixels if out is None else out.copy_(pixels)


class SimpleJpegDecoder(PillowDecoder):
    """Whole JPEGs through libjpeg-turbo, from a wheel: needs nothing but pip."""

    def size(self, data: bytes) -> tuple[int, int]:
        header = self._header(data)
        return super().size(data) if header is None else header

    def crop(
        self, data: bytes, request: CropRequest, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        whole = self._decode(data)
        if whole is None:
            return super().crop(data, request, out=out)
        pixels = crops.crop_and_resize(torch.from_numpy(whole), request)
        return pixels if out is None else out.copy_(pixels)

    def _header(self, data: bytes) -> tuple[int, int] | None:
        import simplejpeg

        if not _is_whole_jpeg(data):
            return None
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            return None
        taken = space in SIMPLEJPEG_SPACES and width * height <= MAX_PIXELS
        return (width, height) if taken else None

    def _decode(self, data: bytes) -> np.ndarray | None:
        import simplejpeg

        if self._header(data) is None:
            return None
        try:
            # The settings that differ least from Pillow; the fast ones gain 5 %.
            pixels: np.ndarray = simplejpeg.decode_jpeg(data, colorspace="RGB")
        except ValueError:
            return None
        return pixels


class RegionDecoder(PillowDecoder):
    """Only the box of a JPEG, by our own calls of libjpeg-turbo, resampled row by row in C."""

    def __init__(self, *, allow_avx2: bool = True) -> None:
        self.allow_avx2 = allow_avx2

    def size(self, data: bytes) -> tuple[int, int]:
        from vitscale.images.jpeg import _region

        if not data.startswith(JPEG_START):
            return super().size(data)
        try:
            return _region.size(data, MAX_PIXELS)
        except ValueError:
            return super().size(data)

    def crop(
        self, data: bytes, request: CropRequest, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from vitscale.images.jpeg import _region

        size, box = request.size, request.box
        pixels = out
        if out is None or not (out.is_contiguous() and out.shape == (3, size, size)):
            pixels = torch.empty((3, size, size), dtype=torch.uint8)
        assert pixels is not None and request.interpolation in INTERPOLATIONS
        try:
            if not _is_whole_jpeg(data):
                raise ValueError("for Pillow")
            _region.crop(
                data,
                (box.left, box.top, box.width, box.height),
                pixels.numpy(),
                size,
                request.interpolation == "bicubic",
                request.antialias,
                request.flip,
                MAX_PIXELS,
                self.allow_avx2,
            )
        except (ValueError, OverflowError):
            return super().crop(data, request, out=out)
        return pixels if out is None or pixels is out else out.copy_(pixels)


DECODERS: dict[str, Callable[[], Decoder]] = {
    "region": RegionDecoder,
    "simplejpeg": SimpleJpegDecoder,
    "pillow": PillowDecoder,
}
"""Fastest first: `auto` takes the first that works on this machine."""

_NEEDS = {
    "region": "install a C compiler and libjpeg-turbo's headers (Debian, Ubuntu: gcc libjpeg-dev; "
    "Fedora: gcc libjpeg-turbo-devel), then `pip install -e .` again",
    "simplejpeg": "pip install simplejpeg",
}


@lru_cache
def missing(name: str) -> str | None:
    """Why a decoder does not work on this machine, or None if it does."""
    if name == "simplejpeg" and importlib.util.find_spec("simplejpeg") is None:
        return "simplejpeg is not installed"
    if name != "region":
        return None
    try:
        from vitscale.images.jpeg import _region
    except ImportError as error:
        return f"its C extension was not built, or cannot be loaded ({error})"
    # A libjpeg other than the one it was built for would be noticed here, not in a worker.
    width = height = 40
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", subsampling="4:2:0")
    pixels = np.empty((3, 9, 9), np.uint8)
    try:
        _region.crop(
            file.getvalue(), (20, 21, 9, 9), pixels, 9, False, False, False, width * height, True
        )
    except ValueError as error:
        return str(error)
    expected = crops.decode(file.getvalue())[21:30, 20:29].permute(2, 0, 1).numpy()
    return None if np.array_equal(pixels, expected) else "it decodes other pixels than Pillow"


def resolve_decoder(name: str) -> str:
    """The decoder that `data.decoder` means here: itself, or for `auto` the fastest that works."""
    if name == AUTO:
        return next(known for known in DECODERS if missing(known) is None)
    allowed = ", ".join([AUTO, *DECODERS])
    if name not in DECODERS:
        raise UserError(f"unknown decoder {name!r}", where="data.decoder", allowed=allowed)
    why = missing(name)
    if why is not None:
        raise UserError(
            f"decoder {name!r} does not work here: {why}",
            where="data.decoder",
            allowed=allowed,
            next_step=_NEEDS[name],
        )
    return name
