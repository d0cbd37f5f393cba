"""Decode and crop images with the fastest decoder available.

All decoders give the same pixels (docs/loader.md, "Decoding"): those of Pillow. An
image that a fast decoder does not support (CMYK, 12 bit, ...) or finds damaged goes to Pillow,
which gives the pixels or the error. So a sample that one decoder can read, all can read.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from PIL import Image

from vitscale.config.errors import UserError
from vitscale.images import crops
from vitscale.images.crops import MAX_PIXELS, CropBox, CropRequest

# A JPEG without an end marker may be truncated; a decoder of one box would not notice.
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
# Colour spaces that simplejpeg converts to RGB like Pillow.
SIMPLEJPEG_SPACES = ("YCbCr", "RGB", "Gray")


def _is_whole_jpeg(data: bytes) -> bool:
    return data.startswith(JPEG_START) and data.endswith(JPEG_END)


class Decoder:
    """Whole images: ordinary JPEG with simplejpeg, ordinary WebP with torchvision, the rest with
    Pillow; PNG, too: an error of libpng ends the process inside torchvision 0.29.

    Stateless. Methods raise OSError or ValueError if the image is unreadable.
    """

    def size(self, data: bytes) -> tuple[int, int]:
        """Width and height, from the header alone."""
        with crops.open_image(data) as image:
            return image.size

    def crop(
        self, data: bytes, request: CropRequest, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The requested pixels, uint8 [3, R, C]; `out`, contiguous, is filled and returned.

        Raises ValueError for a box that exceeds the image.
        """
        pixels = crops.crop_and_resize(self.whole(data), request)
        return pixels if out is None else out.copy_(pixels)

    def whole(self, data: bytes) -> torch.Tensor:
        """All pixels, uint8 [H, W, 3]."""
        pixels = decode_jpeg(data) if data.startswith(JPEG_START) else decode_webp(data)
        return crops.decode(data) if pixels is None else pixels


def decode_jpeg(data: bytes) -> torch.Tensor | None:
    """All pixels of a JPEG, uint8 [H, W, 3]; None for one that only Pillow decodes."""
    import simplejpeg

    if not _is_whole_jpeg(data):
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in SIMPLEJPEG_SPACES or width * height > MAX_PIXELS:
            return None
        # The settings closest to Pillow's; the fast ones would gain 5 %.
        return torch.from_numpy(simplejpeg.decode_jpeg(data, colorspace="RGB"))
    except ValueError:
        return None


def decode_webp(data: bytes) -> torch.Tensor | None:
    """All pixels of an ordinary WebP, uint8 [H, W, 3], in half to three quarters of Pillow's time.

    None for anything but one complete picture. Raises OSError or ValueError if unreadable.
    """
    if (data[:4], data[8:12]) != (b"RIFF", b"WEBP") or data[12:16] not in (b"VP8 ", b"VP8L"):
        return None
    whole, picture = (int.from_bytes(data[i : i + 4], "little") for i in (4, 16))
    if whole + 8 != len(data) or picture + (picture & 1) + 12 != whole:
        return None
    with crops.open_image(data) as image:  # also refuses what is too large
        width, height = image.size
    # Imported late: it takes seconds, and only WebP needs it.
    from torchvision.io import ImageReadMode
    from torchvision.io import decode_webp as decode

    try:
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        pixels: torch.Tensor = decode(stored, ImageReadMode.RGB).permute(1, 2, 0)
    except RuntimeError:
        return None
    return pixels if pixels.shape == (height, width, 3) else None


class RegionDecoder(Decoder):
    """Only the box of a JPEG, decoded and resampled row by row by the C extension."""

    def __init__(self, *, allow_avx2: bool = True) -> None:
        self.allow_avx2 = allow_avx2

    def size(self, data: bytes) -> tuple[int, int]:
        if not data.startswith(JPEG_START):
            return super().size(data)
        try:
            return _extension().size(data, MAX_PIXELS)
        except ValueError:
            return super().size(data)

    def crop(
        self, data: bytes, request: CropRequest, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not _is_whole_jpeg(data):
            return super().crop(data, request, out=out)
        pixels = torch.empty((3, *request.shape), dtype=torch.uint8) if out is None else out
        try:
            decode_region(data, request, pixels.numpy(), allow_avx2=self.allow_avx2)
        except (ValueError, OverflowError):
            return super().crop(data, request, out=out)
        return pixels


def _extension() -> ModuleType:
    """The C extension. Raises ImportError if it was not built."""
    from vitscale.images.jpeg import _region

    return _region


def decode_region(
    data: bytes, request: CropRequest, out: np.ndarray, *, allow_avx2: bool = True
) -> bool:
    """Decode a box of a JPEG into `out`, uint8 [3, R, C], with the C extension. Returns whether its
    own decoder of ordinary JPEGs was used, instead of libjpeg.

    Raises ValueError or OverflowError for an image that it does not support or finds damaged.
    """
    box, cubic = request.box, request.interpolation == "bicubic"
    corners = (box.left, box.top, box.width, box.height)
    options = (cubic, request.antialias, request.flip, MAX_PIXELS, allow_avx2)
    used_own: bool = _extension().crop(
        data, corners, out, request.size, *options, request.entry_points
    )
    return used_own


DECODERS: dict[str, Callable[[], Decoder]] = {"region": RegionDecoder, "whole": Decoder}
"""Fastest first: `auto` takes the first that works on this machine."""


@lru_cache
def missing(name: str) -> str | None:
    """Why a decoder does not work on this machine; None if it does. `whole` always does."""
    if name != "region":
        return None
    try:
        _extension()
    except ImportError as error:
        return f"its C extension was not built, or cannot be loaded ({error})"
    # Decode one image now, to find a libjpeg that differs from the one it was built for.
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", subsampling="4:2:0")
    pixels = np.empty((3, 9, 9), np.uint8)
    box = CropBox(20, 21, 9, 9)
    request = CropRequest(box=box, size=9, interpolation="bilinear", antialias=False, flip=False)
    try:
        decode_region(file.getvalue(), request, pixels)
    except (TypeError, ValueError) as error:  # TypeError: it was built from other sources
        return str(error)
    expected = crops.decode(file.getvalue())[21:30, 20:29].permute(2, 0, 1).numpy()
    return None if np.array_equal(pixels, expected) else "its pixels differ from Pillow's"


def resolve_decoder(name: str) -> str:
    """The decoder to use on this machine: `name`, or for `auto` the fastest that works."""
    if name == "auto":
        return next(known for known in DECODERS if missing(known) is None)
    if why := missing(name):
        raise UserError(
            f"decoder {name!r} does not work here: {why}",
            where="data.decoder",
            allowed="auto, whole",
            next_step="for region install a C compiler and libjpeg-turbo's headers (Debian, "
            "Ubuntu: gcc libjpeg-dev; Fedora: gcc libjpeg-turbo-devel), then `pip install -e .` "
            "again",
        )
    return name
