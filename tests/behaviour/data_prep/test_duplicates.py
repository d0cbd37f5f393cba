"""Copies of a picture match, different pictures do not, and searching equals comparing all."""

from functools import cache
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageOps

from data_prep.duplicates import similar as search
from data_prep.duplicates.reading import list_images
from data_prep.duplicates.second_look import likeness
from data_prep.duplicates.similar import (
    MIN_CORRELATION,
    SETTLED,
    SIDE_PX,
    correlation,
    describe_images,
    has_contrast,
    keys_of,
    nearest_similar,
    picture_descriptors,
)
from tests.support.corpora.image_samples import encoded, photograph
from tests.support.corpora.sources import touch
from tests.support.tables import every

# A third each of shapes, waves and noise; their pairs are 28,680 different pictures.
NUM_IMAGES = 240

RESIZED = Image.Resampling.BICUBIC


def likenesses(left, right):
    """Apply the definition: the correlation of left[i] and right[i]; 0 for different pictures."""
    sides = (keys_of(left), keys_of(right))
    best = np.zeros(len(left))

    # Direct with direct, and one of them mirrored: number of the keys of left and right.
    for ours, theirs in ((0, 0), (1, 0), (0, 1)):
        left_keys = sides[0][ours][:, :, None]
        right_keys = sides[1][theirs][:, None, :]
        shared = (left_keys == right_keys).any(axis=(1, 2))
        alike = correlation(left, right, mirrored=ours != theirs)
        alike[~shared | (alike < MIN_CORRELATION)] = 0
        best = np.maximum(best, alike)

    # Blank pictures match nothing.
    best[~has_contrast(left) | ~has_contrast(right)] = 0
    return best


def are_duplicates(left, right):
    return likenesses(left, right) > 0


