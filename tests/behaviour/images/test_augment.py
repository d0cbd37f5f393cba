"""Augmentation as a whole, erasing, and each recipe's operations as timm, DeiT, big_vision and
torchvision."""

from collections import Counter
from itertools import permutations, product

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from timm.data import auto_augment as timm_augment
from torchvision.transforms.v2 import functional as torchvision

from tests.support.tables import every, rows
from vitscale.distributed.random_numbers import CounterRandom
from vitscale.images.augment import (
    ADJUSTMENTS,
    AUGREG,
    OCCASIONAL,
    TIMM,
    augment,
    rand_augment,
    three_augment,
)
from vitscale.images.settings import (
    AugmentSettings,
    ErasingSettings,
    RandAugmentSettings,
)

# The colour statistics of ImageNet, as timm and torchvision have them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)

# Each policy, with magnitudes that are drawn, published, and the largest; and each other part
# alone.
VARIANTS = yaml.safe_load("""
timm, erasing:
  randaugment: {num_ops: 2, magnitude: 9, policy: timm, magnitude_std: 0.5}
  erasing: {probability: 0.7, mode: pixel}
augreg: {randaugment: {num_ops: 2, magnitude: 15}}
augreg 20: {randaugment: {num_ops: 5, magnitude: 20}}
three: {three_augment: true}
erasing: {erasing: {probability: 1, mode: rand}}
dino:
  jitter: {probability: 0.8, brightness: 0.4, contrast: 0.4, saturation: 0.2, hue: 0.1}
  grayscale: {probability: 0.2}
  blur: {probability: 0.5}
  solarize: {probability: 0.2}
""")


class Scripted(CounterRandom):
    """Returns prepared fractions of the requested range."""

    def __init__(self, *shares):
        super().__init__(0)
        self.shares = list(shares)

    def uniform(self, low=0.0, high=1.0):
        return low + (high - low) * self.shares.pop(0)


