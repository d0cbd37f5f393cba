"""Augment one image after crop and flip: a pure function of image, settings and random counter.

Order: RandAugment or 3-Augment, erasing. Without settings the image is returned unchanged. Images
are uint8 [3, H, W]; inputs are never modified.

There are two RandAugments. `augreg` is that of Steiner et al. 2021 (big_vision's
`pp/autoaugment.py`, from the TPU EfficientNet code): 16 operations, always applied, nearest
neighbour, translation in pixels, magnitudes 0..20, with the quirks that the published models were
trained with. `timm` is `rand-mM-mstdS-inc1` of timm's `auto_augment.py`, used by DeiT: 15
operations, each applied with probability 0.5, all stronger with magnitude, magnitudes 0..10; what
it fills with and how it resamples are settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageFilter

from vitscale.distributed.random_numbers import CounterRandom, splitmix
from vitscale.images.settings import (
    AugmentSettings,
    ErasingSettings,
    RandAugmentSettings,
)

Operation = Callable[[torch.Tensor, float, CounterRandom], torch.Tensor]
RGB = tuple[float, float, float]
Interpolation = Literal["nearest", "bilinear", "bicubic"]
Colour = tuple[int, ...]
Matrix = tuple[float, float, float, float, float, float]

_LEVELS = np.arange(256)

GRAY = 128
ERASING_ATTEMPTS = 10
TIMM_PROBABILITY = 0.5
JITTER = 0.3  # the default of DeiT's `--ThreeAugment`
# Least and largest share of the image's area, and ratio of its sides: timm's defaults.
ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)


def augment(
    image: torch.Tensor,
    settings: AugmentSettings,
    random: CounterRandom,
    mean: RGB,
    std: RGB,
) -> torch.Tensor:
    """The augmented image, uint8 [3, H, W].

    mean, std: of the run's normalisation; erasing and RandAugment fill with them.
    """
    if settings.randaugment is not None:
        image = rand_augment(image, settings.randaugment, random, mean)
    if settings.three_augment:
        image = three_augment(image, random)
    if settings.erasing is not None:
        image = erase(image, settings.erasing, random, mean, std)
    return image


def rand_augment(
    image: torch.Tensor, settings: RandAugmentSettings, random: CounterRandom, mean: RGB
) -> torch.Tensor:
    """Apply `num_ops` operations, drawn with replacement. Source: Cubuk et al. 2019, and above."""
    operations = _operations(settings, mean)
    for _ in range(settings.num_ops):
        operation = operations[_below(len(operations), random)]
        if settings.policy == "augreg":
            image = operation(image, settings.magnitude, random)
        elif random.uniform() < TIMM_PROBABILITY:
            normal = NormalDist().inv_cdf(random.uniform(2.0**-54, 1.0))
            magnitude = settings.magnitude + settings.magnitude_std * normal
            image = operation(image, min(max(magnitude, 0.0), 10.0), random)
    return image


def _operations(settings: RandAugmentSettings, mean: RGB) -> list[Operation]:
    operations = dict(POLICIES[settings.policy])
    changes: dict[str, object] = {}
    if settings.fill == "mean":
        changes["fill"] = _mean_colour(mean)
    if settings.interpolation != "random":
        changes["interpolation"] = settings.interpolation
    for name in TIMM_GEOMETRIC:
        operations[name] = partial(operations[name], **changes)
    return list(operations.values())


def three_augment(image: torch.Tensor, random: CounterRandom) -> torch.Tensor:
    """Grayscale, solarize or blur; then colour jitter. Source: DeiT's `augment.py` (DeiT III).

    Touvron et al. 2022, sec. 3.2. Jitter in random order, as torchvision's `ColorJitter` on Pillow
    images.
    """
    chosen = _below(3, random)
    if chosen == 0:
        image = grayscale(image).repeat(3, 1, 1)
    elif chosen == 1:
        image = solarize(image, threshold=128)
    else:
        blur = ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))  # three box filters
        image = _from_rgb(_to_rgb(image).filter(blur))
    steps = [
        partial(operation, factor=random.uniform(1 - JITTER, 1 + JITTER))
        for operation in (brightness, contrast, saturation)
    ]
    while steps:
        image = steps.pop(_below(len(steps), random))(image)
    return image


# ---- erasing ----------------------------------------------------------------------------------


def erase(
    image: torch.Tensor,
    settings: ErasingSettings,
    random: CounterRandom,
    mean: RGB,
    std: RGB,
) -> torch.Tensor:
    """Fill a random box. Source: Zhong et al. 2017; boxes and modes of timm's `RandomErasing`.

    timm fills normalised images with 0 (const) or normal noise (rand: one colour, pixel: each
    pixel). Here the same is done in uint8: the mean colour, or mean + std * noise, drawn with 16
    bits of probability; both are rounded and clipped to 0..255.
    """
    if random.uniform() >= settings.probability:
        return image
    _, height, width = image.shape
    for _ in range(ERASING_ATTEMPTS):
        pixels = random.uniform(*ERASED_AREA) * height * width
        ratio = math.exp(random.uniform(*map(math.log, ERASED_ASPECT)))
        h = round(math.sqrt(pixels * ratio))
        w = round(math.sqrt(pixels / ratio))
        if h < height and w < width:
            top = _below(height - h + 1, random)
            left = _below(width - w + 1, random)
            erased = image.clone()
            filling = _filling(settings.mode, (h, w), random, mean, std)
            erased[:, top : top + h, left : left + w] = filling
            return erased
    return image


def _filling(
    mode: str, size: tuple[int, int], random: CounterRandom, mean: RGB, std: RGB
) -> torch.Tensor:
    """uint8, broadcastable to [3, h, w]."""
    if mode == "const":
        return torch.tensor(_mean_colour(mean), dtype=torch.uint8).view(3, 1, 1)
    if mode == "rand":
        size = (1, 1)
    height, width = size
    codes = _codes(3 * height * width, random).reshape(3, height, width)
    planes = [
        _noise_levels(*statistics)[plane]
        for *statistics, plane in zip(mean, std, codes, strict=True)
    ]
    return torch.from_numpy(np.stack(planes))


def _mean_colour(mean: RGB) -> Colour:
    return tuple(min(max(round(255 * level), 0), 255) for level in mean)


@lru_cache(maxsize=8)
def _noise_levels(mean: float, std: float) -> np.ndarray:
    """uint8 [65536]: quantiles of a normal distribution at equal steps of probability."""
    share = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    level = (255 * (mean + std * torch.special.ndtri(share))).round().clamp(0, 255)
    return level.byte().numpy()


def _codes(num: int, random: CounterRandom) -> np.ndarray:
    """uint16 [num] from one draw; one draw per pixel would take 50 ms."""
    start = int(random.uniform() * 2.0**53) << 11
    return splitmix(start, num // 4 + 1).astype("<u8").view("<u2")[:num]


# ---- operations ---------------------------------------------------------------------------------
# Colour and geometry of one uint8 image [3, H, W], deterministic; each returns a new tensor, equal
# to Pillow's result on an RGB image, level by level. Resampling and blur call Pillow; merging and
# splitting channels is a fifth of their cost.


def map_levels(image_3HW: torch.Tensor, *tables: np.ndarray) -> torch.Tensor:
    """Replace every value by its entry in a table of 256; one table, or one per channel."""
    codes = [table.astype(np.uint8).tobytes() for table in tables]
    mapped = bytearray()
    for channel, plane_HW in enumerate(image_3HW.contiguous().numpy()):
        mapped += bytearray(plane_HW).translate(codes[channel % len(codes)])
    return torch.frombuffer(mapped, dtype=torch.uint8).view(image_3HW.shape)


def solarize(image_3HW: torch.Tensor, *, threshold: int) -> torch.Tensor:
    """Invert values at or above `threshold`; 256 changes nothing."""
    if threshold > 255:
        return image_3HW.clone()
    return image_3HW ^ torch.ge(image_3HW, threshold).view(torch.uint8).neg_()


def solarize_add(image_3HW: torch.Tensor, *, addition: int) -> torch.Tensor:
    """Brighten values below 128."""
    added = np.minimum(_LEVELS + addition, 255)
    return map_levels(image_3HW, np.where(_LEVELS < 128, added, _LEVELS))


def posterize(image_3HW: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Keep the highest `bits` of 8."""
    return image_3HW & (256 - (1 << (8 - bits)))


