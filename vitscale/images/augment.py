"""Augment one image after crop and flip: a pure function of image, settings and random counter.

Order: RandAugment or 3-Augment; jitter, grayscale, blur, solarize; erasing. Without settings the
image is returned unchanged. Images are uint8 [3, H, W]; inputs are never modified.

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
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitscale.distributed.random_numbers import CounterRandom, splitmix
from vitscale.images.settings import (
    AugmentSettings,
    BlurSettings,
    ErasingSettings,
    JitterSettings,
    RandAugmentSettings,
)

Picture = Image.Image
Operation = Callable[[Picture, Any, CounterRandom], Picture]
"""(RGB picture, magnitude or settings, random) -> another picture. Pillow computes what it has."""
Enhancer = Callable[[Picture], ImageEnhance._Enhance]
RGB = tuple[float, float, float]
Interpolation = Literal["nearest", "bilinear", "bicubic"]
Colour = tuple[int, ...]
Matrix = tuple[float, float, float, float, float, float]

GRAY = (128, 128, 128)
ERASING_ATTEMPTS = 10
TIMM_PROBABILITY = 0.5
# The default of DeiT's `--ThreeAugment`.
THREE_JITTER = JitterSettings(
    brightness=0.3, contrast=0.3, saturation=0.3, hue=0.0, probability=1.0
)
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
    # Pillow has pixels side by side: they are moved once for all operations.
    if settings != AugmentSettings(erasing=settings.erasing):
        picture = _to_picture(image.numpy())
        if settings.randaugment is not None:
            picture = rand_augment(picture, settings.randaugment, random, mean)
        if settings.three_augment:
            picture = three_augment(picture, random)

        for name, operation in OCCASIONAL.items():
            chosen = getattr(settings, name)
            if chosen is not None and random.uniform() < chosen.probability:
                picture = operation(picture, chosen, random)
        image = torch.from_numpy(_planes(picture))

    if settings.erasing is not None:
        image = erase(image, settings.erasing, random, mean, std)
    return image


def _to_picture(pixels_3HW: np.ndarray) -> Picture:
    return Image.merge("RGB", [Image.fromarray(plane_HW) for plane_HW in pixels_3HW])


def _planes(picture: Picture) -> np.ndarray:
    """uint8 [3, H, W]"""
    return np.stack([np.asarray(plane) for plane in picture.split()])


def rand_augment(
    picture: Picture, settings: RandAugmentSettings, random: CounterRandom, mean: RGB
) -> Picture:
    """Apply `num_ops` operations, drawn with replacement. Source: Cubuk et al. 2019, and above."""
    operations = list(POLICIES[settings.policy].items())

    # What the settings change of rotation, shear and translation.
    changes: dict[str, object] = {}
    if settings.fill == "mean":
        changes["fill"] = _mean_colour(mean)
    if settings.interpolation != "random":
        changes["interpolation"] = settings.interpolation

    for _ in range(settings.num_ops):
        name, operation = operations[_below(len(operations), random)]
        if name in TIMM_GEOMETRIC:
            operation = partial(operation, **changes)
        if settings.policy == "augreg":
            picture = operation(picture, settings.magnitude, random)
        elif random.uniform() < TIMM_PROBABILITY:
            # Never 0, whose quantile is minus infinity.
            normal = NormalDist().inv_cdf(random.uniform(2.0**-54, 1.0))
            magnitude = settings.magnitude + settings.magnitude_std * normal
            picture = operation(picture, min(max(magnitude, 0.0), 10.0), random)
    return picture


def three_augment(picture: Picture, random: CounterRandom) -> Picture:
    """Grayscale, solarize or blur; then colour jitter. Source: DeiT's `augment.py` (DeiT III).

    Touvron et al. 2022, sec. 3.2.
    """
    chosen = _below(3, random)
    if chosen == 0:
        picture = picture.convert("L").convert("RGB")
    elif chosen == 1:
        picture = ImageOps.solarize(picture, 128)
    else:
        # Pillow computes it as three box filters.
        picture = picture.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))
    return jitter(picture, THREE_JITTER, random)


def jitter(
    picture: Picture, settings: JitterSettings, random: CounterRandom
) -> Picture:
    """Change each colour property by a random factor, in random order.

    Source: torchvision's `ColorJitter`, on Pillow images where Pillow has the operation.
    """
    steps = []
    for name, adjust in ADJUSTMENTS.items():
        strength = getattr(settings, name)
        if strength > 0:
            factor = random.uniform(1 - strength, 1 + strength)
            steps.append((adjust, factor))

    while steps:
        # Each round applies one of the steps that are left, which gives a random order.
        adjust, factor = steps.pop(_below(len(steps), random))
        picture = adjust(picture, factor, random)
    return picture


def turn_hue(picture: Picture, factor: float, _: CounterRandom) -> Picture:
    """Turn the hue by `factor` - 1 of the colour circle.

    Equal to torchvision's `adjust_hue` on tensors, within a level, in a third of its time. Its
    version for Pillow images takes hues in steps of 1.4 degrees, and so is up to 18 levels off.
    """
    pixels_3HW = _planes(picture).astype(np.float32)
    red, green, blue = pixels_3HW
    high = pixels_3HW.max(0)
    chroma = high - pixels_3HW.min(0)

    # Hue in sixths of the circle: red is at 0, green at 2, blue at 4. Grey has no chroma, so that
    # any hue will do.
    hue = np.where(green == high, blue - red + 2 * chroma, red - green + 4 * chroma)
    hue = np.where(red == high, green - blue, hue)
    hue = hue / np.maximum(chroma, 1) + 6 * (factor - 1)

    for channel in range(3):
        # A channel is at its highest within one sixth of its colour, at its lowest beyond two.
        away = hue - 2 * channel
        away = np.abs(away - 6 * np.rint(away / 6))
        pixels_3HW[channel] = np.rint(high - chroma * np.clip(away - 1, 0, 1))
    return _to_picture(pixels_3HW.astype(np.uint8))


def blur(picture: Picture, settings: BlurSettings, random: CounterRandom) -> Picture:
    """Convolve with a Gaussian of 9 x 9 pixels; the picture is mirrored beyond its border.

    Equal to torchvision's `gaussian_blur`, within a level, in half of its time: columns and rows
    are blurred one after the other.
    """
    distance = torch.arange(-4, 5) / random.uniform(*settings.sigma)
    weights = torch.softmax(-0.5 * distance**2, dim=0)
    padded = np.pad(_planes(picture), ((0, 0), (4, 4), (4, 4)), "reflect")
    levels = torch.from_numpy(padded).float()

    for axis, length in enumerate(reversed(picture.size), start=1):
        blurred = torch.zeros_like(levels.narrow(axis, 0, length))
        for start, weight in enumerate(weights.tolist()):
            blurred.add_(levels.narrow(axis, start, length), alpha=weight)
        levels = blurred
    return _to_picture(levels.round().byte().numpy())


OCCASIONAL: dict[str, Operation] = {
    "jitter": jitter,
    "grayscale": lambda picture, _, random: picture.convert("L").convert("RGB"),
    "blur": blur,
    "solarize": lambda picture, _, random: ImageOps.solarize(picture, 128),
}
"""Operations by the names of their settings, in their order."""


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
        # Drawn in the logarithm, so that a box is as often wide as it is high.
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
        # One colour for the whole box, which broadcasting spreads.
        size = (1, 1)
    height, width = size
    # One code for each channel and pixel: a probability in steps of 2^-16.
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
    # The middle of each step: quantiles of 0 and 1 are infinite.
    share = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    level = (255 * (mean + std * torch.special.ndtri(share))).round().clamp(0, 255)
    return level.byte().numpy()


def _codes(num: int, random: CounterRandom) -> np.ndarray:
    """uint16 [num] from one draw; one draw per pixel would take 50 ms."""
    # The generator's 53 random bits become the upper bits of a start for a stream of its own.
    start = int(random.uniform() * 2.0**53) << 11
    return splitmix(start, num // 4 + 1).astype("<u8").view("<u2")[:num]


# ---- operations of RandAugment ------------------------------------------------------------------


def _below(num: int, random: CounterRandom) -> int:
    """An integer in 0 .. num - 1."""
    return int(random.uniform() * num)


def _either_sign(value: float, random: CounterRandom) -> float:
    if random.uniform() < 0.5:
        return value
    return -value


def _augreg_contrast(picture: Picture, m: float, random: CounterRandom) -> Picture:
    """The "mean" is the mean count of the 256 histogram bins: pixels / 256, 196 at 224 px."""
    width, height = picture.size
    gray = math.floor(min(width * height / 256, 255.0))
    flat = Image.new("RGB", picture.size, (gray, gray, gray))
    return Image.blend(flat, picture, _enhance(m, random))


def _solarize_add(picture: Picture, m: float, _: CounterRandom) -> Picture:
    """Brighten values below 128."""
    addition = int(m / 10 * 110)
    dark = [min(level + addition, 255) for level in range(128)]
    return picture.point([*dark, *range(128, 256)] * 3)


def _posterize(picture: Picture, *, bits: int) -> Picture:
    """Keep the highest bits of 8. Pillow's own refuses to keep none, which gives black."""
    mask = 256 - (1 << (8 - bits))
    return picture.point([level & mask for level in range(256)] * 3)