def photo(size=48, seed=0):
    """A smooth picture with flat bright and dark parts, where an overflow shows."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 6, 6, generator=generator) * 300 - 20
    fine = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    return fine.clamp(0, 255).byte()[0]


def run(image, settings, key):
    return augment(image, settings, CounterRandom(key), mean=MEAN, std=STD)


@every(name=VARIANTS)
@given(
    height=st.integers(1, 30),
    width=st.integers(1, 30),
    low=st.integers(0, 255),
    key=st.integers(0, 2**64 - 1),
)
@settings(max_examples=25, deadline=None)
def test_any_image_stays_an_image(name, height, width, low, key):
    # Bright images too, on which an overflow would show.
    shape = (3, height, width)
    levels = np.random.default_rng(key).integers(low, 256, shape, dtype=np.uint8)
    image = torch.from_numpy(levels)
    before = image.clone()
    chosen = AugmentSettings.model_validate(VARIANTS[name])
    result = run(image, chosen, key)
    assert result.dtype == torch.uint8
    assert result.shape == image.shape
    assert torch.equal(result, run(image, chosen, key)), "not a function of the key"

    # The image given stays as it was, and without settings it is passed on.
    assert torch.equal(image, before)
    assert run(image, AugmentSettings(), key) is image


@every(mode="const, rand, pixel")
def test_erasing_fills_one_box(mode):
    # White, so that all else was erased.
    image = torch.full((3, 64, 64), 255, dtype=torch.uint8)
    erasing = ErasingSettings(probability=0.25, mode=mode)
    options = AugmentSettings(erasing=erasing)
    boxes = []
    for key in range(2000):
        erased = run(image, options, key << 20)
        rows, columns = (erased != 255).any(dim=0).nonzero(as_tuple=True)
        if len(rows):
            bottom = rows.max() + 1
            right = columns.max() + 1
            boxes.append(erased[:, rows.min() : bottom, columns.min() : right])

    # A quarter of the images; timm's boxes are 1/50 to 1/3 of the area, before rounding.
    shares = [box[0].numel() / 64**2 for box in boxes]
    assert len(shares) == pytest.approx(500, rel=0.2)
    assert min(shares) > 0.015
    assert 0.3 < max(shares) < 0.36

    # Boxes are filled with the mean, with one draw for all pixels, or with a draw for each.
    flat = [box.flatten(1) for box in boxes]
    pixels = torch.cat(flat, dim=1).double()
    for levels, mean, std in zip(pixels, MEAN, STD, strict=True):
        assert levels.mean() == pytest.approx(255 * mean, abs=5.0)
        if mode == "const":
            assert levels.unique().tolist() == [round(255 * mean)]
        if mode == "pixel":
            # Noise is cut off at 0 and 255, which narrows it.
            assert levels.std() == pytest.approx(255 * std, rel=0.05)
    are_flat = all((box == box[:, :1, :1]).all() for box in boxes)
    assert are_flat == (mode != "pixel")
    if mode == "rand":
        colours = {tuple(box[:, 0, 0].tolist()) for box in boxes}
        assert len(colours) > 400


# ---- RandAugment: strengths, and probabilities by counting ---------------------------------------

# timm's names differ from those of the settings, its order does not.
TIMM_NAMES = dict(zip(TIMM, timm_augment._RAND_INCREASING_TRANSFORMS, strict=True))


PHOTO = photo(61, seed=3)[:, :45]  # not square
SEEDED = torch.Generator().manual_seed(1)
NOISE = torch.randint(0, 256, (3, 33, 40), generator=SEEDED).byte()
# Photographs, noise, pictures of a few pixels, and one without any contrast.
IMAGES = [
    PHOTO,
    photo(224),
    NOISE,
    NOISE[:, :2, :5],
    NOISE[:, :1, :1],
    torch.full_like(NOISE, 9),
]


def timm_operation(name, magnitude, **hparams):
    return timm_augment.AugmentOp(
        TIMM_NAMES[name],
        1.0,  # always applied
        magnitude=magnitude,
        hparams={"img_mean": (128, 128, 128), **hparams},
    )


def off_by(own, expected):
    """The largest difference of two pictures, in levels."""
    levels = torch.from_numpy(np.array(expected))
    differences = own.permute(1, 2, 0).int() - levels.int()
    return int(differences.abs().max())


def to_pil(image):
    pixels = image.permute(1, 2, 0).contiguous()
    return Image.fromarray(pixels.numpy())


def applied(operation, image, *arguments):
    """An operation on pictures, for a tensor: uint8 [3, H, W] before and after."""
    picture = operation(to_pil(image), *arguments)
    levels = torch.from_numpy(np.array(picture))
    return levels.permute(2, 0, 1)


@every(name=TIMM, magnitude="0.0, 3.3, 9.0, 9.9", sign="1, -1")
def test_timm_policy_equals_timm(name, magnitude, sign, monkeypatch):
    """Equal to one level: machines may round a blend's products differently."""
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: sign * value)
    for kind, share in (("BILINEAR", 0.2), ("BICUBIC", 0.7)):
        interpolation = Image.Resampling[kind]
        reference = timm_operation(name, magnitude, interpolation=interpolation)
        for image in IMAGES:
            # Below a half is the positive sign, and the bilinear resampling.
            drawn = Scripted(0.2 if sign == 1 else 0.7, share)
            own = applied(TIMM[name], image, magnitude, drawn)
            assert off_by(own, reference(to_pil(image))) <= 1


