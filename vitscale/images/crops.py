"""Decode images with the fastest decoder available, draw crop boxes, resample and flip; uint8.

All decoders give Pillow's pixels (docs/loader.md, "Decoding"). An image that a fast decoder does
not support (CMYK, 12 bit, ...) or finds damaged goes to Pillow, which gives the pixels or the
error. So a sample that one decoder can read, all can read.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from vitscale.config.errors import UserError
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images.plain import PILLOW_ERRORS, SUFFIXES, open_picture

FORMATS = tuple(SUFFIXES)
CROP_ATTEMPTS = 10
TF_CROP_ATTEMPTS = 100
PLAIN_CROP_PADDING = 4  # px of the output; DeiT's augment.py
# A centre is cut from at most this; memory for what is cut away grows with it.
MAX_ASPECT = 16
# Pillow takes a larger image for a decompression bomb.
MAX_PIXELS = 178_956_970
# A JPEG without an end marker may be truncated; a decoder of one box would not notice.
JPEG_START = b"\xff\xd8\xff"
JPEG_END = b"\xff\xd9"
# Colour spaces that simplejpeg converts to RGB like Pillow.
SIMPLEJPEG_SPACES = ("YCbCr", "RGB", "Gray")
Range = tuple[float, float]

# H height, W width, R rows and C columns of the output


class CropBox(NamedTuple):
    """A rectangle in pixels."""

    left: int
    top: int
    width: int
    height: int


class CropRequest(NamedTuple):
    """A box of an image and how to resample it to `size`."""

    box: CropBox
    size: int | tuple[int, int]
    """Pixels a side, or rows and columns, of which a centre is cut."""
    interpolation: str
    """bilinear or bicubic; `area_resized` averages areas."""
    antialias: bool
    flip: bool
    """Mirror left and right."""
    entry_points: bytes = b""
    """Where decoding may begin (`jpeg.entry_points` of the same file); empty: at the top. Those of
    the first of several requests are used."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        if isinstance(self.size, tuple):
            return self.size
        return self.size, self.size


@contextmanager
def open_image(
    data: bytes, *, formats: Sequence[str] = FORMATS
) -> Iterator[Image.Image]:
    """Open an image and read its header.

    Raises OSError if it is unreadable; ValueError if it is too large, or has no decoder here.
    """
    try:
        with open_picture(data, formats=formats) as image:
            # Pillow's own limit is a global variable, which other code may have changed.
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(
                    f"{image.width} x {image.height} pixels; at most {MAX_PIXELS}"
                )
            yield image
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from None
    except ModuleNotFoundError:
        raise ValueError("HEIC is not read yet: pip install pillow-heif") from None
    except PILLOW_ERRORS as error:
        raise OSError(f"{type(error).__name__}: {error}") from None


def decode(data: bytes) -> torch.Tensor:
    """Decode to RGB pixels, uint8 [H, W, 3]. Raises like `open_image`."""
    with open_image(data) as image:
        # Pillow would cut each value off at 255; data preparation scales them.
        if image.mode.startswith(("I", "F")):
            raise ValueError("more than 8 bits a channel")
        return torch.from_numpy(np.array(image.convert("RGB")))