def drawn(seed):
    """Shapes, a gradient in waves, or noise."""
    chance = np.random.default_rng(seed)
    width, height = (int(side) for side in chance.integers(64, 140, 2))
    size = (width, height)
    colours = chance.integers(0, 256, (8, 3)).tolist()
    if seed % 3 == 0:
        image = Image.new("RGB", size, tuple(colours[0]))
        canvas = ImageDraw.Draw(image)
        for colour in colours[1:]:
            # Left and top anywhere, and at most half of the picture wide and high.
            left, top, w, h = (chance.random(4) * (size + size)).tolist()
            ellipse = (left, top, left + w / 2, top + h / 2)
            canvas.ellipse(ellipse, tuple(colour))
        return image

    if seed % 3 == 1:
        # Three sine waves in different directions, as brightness of one colour.
        y, x = np.mgrid[:height, :width]
        pitches = chance.uniform(-12, 12, (3, 2))
        phases = chance.uniform(0, 6, 3)
        wave = np.full((height, width), 0.5)
        for (across, down), phase in zip(pitches, phases, strict=True):
            wave += np.sin(x / width * across + y / height * down + phase) / 6
        coloured = wave[..., None] * (40, 120, 255)
        return Image.fromarray(coloured.astype(np.uint8))

    # A few large squares, blurred by the resizing.
    rows = int(chance.integers(4, 12))
    noise = chance.integers(0, 256, (rows, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, RESIZED)


def described(*contents):
    descriptors, _ = describe_images(contents)
    return descriptors


@cache
def images():
    return [drawn(seed) for seed in range(NUM_IMAGES)]


@cache
def originals():
    contents = [encoded(image, "PNG") for image in images()]
    return described(*contents)


def scaled(image, width, height):
    size = (round(image.width * width), round(image.height * height))
    return image.resize(size, RESIZED)


# What happens to pictures on their way through the web; sides change by different factors.
COPIES = {
    "jpeg": lambda image: encoded(image, "JPEG", quality=30),
    "webp": lambda image: encoded(image, "WEBP", quality=50),
    "smaller": lambda image: encoded(scaled(image, 0.42, 0.4), "PNG"),
    "larger": lambda image: encoded(scaled(image, 2, 1.9), "JPEG", quality=90),
    "mirrored": lambda image: encoded(ImageOps.mirror(image), "PNG"),
    "all": lambda image: encoded(
        ImageOps.mirror(scaled(image, 0.7, 0.72)),
        "JPEG",
        quality=50,
    ),
}


@every(kind=COPIES)
def test_copies_are_found(kind):
    make = COPIES[kind]
    copies = described(*(make(image) for image in images()))
    caught = are_duplicates(originals(), copies)
    assert caught.mean() >= 0.99

    # Which of two is the copy does not matter.
    swapped = are_duplicates(copies, originals())
    assert np.array_equal(swapped, caught)


def test_different_pictures_do_not_match():
    # All pairs, each once.
    first, second = np.triu_indices(NUM_IMAGES, 1)
    left = originals()[first]
    right = originals()[second]
    assert not are_duplicates(left, right).any()


def surface(seed, *, num_defects=1):
    """A grey surface under a lamp that hardly moves, with fine grain and small scratches."""
    chance = np.random.default_rng(seed)
    y, x = np.mgrid[:200, :200] / 200 - 0.5
    tilt_x, tilt_y = chance.normal(0, 2, 2)
    grey = 128 - 60 * (x**2 + y**2)
    grey += (40 + tilt_x) * x + tilt_y * y
    grey += chance.normal(0, 4, grey.shape)
    image = Image.fromarray(grey.clip(0, 255).astype(np.uint8))

    # A scratch is 9 pixels long, in any direction.
    canvas = ImageDraw.Draw(image)
    for left, top in chance.uniform(20, 180, (num_defects, 2)):
        angle = chance.uniform(0, 2 * np.pi)
        right = left + 9 * np.cos(angle)
        bottom = top + 9 * np.sin(angle)
        canvas.line((left, top, right, bottom), fill=50, width=2)
    return image


def test_surfaces_that_differ_in_small_defects_are_no_copies():
    contents = [encoded(surface(seed), "PNG") for seed in range(40)]
    likely = nearest_similar(described(*contents))
    pairs = []
    for number, first in enumerate(likely.tolist()):
        if first != number:
            pairs.append((contents[number], contents[first]))
    assert len(pairs) >= 8, "the descriptors alone take these for copies"

    # So the second look must refuse them, all but one in twenty.
    num_copies = sum(likeness(*pair) > 0 for pair in pairs)
    assert num_copies <= 0.05 * len(contents)


def dotted(seed):
    """A surface with dots along its borders, of which strong compression keeps little."""
    image = surface(seed, num_defects=0).resize((300, 300))
    chance = np.random.default_rng(seed)
    canvas = ImageDraw.Draw(image)
    for place in chance.integers(0, 300, 40).tolist():
        # On the left, the right, the upper or the lower border.
        centres = ((0, place), (299, place), (place, 0), (place, 299))
        x, y = centres[int(chance.integers(4))]
        canvas.ellipse((x - 2, y - 2, x + 2, y + 2), fill=90)
    return image


@every(draw=[surface, dotted, lambda seed: photograph(320, 240 + seed)])
def test_copies_stand_the_second_look(draw):
    for seed in range(3):
        image = draw(seed).convert("RGB")
        original = encoded(image, "PNG")
        small = ImageOps.mirror(scaled(image, 0.4, 0.41))
        copies = [make(image) for make in COPIES.values()]

        # Harder than all of those: smaller, mirrored, and strongly compressed.
        copies.append(encoded(small, "JPEG", quality=30))
        for copy in copies:
            assert 0.9 < likeness(original, copy) <= 1
            assert 0.9 < likeness(copy, original) <= 1

        # What cannot be decoded is no copy, on either side.
        assert likeness(original, b"no image") == 0
        assert likeness(b"", original) == 0


@every(turn=[lambda image: image, ImageOps.mirror])
def test_likeness_is_the_correlation_of_both_pictures(turn):
    image = photograph(300, 300)
    size = (128, 128)
    bilinear = Image.Resampling.BILINEAR
    copy = turn(image).resize(size, bilinear)

    # Turned back, and the original at the size that is compared.
    upright = turn(copy).convert("L")
    small = image.convert("L").resize(size, bilinear)
    expected = np.corrcoef(np.ravel(small), np.ravel(upright))[0, 1]
    found = likeness(encoded(image, "PNG"), encoded(copy, "PNG"))

    # Grey is rounded once before and once after the resizing.
    assert found == pytest.approx(expected, abs=0.002)


def test_the_files_of_a_folder_are_in_one_order(tmp_path):
    # Folders list their files in any order; which of two copies is the first must not depend on it.
    touch(tmp_path, *(f"{number}.jpg" for number in range(30)))
    names = pa.concat_tables(list_images(tmp_path))["name"].to_pylist()
    assert len(names) == 30
    assert names == sorted(names)


def test_blank_pictures_match_nothing():
    """Not even themselves, nor other blank pictures with encoding noise, nor broken files."""
    contents = []
    for level in (0, 128, 130, 255):
        image = Image.new("RGB", (60, 50), (level,) * 3)
        contents.append(encoded(image, "JPEG", quality=50))
    noise = np.random.default_rng(0).integers(-3, 4, (50, 60, 3)) + 128
    noisy = Image.fromarray(noise.astype(np.uint8))
    contents.append(encoded(noisy, "JPEG", quality=30))
    broken = [b"", b"no image", encoded(drawn(0), "PNG")[:500]]

    descriptors, num_lost = describe_images(contents + broken)
    assert num_lost == len(broken)
    assert not has_contrast(descriptors).any()

    # A picture of too many pixels is not decoded either.
    with mock.patch("vitscale.images.plain.MAX_PIXELS", 9):
        _, num_lost = describe_images(contents)
    assert num_lost == len(contents)

    # Every pair, also of a picture with itself.
    num = len(descriptors)
    first, second = np.indices((num, num)).reshape(2, -1)
    assert not are_duplicates(descriptors[first], descriptors[second]).any()


# Straight and slanted, since a gradient along an axis has coefficients that are all but zero.
@every(angle="0.0, 0.5, 1.25")
def test_a_faint_smooth_picture_matches_its_copy(angle):
    """Its details are encoding noise, so their correlation must not decide."""
    y, x = np.mgrid[:96, :96] / 96
    slope = x * np.cos(angle) + y * np.sin(angle)
    values = np.rint(128 + 16 * (slope - 0.5))
    image = Image.fromarray(values.astype(np.uint8))
    copies = (encoded(image, "PNG"), encoded(image, "JPEG", quality=50))
    pair = described(*copies)
    assert are_duplicates(pair[:1], pair[1:]).all()


def test_correlation_is_the_cosine_of_the_coefficients():
    rng = np.random.default_rng(0)
    left, right = rng.integers(-9999, 9999, (2, 5, 64), dtype=np.int16)
    _, _, signs = search._frequencies()
    for mirrored, sign in ((False, np.ones(64)), (True, signs)):
        # In floats, since products of int16 would overflow.
        cosines = []
        for a, b in zip(left * sign, right * 1.0, strict=True):
            lengths = np.linalg.norm(a) * np.linalg.norm(b)
            cosines.append(a @ b / lengths)
        found = correlation(left, right, mirrored=mirrored)
        assert np.allclose(found, cosines)


def pictures(num, *, seed):
    """Smooth noise: [num, SIDE_PX, SIDE_PX]."""
    scale = SIDE_PX // 8
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (num, 8, 8), dtype=np.uint8)
    return coarse.repeat(scale, axis=1).repeat(scale, axis=2)