@every(name="rotate, shear_x, shear_y, translate_x, translate_y", sign="1, -1")
def test_fill_and_resampling_are_those_of_timms_training(name, sign, monkeypatch):
    """DeiT: `create_transform` passes its bicubic resize and the mean's colour to RandAugment."""
    monkeypatch.setattr(timm_augment, "_randomly_negate", lambda value: sign * value)
    colour = (124, 116, 104)
    bicubic = Image.Resampling.BICUBIC
    reference = timm_operation(name, 9, img_mean=colour, interpolation=bicubic)
    policy = RandAugmentSettings(
        num_ops=1,
        magnitude=9,
        policy="timm",
        fill="mean",
        interpolation="bicubic",
    )

    # Which operation, whether it is applied, its magnitude, its sign; no draw for the resampling.
    which = (list(TIMM).index(name) + 0.5) / len(TIMM)
    drawn = Scripted(which, 0.1, 0.5, 0.5 - sign * 0.3)
    own = applied(rand_augment, PHOTO, policy, drawn, MEAN)
    assert off_by(own, reference(to_pil(PHOTO))) <= 1
    assert not drawn.shares

    # The picture was moved far enough to show the colour.
    filling = torch.tensor(colour).view(3, 1, 1)
    uncovered = (own == filling).all(dim=0)
    assert uncovered.float().mean() > 0.05


# ---- operations on some of the images ------------------------------------------------------------

NO_JITTER = dict.fromkeys(ADJUSTMENTS, 0.0)


def occasional(name, probability, values):
    """One operation alone. values: its other settings; strengths that are not given are 0."""
    section = {"probability": probability, **values}
    if name == "jitter":
        section = NO_JITTER | section
    return AugmentSettings.model_validate({name: section})


# The range of what torchvision's function gets last, and how many levels its result on Pillow
# images may be away. There hue and saturation are whole numbers up to 255, cut off, not rounded.
@rows("""
- [name, values, function, arguments, low, high, off_pillow]
- [jitter, {brightness: 0.8}, adjust_brightness, [], 0.2, 1.8, 0]
- [jitter, {contrast: 0.8}, adjust_contrast, [], 0.2, 1.8, 0]
- [jitter, {saturation: 1.0}, adjust_saturation, [], 0, 2, 0]
- [jitter, {hue: 0.5}, adjust_hue, [], -0.5, 0.5, 18]
- [grayscale, {}, rgb_to_grayscale, [], 3, 3, 0]
- [blur, {}, gaussian_blur, [9], 0.1, 2, 1]
- [blur, {sigma: [1.5, 3.5]}, gaussian_blur, [9], 1.5, 3.5, 1]
- [solarize, {}, solarize, [], 128, 128, 0]
""")
def test_operations_equal_torchvision(
    name, values, function, arguments, low, high, off_pillow
):
    """On tensors within a level, which is the bound for hue and blur; the others are Pillow's."""
    reference = getattr(torchvision, function)
    chosen = occasional(name, 1.0, values)
    for image, share in product(IMAGES, (0.0, 0.07, 0.3, 0.5, 0.999)):
        # torchvision does not mirror pictures that are smaller than half of the kernel.
        if name != "blur" or min(image.shape) > 2:
            last = low + (high - low) * share
            own = augment(image, chosen, Scripted(0.9, share, 0.0), MEAN, STD)
            expected = reference(image, *arguments, last)
            assert (own.int() - expected.int()).abs().max() <= 1
            pillow = reference(to_pil(image), *arguments, last)
            assert off_by(own, pillow) <= off_pillow


# Values that change each image which they are applied to.
@rows("""
- [name, values, probability]
- [jitter, {brightness: 0.4}, 0.8]
- [jitter, {hue: 0.5}, 0.05]
- [grayscale, {}, 0.2]
- [blur, {sigma: [1, 2]}, 0.1]
- [blur, {sigma: [1, 2]}, 0.9]
- [solarize, {}, 0.2]
""")
def test_operations_are_as_frequent_as_their_probability(name, values, probability):
    chosen = occasional(name, probability, values)
    image = NOISE[:, :8, :8]
    num_changed = 0
    for key in range(2000):
        num_changed += not torch.equal(run(image, chosen, key << 20), image)

    # Five standard deviations of a count.
    expected = 2000 * probability
    assert abs(num_changed - expected) < 5 * np.sqrt(expected * (1 - probability))