def auto_contrast(image_3HW: torch.Tensor) -> torch.Tensor:
    """Stretch each channel to 0..255."""
    tables = []
    for plane_HW in image_3HW:
        low, high = (int(value) for value in plane_HW.aminmax())
        if low == high:
            tables.append(_LEVELS)
        else:
            scale = 255.0 / (high - low)
            tables.append((_LEVELS * scale - low * scale).clip(0, 255))
    return map_levels(image_3HW, *tables)


def equalize(image_3HW: torch.Tensor) -> torch.Tensor:
    """Flatten each channel's histogram, by Pillow's integer rule."""
    tables = []
    for plane_HW in image_3HW:
        counts = torch.bincount(plane_HW.flatten(), minlength=256).numpy()
        step = (counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        if step == 0:
            tables.append(_LEVELS)
        else:
            before = np.cumsum(counts) - counts
            tables.append(((before + step // 2) // step).clip(0, 255))
    return map_levels(image_3HW, *tables)


def grayscale(image_3HW: torch.Tensor) -> torch.Tensor:
    """ITU-R 601 luma in Pillow's 16-bit fixed point, uint8 [1, H, W]."""
    r_HW, g_HW, b_HW = image_3HW.int()
    luma_HW = (r_HW * 19595).add_(g_HW, alpha=38470).add_(b_HW, alpha=7471).add_(0x8000)
    return luma_HW.bitwise_right_shift_(16).byte()[None]


def brightness(image_3HW: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Blend with black: 0 is black, 1 changes nothing."""
    return map_levels(image_3HW, _blend_table(0.0, factor))


def contrast(
    image_3HW: torch.Tensor, *, factor: float, gray: float | None = None
) -> torch.Tensor:
    """Blend with one gray level: the rounded mean luma, or `gray`."""
    if gray is None:
        gray = math.floor(float(grayscale(image_3HW).double().mean()) + 0.5)
    return map_levels(image_3HW, _blend_table(gray, factor))


def saturation(image_3HW: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Blend with the luma: 0 is gray, 1 changes nothing."""
    return _blend(grayscale(image_3HW), image_3HW, factor)


def sharpness(image_3HW: torch.Tensor, *, factor: float) -> torch.Tensor:
    """Blend with a smoothed image: 0 is smooth, 1 changes nothing. The border is not changed."""
    if min(image_3HW.shape[1:]) < 3:
        return image_3HW.clone()
    x = image_3HW.short()
    rows = (x[:, :-2] + x[:, 1:-1]).add_(x[:, 2:])
    sums = (rows[:, :, :-2] + rows[:, :, 1:-1]).add_(rows[:, :, 2:])
    sums.add_(x[:, 1:-1, 1:-1], alpha=4)
    smooth_3HW = image_3HW.clone()
    smooth_3HW[:, 1:-1, 1:-1] = sums.float().mul_(1 / 13).add_(0.5).byte()
    return _blend(smooth_3HW, image_3HW, factor)


def _to_rgb(image_3HW: torch.Tensor) -> Image.Image:
    _, height, width = image_3HW.shape
    planes = [
        Image.frombuffer("L", (width, height), plane_HW, "raw", "L", 0, 1)
        for plane_HW in image_3HW.contiguous().numpy()
    ]
    return Image.merge("RGB", planes)


def _from_rgb(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.stack([np.asarray(plane) for plane in image.split()]))


def _blend_table(gray: float, factor: float) -> np.ndarray:
    """`_blend` of every level with one gray."""
    ramp = _LEVELS.astype(np.float32)
    low = np.float32(gray)
    return (low + np.float32(factor) * (ramp - low)).clip(0, 255)


def _blend(
    from_1or3HW: torch.Tensor, to_3HW: torch.Tensor, factor: float
) -> torch.Tensor:
    """0 gives the first, 1 the second, above 1 extrapolates; truncates as Pillow does."""
    low = from_1or3HW.float()
    mixed = to_3HW.float()
    # In place: page faults of a new tensor would cost more than the arithmetic.
    return mixed.sub_(low).mul_(factor).add_(low).clamp_(0, 255).byte()


# ---- RandAugment: (image, magnitude, random) -> image -------------------------------------------


def _below(num: int, random: CounterRandom) -> int:
    """An integer in 0 .. num - 1."""
    return int(random.uniform() * num)


def _either_sign(value: float, random: CounterRandom) -> float:
    return value if random.uniform() < 0.5 else -value


def _augreg_contrast(
    image: torch.Tensor, m: float, random: CounterRandom
) -> torch.Tensor:
    """The "mean" is the mean count of the 256 histogram bins: pixels / 256, 196 at 224 px."""
    gray = min(image.shape[1] * image.shape[2] / 256, 255.0)
    return contrast(image, factor=_enhance(m, random), gray=math.floor(gray))


def _augreg_solarize(image: torch.Tensor, m: float, _: CounterRandom) -> torch.Tensor:
    """The threshold wraps to uint8: 256 and 512 (magnitudes 10 and 20) become 0.

    Checked on 2026-11-21 with TensorFlow 2.12 and numpy 1.23; later numpy raises an error.
    """
    return solarize(image, threshold=int(m / 10 * 256) % 256)


def _augreg_cutout(
    image: torch.Tensor, m: float, random: CounterRandom
) -> torch.Tensor:
    """A gray square of up to 2 * pad pixels around a random pixel, clipped at the border."""
    pad = int(m / 10 * 40)
    _, height, width = image.shape
    y = _below(height, random)
    x = _below(width, random)
    image = image.clone()
    image[:, max(y - pad, 0) : y + pad, max(x - pad, 0) : x + pad] = GRAY
    return image


def _enhance(m: float, random: CounterRandom) -> float:
    """0.1 .. 1.9 .. 3.7 at magnitude 0 .. 10 .. 20; 1, at magnitude 5, changes nothing."""
    return m / 10 * 1.8 + 0.1


def _enhance_away(m: float, random: CounterRandom) -> float:
    """1 plus or minus up to 0.9."""
    return max(0.1, 1.0 + _either_sign(m / 10 * 0.9, random))


def _by_factor(
    operation: Callable[..., torch.Tensor],
    factor: Callable[[float, CounterRandom], float],
) -> Operation:
    """An operation whose factor is a function of the magnitude."""
    return lambda image, m, random: operation(image, factor=factor(m, random))


def _affine(
    image: torch.Tensor,
    m: float,
    random: CounterRandom,
    *,
    matrix: Callable[[float, int, int], Matrix],
    most: float,
    fill: Colour = (GRAY, GRAY, GRAY),
    interpolation: Interpolation | None = None,
) -> torch.Tensor:
    """Resample at (a x + b y + c, d x + e y + f), pixel centres at halves; `fill` outside.

    matrix: of `most` at magnitude 10, with a random sign, and of height and width.
    interpolation: None draws bilinear or bicubic.
    """
    amount = _either_sign(m / 10 * most, random)
    if interpolation is None:
        interpolation = "bilinear" if random.uniform() < 0.5 else "bicubic"
    picture = _to_rgb(image)
    resampled = picture.transform(
        picture.size,
        Image.Transform.AFFINE,
        matrix(amount, *image.shape[1:]),
        Image.Resampling[interpolation.upper()],
        fillcolor=fill,
    )
    return _from_rgb(resampled)


def _rotation(degrees: float, height: int, width: int) -> Matrix:
    """About the centre."""
    angle = -math.radians(degrees)
    y = height / 2
    x = width / 2
    cos = math.cos(angle)
    sin = math.sin(angle)
    return (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


def _augreg_translate(
    image: torch.Tensor, m: float, random: CounterRandom, *, along_x: bool
) -> torch.Tensor:
    """Translate by up to 100 whole pixels (200 at magnitude 20), for any image size."""
    side = image.shape[2 if along_x else 1]
    pixels = math.floor(_either_sign(m / 10 * 100, random) + 0.5)
    pixels = min(max(pixels, -side), side)
    cut = (-pixels, pixels) if along_x else (0, 0, -pixels, pixels)
    return F.pad(image, cut, value=GRAY)


_nearest = partial(_affine, interpolation="nearest")
AUGREG: dict[str, Operation] = {
    "auto_contrast": lambda image, m, random: auto_contrast(image),
    "equalize": lambda image, m, random: equalize(image),
    "invert": lambda image, m, random: ~image,
    "rotate": partial(_nearest, matrix=_rotation, most=30),
    # 0 bits keep the highest bit: TensorFlow limits a shift of 8 to 7.
    "posterize": lambda image, m, random: posterize(
        image, bits=max(1, int(m / 10 * 4))
    ),
    "solarize": _augreg_solarize,
    "color": _by_factor(saturation, _enhance),
    "contrast": _augreg_contrast,
    "brightness": _by_factor(brightness, _enhance),
    "sharpness": _by_factor(sharpness, _enhance),
    # About the centre of the first pixel.
    "shear_x": partial(
        _nearest, matrix=lambda s, h, w: (1, s, -s / 2, 0, 1, 0), most=0.3
    ),
    "shear_y": partial(
        _nearest, matrix=lambda s, h, w: (1, 0, 0, s, 1, -s / 2), most=0.3
    ),
    "translate_x": partial(_augreg_translate, along_x=True),
    "translate_y": partial(_augreg_translate, along_x=False),
    "cutout": _augreg_cutout,
    "solarize_add": lambda image, m, random: solarize_add(
        image, addition=int(m / 10 * 110)
    ),
}
"""Ranges: `level_to_arg` and `distort_image_with_randaugment` of big_vision."""

TIMM: dict[str, Operation] = {
    "auto_contrast": AUGREG["auto_contrast"],
    "equalize": AUGREG["equalize"],
    "invert": AUGREG["invert"],
    "rotate": partial(_affine, matrix=_rotation, most=30),
    "posterize": lambda image, m, random: posterize(image, bits=4 - int(m / 10 * 4)),
    "solarize": lambda image, m, random: solarize(
        image, threshold=256 - int(m / 10 * 256)
    ),
    "solarize_add": AUGREG["solarize_add"],
    "color": _by_factor(saturation, _enhance_away),
    "contrast": _by_factor(contrast, _enhance_away),
    "brightness": _by_factor(brightness, _enhance_away),
    "sharpness": _by_factor(sharpness, _enhance_away),
    "shear_x": partial(_affine, matrix=lambda s, h, w: (1, s, 0, 0, 1, 0), most=0.3),
    "shear_y": partial(_affine, matrix=lambda s, h, w: (1, 0, 0, s, 1, 0), most=0.3),
    "translate_x": partial(
        _affine, matrix=lambda t, h, w: (1, 0, t * w, 0, 1, 0), most=0.45
    ),
    "translate_y": partial(
        _affine, matrix=lambda t, h, w: (1, 0, 0, 0, 1, t * h), most=0.45
    ),
}
"""Ranges: `_RAND_INCREASING_TRANSFORMS` and `LEVEL_TO_ARG` of timm 1.0."""
TIMM_GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")

POLICIES = {"augreg": AUGREG, "timm": TIMM}