def random_crop_box(
    width: int, height: int, *, area: Range, aspect: Range, random: CounterRandom
) -> CropBox:
    """A box of random area share and aspect ratio; the largest allowed centre box if no draw fits.

    Source: the inception crop, Szegedy et al. 2015, sec. 6; aspect log-uniform as in torchvision.
    """
    log_aspect = [math.log(ratio) for ratio in aspect]
    for _ in range(CROP_ATTEMPTS):
        # Share of the area and ratio of the sides give both: w * h = pixels, w / h = ratio.
        pixels = random.uniform(*area) * width * height
        ratio = math.exp(random.uniform(*log_aspect))
        w = round(math.sqrt(pixels * ratio))
        h = round(math.sqrt(pixels / ratio))
        # Its place is drawn in any case: each attempt takes the same number of draws.
        box = _anywhere(w, h, width, height, random)
        if 0 < w <= width and 0 < h <= height:
            return box

    # No box fitted: the largest one whose ratio is allowed, in the centre.
    ratio = min(max(width / height, aspect[0]), aspect[1])
    w = min(width, round(height * ratio))
    h = min(height, round(width / ratio))
    return CropBox((width - w) // 2, (height - h) // 2, w, h)


def _anywhere(
    w: int, h: int, width: int, height: int, random: CounterRandom
) -> CropBox:
    """A box of w x h pixels at a random place of an image."""
    left = int(random.uniform() * (width - w + 1))
    top = int(random.uniform() * (height - h + 1))
    return CropBox(left, top, w, h)


def tf_crop_box(
    width: int, height: int, *, area: Range, aspect: Range, random: CounterRandom
) -> CropBox:
    """A box of random height and aspect ratio; the whole image if no draw fits.

    The height is uniform between those that the area and the image allow at the drawn ratio, so
    small areas are more frequent than in `random_crop_box`. The last row and column of places are
    never drawn. Source: TensorFlow, `GenerateRandomCrop` of `sample_distorted_bounding_box_op.cc`.
    """
    least, most = (share * width * height for share in area)
    for _ in range(TF_CROP_ATTEMPTS):
        ratio = random.uniform(*aspect)
        low = round(math.sqrt(least / ratio))
        high = round(math.sqrt(most / ratio))
        # The width must fit, too: this is then the largest height that allows it.
        if round(high * ratio) > width:
            high = int((width + 0.5 - 1e-7) / ratio)
            high -= round(high * ratio) > width
        high = min(high, height)
        low = min(low, high)
        h = low + int(random.uniform() * (high - low + 1))
        # Rounding may have left the range of areas.
        h += h * round(h * ratio) < least
        h -= h * round(h * ratio) > most
        w = round(h * ratio)
        if least <= w * h <= most and 0 < w <= width and 0 < h <= height:
            return _anywhere(w, h, width - 1, height - 1, random)

    # So many misses mean that hardly any box satisfies both ranges.
    return CropBox(0, 0, width, height)


def plain_crop_box(
    width: int, height: int, *, size: int, random: CounterRandom
) -> tuple[CropBox, int, int]:
    """The largest square box, and how many output pixels the crop exceeds the image.

    DeiT resizes the short side to `size`, pads by 4 px and crops (`--src` in DeiT's `augment.py`,
    Touvron et al. 2022, sec. 3.2 "simple random crop"). This crop differs by at most half a source
    pixel, because the box is rounded. Returns (box, right, down), the shifts for `reflected`.
    """
    side = min(width, height)

    def place(length: int) -> tuple[int, int]:
        # Pixels that are left over along the long side, at the size of the output.
        room = size * length // side - size
        drawn = int(random.uniform() * (room + 2 * PLAIN_CROP_PADDING + 1))
        start = drawn - PLAIN_CROP_PADDING
        # The part of the shift that leaves the image is made up by `reflected`.
        inside = min(max(start, 0), room)
        return min(round(inside * side / size), length - side), start - inside

    left, right = place(width)
    top, down = place(height)
    return CropBox(left, top, side, side), right, down


def squash_crop_box(
    width: int, height: int, *, share: float, random: CounterRandom
) -> CropBox:
    """A box with `share` of each side, at any place.

    BiT squashes the image to a square and cuts a smaller one out of it (`input_pipeline` of
    big_transfer). This crop differs by at most half a source pixel, because the box is rounded.
    """
    # At least one pixel, whatever the share is.
    w = max(1, round(width * share))
    h = max(1, round(height * share))
    return _anywhere(w, h, width, height, random)


def reflected(image_3RC: torch.Tensor, *, right: int, down: int) -> torch.Tensor:
    """Shift the view by `right` and `down` pixels, at most PLAIN_CROP_PADDING either way; the image
    is mirrored beyond its border.

    Border pixels are not repeated, as in numpy's and Pillow's "reflect".
    """

    border = (PLAIN_CROP_PADDING, PLAIN_CROP_PADDING)
    padded = np.pad(image_3RC, ((0, 0), border, border), "reflect")
    _, rows, columns = image_3RC.shape
    top = PLAIN_CROP_PADDING + down
    left = PLAIN_CROP_PADDING + right
    return torch.from_numpy(padded[:, top : top + rows, left : left + columns])


Plan = tuple[CropBox, tuple[int, int], tuple[int, int]]
"""A box, rows and columns of the resized box, and the first row and column of the crop."""


def center_crop(
    width: int, height: int, *, size: int, fraction: float, down: bool = False
) -> Plan:
    """Resize the short side to `size` / `fraction`, then cut the centre; rounded as by timm's
    `create_transform` and torchvision, so that both see the same pixels.

    down: the centre begins as in transformers, where an odd number of pixels is cut.
    The ends of an image that is longer than `MAX_ASPECT` times its short side are left out.
    """
    # Beyond this ratio most of the resized image would be cut away.
    w = min(width, MAX_ASPECT * height)
    h = min(height, MAX_ASPECT * width)
    box = CropBox((width - w) // 2, (height - h) // 2, w, h)
    short = math.floor(size / fraction)
    resized = (int(short * h / w), short) if w <= h else (short, int(short * w / h))
    top, left = (_start(length, size, down=down) for length in resized)
    return box, resized, (top, left)


def _start(length: int, size: int, *, down: bool) -> int:
    """First pixel of the centre: rounded down, or to the even one of the two that are as near."""
    cut = length - size
    if down:
        return cut // 2
    return round(cut / 2)


def squash(width: int, height: int, *, size: int, fraction: float) -> Plan:
    """Resize the whole image to a square; `fraction` has no effect."""
    return CropBox(0, 0, width, height), (size, size), (0, 0)


def squash_crop(
    width: int, height: int, *, size: int, fraction: float, down: bool = False
) -> Plan:
    """Resize the whole image to a square of `size` / `fraction`, then cut the centre, rounded as
    by `center_crop`."""
    larger = math.floor(size / fraction)
    start = _start(larger, size, down=down)
    return CropBox(0, 0, width, height), (larger, larger), (start, start)


EVALUATION_CROPS: dict[str, Callable[..., Plan]] = {
    "squash": squash,
    "center_crop": center_crop,
    "center_crop_down": partial(center_crop, down=True),
    "squash_crop": squash_crop,
    "squash_crop_down": partial(squash_crop, down=True),
}
"""Values of `data.eval_resize`."""


def area_resized(
    pixels_HW3: torch.Tensor, *, resized: tuple[int, int], size: int
) -> torch.Tensor:
    """Average each output pixel's area in the image, and keep the centre. Returns uint8 [3, R, C].

    resized: rows and columns that the whole image would have. Pixels partly inside an area count by
    the part inside. Source: TensorFlow's `resize_area_op.cc`, which big_vision's `resize_small`
    uses; big_vision truncates to whole levels, and here they are rounded.
    """

    def weights(num_in: int, num_out: int, num_kept: int) -> torch.Tensor:
        """[num_kept, num_in]: the share of each input pixel in an output pixel."""
        scale = num_in / num_out
        begin_K1 = (torch.arange(num_kept)[:, None] + (num_out - num_kept) // 2) * scale
        pixel = torch.arange(num_in)
        # The overlap of each input pixel [n, n + 1) with the area of each output pixel.
        end_KN = torch.minimum(begin_K1 + scale, pixel + 1)
        return (end_KN - torch.maximum(begin_K1, pixel)).clamp(min=0) / scale

    height, width, _ = pixels_HW3.shape
    averaged_RX = weights(height, resized[0], size) @ pixels_HW3.flatten(1).float()
    planes_3RW = averaged_RX.view(size, width, 3).permute(2, 0, 1)
    averaged_3RC = planes_3RW @ weights(width, resized[1], size).T
    return averaged_3RC.round().clamp(0, 255).byte()


def crop_and_resize(pixels_HW3: torch.Tensor, request: CropRequest) -> torch.Tensor:
    """Cut the box, resample it, mirror it if asked. Returns uint8 [3, R, C].

    Raises ValueError if the box exceeds the image.
    """
    box = request.box
    height, width, _ = pixels_HW3.shape
    right = box.left + box.width
    bottom = box.top + box.height
    if not (0 <= box.left < right <= width and 0 <= box.top < bottom <= height):
        raise ValueError(f"{box} exceeds the image of {width} x {height} pixels")

    crop_HW3 = pixels_HW3[box.top : bottom, box.left : right]
    # A view of interleaved pixels is channels_last, which torch resamples faster than planes.
    crop_1CHW = crop_HW3.permute(2, 0, 1)[None]
    resized = F.interpolate(
        crop_1CHW,
        size=request.shape,
        mode=request.interpolation,
        antialias=request.antialias,
        align_corners=False,
    )[0]
    if request.flip:
        return resized.flip(-1)
    return resized


# ---- decoders ----------------------------------------------------------------------------------


def _is_whole_jpeg(data: bytes) -> bool:
    return data.startswith(JPEG_START) and data.endswith(JPEG_END)


class Decoder:
    """Whole images: ordinary JPEG with simplejpeg, the rest with Pillow.

    Stateless. Methods raise OSError or ValueError if the image is unreadable.
    """

    def size(self, data: bytes) -> tuple[int, int]:
        """Width and height, from the header alone."""
        with open_image(data) as image:
            return image.size

    def crop(self, data: bytes, request: CropRequest) -> torch.Tensor:
        """The requested pixels, uint8 [3, R, C]."""
        out = torch.empty((3, *request.shape), dtype=torch.uint8)
        self.crops(data, [request], [out])
        return out

    def crops(
        self, data: bytes, requests: Sequence[CropRequest], outs: Sequence[torch.Tensor]
    ) -> None:
        """Fill each of `outs`, contiguous uint8 [3, R, C], with the requested pixels; one decode.

        Raises ValueError for a box that exceeds the image.
        """
        # The whole image is decoded even for a small box; `RegionDecoder` is the fast way.
        pixels = self.whole(data)
        for request, out in zip(requests, outs, strict=True):
            out.copy_(crop_and_resize(pixels, request))

    def whole(self, data: bytes) -> torch.Tensor:
        """All pixels, uint8 [H, W, 3]."""
        pixels = decode_jpeg(data)
        if pixels is None:
            return decode(data)
        return pixels


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


class RegionDecoder(Decoder):
    """Only the boxes of a JPEG, decoded and resampled row by row by the C extension."""

    allow_avx2 = True
    """False: take the code of machines without AVX2, which gives the same pixels."""

    def size(self, data: bytes) -> tuple[int, int]:
        if data.startswith(JPEG_START):
            with suppress(ValueError):
                return _extension().size(data, MAX_PIXELS)
        return super().size(data)

    def crops(
        self, data: bytes, requests: Sequence[CropRequest], outs: Sequence[torch.Tensor]
    ) -> None:
        # The decoder of a box stops behind it, and so would not notice a missing end.
        if _is_whole_jpeg(data):
            # Pillow decides what is wrong with it, so that all decoders report the same.
            with suppress(ValueError, OverflowError):
                arrays = [out.numpy() for out in outs]
                decode_regions(data, requests, arrays, allow_avx2=self.allow_avx2)
                return
        super().crops(data, requests, outs)


def _extension() -> ModuleType:
    """The C extension. Raises ImportError if it was not built."""
    from vitscale.images.jpeg import _region

    return _region


def decode_regions(
    data: bytes,
    requests: Sequence[CropRequest],
    outs: Sequence[np.ndarray],
    *,
    allow_avx2: bool = True,
) -> bool:
    """Decode boxes of a JPEG into `outs`, uint8 [3, R, C], with the C extension, in one pass.
    Returns whether its own decoder of ordinary JPEGs was used, instead of libjpeg.

    Raises ValueError or OverflowError for an image that it does not support or finds damaged.
    """
    given = []
    for request, out in zip(requests, outs, strict=True):
        given.append(
            (
                request.box,
                out,
                request.size,
                request.interpolation == "bicubic",
                request.antialias,
                request.flip,
            )
        )
    entry_points = requests[0].entry_points
    used_own = _extension().crop(data, given, MAX_PIXELS, allow_avx2, entry_points)
    return bool(used_own)


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
    # Noise, subsampled colours and a box inside a block leave little room for chance.
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", subsampling="4:2:0")
    pixels = np.empty((3, 9, 9), np.uint8)
    request = CropRequest(
        box=CropBox(20, 21, 9, 9),
        size=9,
        interpolation="bilinear",
        antialias=False,
        flip=False,
    )

    try:
        decode_regions(file.getvalue(), [request], [pixels])
    except (TypeError, ValueError) as error:
        # TypeError: it was built from other sources.
        return str(error)

    expected = decode(file.getvalue())[21:30, 20:29].permute(2, 0, 1).numpy()
    if np.array_equal(pixels, expected):
        return None
    return "its pixels differ from Pillow's"


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
            "Ubuntu: gcc libjpeg-dev; Fedora: gcc libjpeg-turbo-devel), then vitscale again",
        )
    return name