def test_jitter_draws_each_order_and_the_whole_range(monkeypatch):
    calls = []
    for name in ADJUSTMENTS:

        def record(picture, factor, random, name=name):
            calls.append((name, factor))
            return picture

        monkeypatch.setitem(ADJUSTMENTS, name, record)
    strengths = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.2, "hue": 0.1}
    chosen = occasional("jitter", 1.0, strengths)
    for key in range(2400):
        run(NOISE, chosen, key << 20)

    # As torchvision's shuffle: all 24 orders, 100 times each but for five standard deviations.
    names = [name for name, _ in calls]
    orders = Counter(tuple(names[start : start + 4]) for start in range(0, 9600, 4))
    assert orders.keys() == set(permutations(ADJUSTMENTS))
    assert max(abs(num - 100) for num in orders.values()) < 50
    for name, strength in strengths.items():
        factors = [factor for other, factor in calls if other == name]
        assert 1 - strength <= min(factors) < 1 - 0.99 * strength
        assert 1 + strength >= max(factors) > 1 + 0.99 * strength
        assert np.mean(factors) == pytest.approx(1, abs=strength / 16)


# Which of the three, drawn as a share.
@pytest.mark.parametrize(
    ("chosen", "reference"),
    [
        (0.1, lambda image: ImageOps.grayscale(image).convert("RGB")),
        (0.5, lambda image: ImageOps.solarize(image, 128)),
        (0.9, lambda image: image.filter(ImageFilter.GaussianBlur(1.05))),
    ],
)
def test_three_augment_equals_pillow(chosen, reference):
    """DeiT-III's: one of three, then contrast, saturation and brightness in a drawn order."""
    strength = [0.5] if chosen == 0.9 else []  # of the blur
    for image in IMAGES:
        # Factors of brightness, contrast, saturation, and three times which is next.
        drawn = Scripted(chosen, *strength, 0.1, 0.7, 1.0, 0.5, 0.9, 0.0)
        expected = reference(to_pil(image))

        # From 0.7 to 1.3: a tenth, seven tenths and all of that range.
        for enhancer, factor in (
            (ImageEnhance.Contrast, 1.12),
            (ImageEnhance.Color, 1.3),
            (ImageEnhance.Brightness, 0.76),
        ):
            expected = enhancer(expected).enhance(factor)
        own = applied(three_augment, image, drawn)
        assert off_by(own, expected) == 0
        assert not drawn.shares


def _blend(gray, image, factor):
    return np.trunc(np.clip(gray + factor * (image - gray), 0, 255))


@every(magnitude="0.0, 2.0, 10.0, 15.0, 20.0")
def test_augreg_levels(magnitude):
    # By the formulas of big_vision, in floats. Its threshold wraps at 256; 0 bits keep one.
    image = photo(224, seed=5)
    x = image.numpy().astype(np.float64)
    factor = 0.1 + 0.18 * magnitude
    threshold = {0: 0, 2: 51, 10: 0, 15: 128, 20: 0}[int(magnitude)]
    bits = {0: 1, 2: 1, 10: 4, 15: 6, 20: 8}[int(magnitude)]
    step = 2 ** (8 - bits)
    brighter = np.minimum(x + int(11 * magnitude), 255)

    # Grey of ITU-R 601.
    red, green, blue = x
    luma = np.round(0.2989 * red + 0.587 * green + 0.114 * blue)

    # A kernel of ones with 5 in the middle; the border stays as it is.
    smooth = x.copy()
    inner = np.s_[:, 1:-1, 1:-1]
    window = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2))
    sums = window.sum(axis=(3, 4)) + 4 * x[inner]
    smooth[inner] = sums // 13
    expected = {
        "invert": 255 - x,
        "posterize": x // step * step,
        "solarize": np.where(x < threshold, x, 255 - x),
        "solarize_add": np.where(x < 128, brighter, x),
        "brightness": _blend(0.0, x, factor),
        # 224 * 224 pixels in 256 bins.
        "contrast": _blend(196.0, x, factor),
        "color": _blend(luma, x, factor),
        "sharpness": _blend(smooth, x, factor),
    }
    for name, levels in expected.items():
        own = applied(AUGREG[name], image, magnitude, Scripted()).numpy()

        # Luma and smoothing may round the other way; what is blended past it grows that by |1 - f|.
        allowed = 1.0
        if name in ("color", "sharpness"):
            allowed += abs(1 - factor)
        assert np.abs(own - levels).max() <= allowed, name