@st.composite
def corpora(draw):
    """Descriptors of pictures, of noisy and mirrored versions, and of blank ones."""
    originals = pictures(4, seed=draw(st.integers(0, 3)))

    # The last one has hardly any contrast left.
    originals[3] //= 64
    made = []
    for _ in range(draw(st.integers(0, 14))):
        picture = originals[draw(st.integers(0, 3))].astype(int)

        # From none, which makes equal descriptors, to about the limit of a copy.
        noise = draw(st.sampled_from([0, 0, 1, 10, 25, 40, 60]))
        rng = np.random.default_rng(draw(st.integers(0, 5)))
        picture += rng.integers(-noise, noise + 1, picture.shape)
        if draw(st.booleans()):
            picture = picture[:, ::-1]
        made.append(picture)
    stacked = np.array(made).reshape(-1, SIDE_PX, SIDE_PX)
    return picture_descriptors(stacked.clip(0, 255).astype(np.uint8))


# Small batches, so that a few pictures already take several of them.
@given(descriptors=corpora(), max_pairs=st.sampled_from([5, 1 << 17]))
@settings(max_examples=60, deadline=None)
def test_the_search_finds_the_nearest_of_all_pairs(descriptors, max_pairs):
    """Among those that are much alike, any."""
    with mock.patch.multiple(search, MAX_PAIRS=max_pairs, BATCH_ROWS=3):
        nearest = nearest_similar(descriptors)
    for number, other in enumerate(nearest):
        # The slow way: each picture with all before it.
        earlier = descriptors[:number]
        this = descriptors[[number]]
        equal = np.flatnonzero((earlier == this).all(axis=1))
        alike = likenesses(earlier, this.repeat(number, axis=0))
        has_match = len(equal) or alike.any()
        if not has_contrast(this)[0] or not has_match:
            assert other == number
        elif len(equal):
            assert other == equal[0]
        else:
            assert alike[other] >= min(SETTLED, alike.max())