def _augreg_cutout(picture: Picture, m: float, random: CounterRandom) -> Picture:
    """A gray square of up to 2 * pad pixels around a random pixel, clipped at the border."""
    pad = int(m / 10 * 40)
    width, height = picture.size
    y = _below(height, random)
    x = _below(width, random)
    box = (max(x - pad, 0), max(y - pad, 0), min(x + pad, width), min(y + pad, height))
    picture = picture.copy()
    picture.paste(GRAY, box)
    return picture


def _enhance(m: float, random: CounterRandom) -> float:
    """0.1 .. 1.9 .. 3.7 at magnitude 0 .. 10 .. 20; 1, at magnitude 5, changes nothing."""
    return m / 10 * 1.8 + 0.1


def _enhance_away(m: float, random: CounterRandom) -> float:
    """1 plus or minus up to 0.9."""
    return max(0.1, 1.0 + _either_sign(m / 10 * 0.9, random))


def _enhanced(
    enhancer: Enhancer,
    factor: Callable[[float, CounterRandom], float] = lambda m, random: m,
) -> Operation:
    """An operation whose factor is a function of the magnitude, or the magnitude itself."""
    return lambda picture, m, random: enhancer(picture).enhance(factor(m, random))


def _affine(
    picture: Picture,
    m: float,
    random: CounterRandom,
    *,
    matrix: Callable[[float, int, int], Matrix],
    most: float,
    fill: Colour = GRAY,
    interpolation: Interpolation | None = None,
) -> Picture:
    """Resample at (a x + b y + c, d x + e y + f), pixel centres at halves; `fill` outside.

    matrix: of `most` at magnitude 10, with a random sign, and of height and width.
    interpolation: None draws bilinear or bicubic.
    """
    amount = _either_sign(m / 10 * most, random)
    if interpolation is None:
        interpolation = "bilinear" if random.uniform() < 0.5 else "bicubic"

    width, height = picture.size
    return picture.transform(
        picture.size,
        Image.Transform.AFFINE,
        matrix(amount, height, width),
        Image.Resampling[interpolation.upper()],
        fillcolor=fill,
    )