@every(sign="1, -1")
def test_augreg_geometry_is_nearest_neighbour(sign):
    """Pixel by pixel: centres at whole numbers, sheared about the first, turned about the middle;
    100 pixels and 30 degrees at magnitude 10 (9.7 here: 10 puts every tenth row half way)."""
    size = 130
    last = size - 1
    middle = last / 2
    photograph = photo(size, seed=2)
    image = photograph.numpy()
    radians = np.deg2rad(29.1 * sign)
    cos = np.cos(radians)
    sin = np.sin(radians)
    positions = np.arange(float(size))
    x, y = np.meshgrid(positions, positions)
    u = x - middle
    v = y - middle

    # Where each pixel of the result comes from: column and row.
    sources = {
        "shear_x": (x + 0.291 * sign * y, y),
        "shear_y": (x, y + 0.291 * sign * x),
        "translate_x": (x + 97 * sign, y),
        "translate_y": (x, y + 97 * sign),
        "rotate": (
            cos * u - sin * v + middle,
            sin * u + cos * v + middle,
        ),
    }
    for name, source in sources.items():
        column, row = (np.floor(values + 0.5).astype(int) for values in source)
        inside = (column >= 0) & (column <= last) & (row >= 0) & (row <= last)
        expected = np.full_like(image, 128)
        expected[:, inside] = image[:, row[inside], column[inside]]
        drawn = Scripted(0.2 if sign == 1 else 0.7)
        own = applied(AUGREG[name], photograph, 9.7, drawn)

        # Pillow counts in 1/65536 pixels, so that places half way between two may go either way.
        differs = (own.numpy() != expected).any(axis=0)
        assert differs.mean() < 0.01, name

    for name in ("translate_x", "translate_y"):  # by 200 pixels: nothing is left
        drawn = Scripted(0.2 * sign % 1)
        own = applied(AUGREG[name], photograph, 20.0, drawn)
        assert (own == 128).all()


def test_augreg_cutout_is_a_gray_square():
    image = torch.zeros(3, 224, 224, dtype=torch.uint8)

    def cut_out(*shares):
        """Where the square is, if row and column are drawn at these shares of the sides."""
        own = applied(AUGREG["cutout"], image, 10.0, Scripted(*shares))
        return own == 128

    # 40 pixels to each side of its middle, in every channel; less at the border.
    assert cut_out(0.5, 0.5).sum() == 3 * 80 * 80
    corner = cut_out(0.0, 0.0)
    assert corner.sum() == 3 * 40 * 40
    assert corner[:, :40, :40].all()

    # The row is drawn before the column.
    above = cut_out(0.0, 0.5)
    assert above.sum() == 3 * 40 * 80
    assert above[:, :40, 72:152].all()


@every(name=["timm, erasing", "augreg", "three", "dino"])
def test_an_image_gets_what_its_settings_name(name):
    """Its channels and its rows stay where they are, and what is drawn is used."""
    chosen = AugmentSettings.model_validate(VARIANTS[name])

    # Erasing, which works on tensors, has a test of its own.
    chosen = chosen.model_copy(update={"erasing": None})
    num_changed = 0
    for key in range(30):
        # The operations themselves, one after the other, with one stream of numbers.
        random = CounterRandom(key)
        expected = PHOTO
        if chosen.randaugment is not None:
            policy = chosen.randaugment
            expected = applied(rand_augment, expected, policy, random, MEAN)
        if chosen.three_augment:
            expected = applied(three_augment, expected, random)
        for operation in ("jitter", "grayscale", "blur", "solarize"):
            section = getattr(chosen, operation)
            if section is not None and random.uniform() < section.probability:
                expected = applied(OCCASIONAL[operation], expected, section, random)
        assert torch.equal(run(PHOTO, chosen, key), expected)
        num_changed += not torch.equal(expected, PHOTO)

    # Some draws change nothing; most do.
    assert num_changed > 10