def _rotation(degrees: float, height: int, width: int) -> Matrix:
    """About the centre."""
    angle = -math.radians(degrees)
    y = height / 2
    x = width / 2
    cos = math.cos(angle)
    sin = math.sin(angle)
    return (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)


_nearest = partial(_affine, interpolation="nearest")
AUGREG: dict[str, Operation] = {
    "auto_contrast": lambda picture, m, random: ImageOps.autocontrast(picture),
    "equalize": lambda picture, m, random: ImageOps.equalize(picture),
    "invert": lambda picture, m, random: ImageOps.invert(picture),
    "rotate": partial(_nearest, matrix=_rotation, most=30),
    # 0 bits keep the highest bit: TensorFlow limits a shift of 8 to 7.
    "posterize": lambda picture, m, random: _posterize(
        picture, bits=max(1, int(m / 10 * 4))
    ),
    # The threshold wraps to uint8: 256 and 512 (magnitudes 10 and 20) become 0. Checked on
    # 2026-11-21 with TensorFlow 2.12 and numpy 1.23; later numpy raises an error.
    "solarize": lambda picture, m, random: ImageOps.solarize(
        picture, int(m / 10 * 256) % 256
    ),
    "color": _enhanced(ImageEnhance.Color, _enhance),
    "contrast": _augreg_contrast,
    "brightness": _enhanced(ImageEnhance.Brightness, _enhance),
    "sharpness": _enhanced(ImageEnhance.Sharpness, _enhance),
    # About the centre of the first pixel.
    "shear_x": partial(
        _nearest, matrix=lambda s, h, w: (1, s, -s / 2, 0, 1, 0), most=0.3
    ),
    "shear_y": partial(
        _nearest, matrix=lambda s, h, w: (1, 0, 0, s, 1, -s / 2), most=0.3
    ),
    # By whole pixels, whatever the image's size; halves are rounded up, for both signs.
    "translate_x": partial(
        _nearest, matrix=lambda t, h, w: (1, 0, math.floor(t + 0.5), 0, 1, 0), most=100
    ),
    "translate_y": partial(
        _nearest, matrix=lambda t, h, w: (1, 0, 0, 0, 1, math.floor(t + 0.5)), most=100
    ),
    "cutout": _augreg_cutout,
    "solarize_add": _solarize_add,
}
"""Ranges: `level_to_arg` and `distort_image_with_randaugment` of big_vision."""

TIMM: dict[str, Operation] = {
    "auto_contrast": AUGREG["auto_contrast"],
    "equalize": AUGREG["equalize"],
    "invert": AUGREG["invert"],
    "rotate": partial(_affine, matrix=_rotation, most=30),
    "posterize": lambda picture, m, random: _posterize(
        picture, bits=4 - int(m / 10 * 4)
    ),
    "solarize": lambda picture, m, random: ImageOps.solarize(
        picture, threshold=256 - int(m / 10 * 256)
    ),
    "solarize_add": AUGREG["solarize_add"],
    "color": _enhanced(ImageEnhance.Color, _enhance_away),
    "contrast": _enhanced(ImageEnhance.Contrast, _enhance_away),
    "brightness": _enhanced(ImageEnhance.Brightness, _enhance_away),
    "sharpness": _enhanced(ImageEnhance.Sharpness, _enhance_away),
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

ADJUSTMENTS: dict[str, Operation] = {
    "brightness": _enhanced(ImageEnhance.Brightness),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "saturation": _enhanced(ImageEnhance.Color),
    "hue": turn_hue,
}
"""What `jitter` changes by a factor, by the names of its settings."""

POLICIES = {"augreg": AUGREG, "timm": TIMM}
