"""Copies of a picture match, different pictures do not, and searching equals comparing all."""

from functools import cache
from unittest import mock

import numpy as np
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

NUM_IMAGES = 240
RESIZED = Image.Resampling.BICUBIC


def likenesses(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Apply the definition: the correlation of left[i] and right[i]; 0 for different pictures."""
    keys = [keys_of(left), keys_of(right)]
    found = np.zeros(len(left))
    for ours, theirs in ((0, 0), (1, 0), (0, 1)):
        shared = (keys[0][ours][:, :, None] == keys[1][theirs][:, None, :]).any(
            axis=(1, 2)
        )
        alike = correlation(left, right, mirrored=ours != theirs)
        found = np.maximum(
            found, np.where(shared & (alike >= MIN_CORRELATION), alike, 0)
        )
    return np.where(has_contrast(left) & has_contrast(right), found, 0)


def are_duplicates(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return likenesses(left, right) > 0


def drawn(seed: int) -> Image.Image:
    """Shapes, a gradient in waves, or noise."""
    chance = np.random.default_rng(seed)
    width, height = (int(side) for side in chance.integers(64, 140, 2))
    colours = chance.integers(0, 256, (8, 3))
    if seed % 3 == 0:
        image = Image.new("RGB", (width, height), tuple(colours[0].tolist()))
        for colour in colours[1:]:
            x, y, w, h = (chance.random(4) * (width, height, width, height)).tolist()
            ImageDraw.Draw(image).ellipse(
                (x, y, x + w / 2, y + h / 2), tuple(colour.tolist())
            )
        return image
    if seed % 3 == 1:
        y, x = np.mgrid[:height, :width]
        pitches = chance.uniform(-12, 12, (3, 2))
        phases = chance.uniform(0, 6, 3)
        waves = [
            np.sin(x / width * a + y / height * b + c)
            for (a, b), c in zip(pitches, phases, strict=True)
        ]
        wave = (sum(waves) + 3) / 6
        return Image.fromarray((wave[..., None] * (40, 120, 255)).astype(np.uint8))
    noise = chance.integers(0, 256, (int(chance.integers(4, 12)), 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), RESIZED)


def described(*contents: bytes) -> np.ndarray:
    return describe_images(contents)[0]


@cache
def images() -> list[Image.Image]:
    return [drawn(seed) for seed in range(NUM_IMAGES)]


@cache
def originals() -> np.ndarray:
    return described(*(encoded(image, "PNG") for image in images()))


def scaled(image: Image.Image, width: float, height: float) -> Image.Image:
    return image.resize(
        (round(image.width * width), round(image.height * height)), RESIZED
    )


COPIES = {
    "jpeg": lambda image: encoded(image, "JPEG", quality=30),
    "webp": lambda image: encoded(image, "WEBP", quality=50),
    "smaller": lambda image: encoded(scaled(image, 0.42, 0.4), "PNG"),
    "larger": lambda image: encoded(scaled(image, 2, 1.9), "JPEG", quality=90),
    "mirrored": lambda image: encoded(ImageOps.mirror(image), "PNG"),
    "all": lambda image: encoded(
        ImageOps.mirror(scaled(image, 0.7, 0.72)), "JPEG", quality=50
    ),
}


@every(kind=COPIES)
def test_copies_are_found(kind):
    copies = described(*(COPIES[kind](image) for image in images()))
    caught = are_duplicates(originals(), copies)
    assert caught.mean() >= 0.99
    assert np.array_equal(are_duplicates(copies, originals()), caught)


def test_different_pictures_do_not_match():
    first, second = np.triu_indices(NUM_IMAGES, 1)
    assert not are_duplicates(originals()[first], originals()[second]).any()


def surface(seed: int, *, num_defects: int = 1) -> Image.Image:
    """A grey surface under a lamp that hardly moves, with fine grain and small scratches."""
    chance = np.random.default_rng(seed)
    y, x = np.mgrid[:200, :200] / 200 - 0.5
    tilt = chance.normal(0, 2, 2)
    grey = 128 - 60 * (x**2 + y**2) + (40 + tilt[0]) * x + tilt[1] * y
    image = Image.fromarray(
        (grey + chance.normal(0, 4, grey.shape)).clip(0, 255).astype(np.uint8)
    )
    for left, top in chance.uniform(20, 180, (num_defects, 2)):
        angle = chance.uniform(0, 2 * np.pi)
        end = left + 9 * np.cos(angle), top + 9 * np.sin(angle)
        ImageDraw.Draw(image).line((left, top, *end), fill=50, width=2)
    return image


def test_surfaces_that_differ_in_small_defects_are_no_copies():
    contents = [encoded(surface(seed), "PNG") for seed in range(40)]
    likely = nearest_similar(described(*contents))
    pairs = [(i, int(first)) for i, first in enumerate(likely) if first != i]
    assert len(pairs) >= 8, "the descriptors alone take these for copies"
    assert sum(likeness(contents[a], contents[b]) > 0 for a, b in pairs) <= 0.05 * len(
        contents
    )


def dotted(seed: int) -> Image.Image:
    """A surface with dots along its borders, of which strong compression keeps little."""
    image = surface(seed, num_defects=0).resize((300, 300))
    chance = np.random.default_rng(seed)
    for place in chance.integers(0, 300, 40).tolist():
        x, y = ((0, place), (299, place), (place, 0), (place, 299))[
            int(chance.integers(4))
        ]
        ImageDraw.Draw(image).ellipse((x - 2, y - 2, x + 2, y + 2), fill=90)
    return image


@every(draw=[surface, dotted, lambda seed: photograph(320, 240 + seed)])
def test_copies_stand_the_second_look(draw):
    for seed in range(3):
        image = draw(seed).convert("RGB")
        original = encoded(image, "PNG")
        hardest = encoded(ImageOps.mirror(scaled(image, 0.4, 0.41)), "JPEG", quality=30)
        assert likeness(original, hardest) > 0.9
        assert likeness(hardest, original) > 0.9
        for make in COPIES.values():
            assert 0.9 < likeness(original, make(image)) <= 1
            assert 0.9 < likeness(make(image), original) <= 1
        assert likeness(original, b"no image") == likeness(b"", original) == 0


@every(turn=[lambda image: image, ImageOps.mirror])
def test_likeness_is_the_correlation_of_both_pictures(turn):
    image = photograph(300, 300)
    copy = turn(image).resize((128, 128), Image.Resampling.BILINEAR)
    grey = np.asarray(turn(copy).convert("L")).ravel()
    small = np.asarray(
        image.convert("L").resize((128, 128), Image.Resampling.BILINEAR)
    ).ravel()
    expected = np.corrcoef(small, grey)[0, 1]
    found = likeness(encoded(image, "PNG"), encoded(copy, "PNG"))
    assert found == pytest.approx(expected, abs=0.002)


def test_the_files_of_a_folder_are_in_one_order(tmp_path):
    touch(tmp_path, *(f"{number}.jpg" for number in range(30)))
    names = list_images(tmp_path)["name"].to_pylist()
    assert len(names) == 30
    assert names == sorted(names)


def test_blank_pictures_match_nothing():
    """Not even themselves, nor other blank pictures with encoding noise, nor broken files."""
    blank = [Image.new("RGB", (60, 50), (value,) * 3) for value in (0, 128, 130, 255)]
    noise = np.random.default_rng(0).integers(-3, 4, (50, 60, 3)) + 128
    contents = [encoded(image, "JPEG", quality=50) for image in blank]
    contents.append(
        encoded(Image.fromarray(noise.astype(np.uint8)), "JPEG", quality=30)
    )
    found, num_lost = describe_images(
        [*contents, b"", b"no image", encoded(drawn(0), "PNG")[:500]]
    )
    assert num_lost == 3
    assert not has_contrast(found).any()
    with mock.patch("vitscale.images.plain.MAX_PIXELS", 9):
        assert describe_images(contents)[1] == len(contents)
    first, second = np.indices((len(found), len(found))).reshape(2, -1)
    assert not are_duplicates(found[first], found[second]).any()


@every(angle="0.0, 0.5, 1.25")
def test_a_faint_smooth_picture_matches_its_copy(angle):
    """Its details are encoding noise, so their correlation must not decide."""
    y, x = np.mgrid[:96, :96] / 96
    values = 128 + 16 * (x * np.cos(angle) + y * np.sin(angle) - 0.5)
    image = Image.fromarray(np.rint(values).astype(np.uint8))
    pair = described(encoded(image, "PNG"), encoded(image, "JPEG", quality=50))
    assert are_duplicates(pair[:1], pair[1:]).all()


def test_correlation_is_the_cosine_of_the_coefficients():
    rng = np.random.default_rng(0)
    left, right = rng.integers(-9999, 9999, (2, 5, 64), dtype=np.int16)
    _, _, signs = search._frequencies()
    for mirrored, sign in ((False, np.ones(64)), (True, signs)):
        cosines = [
            np.dot(a * sign, b) / np.linalg.norm(a * 1.0) / np.linalg.norm(b * 1.0)
            for a, b in zip(left, right * 1.0, strict=True)
        ]
        assert np.allclose(correlation(left, right, mirrored=mirrored), cosines)


def pictures(num: int, *, seed: int) -> np.ndarray:
    """Smooth noise: [num, SIDE_PX, SIDE_PX]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (num, 8, 8), dtype=np.uint8)
    return coarse.repeat(SIDE_PX // 8, axis=1).repeat(SIDE_PX // 8, axis=2)


@st.composite
def corpora(draw: st.DrawFn) -> np.ndarray:
    """Descriptors of pictures, of noisy and mirrored versions, and of blank ones."""
    originals = pictures(4, seed=draw(st.integers(0, 3)))
    originals[3] //= 64
    made = []
    for _ in range(draw(st.integers(0, 14))):
        picture = originals[draw(st.integers(0, 3))].astype(int)
        noise = draw(st.sampled_from([0, 0, 1, 10, 25, 40, 60]))
        random_state = np.random.default_rng(draw(st.integers(0, 5)))
        picture = picture + random_state.integers(-noise, noise + 1, picture.shape)
        made.append(picture[:, ::-1] if draw(st.booleans()) else picture)
    stacked = np.array(made).reshape(-1, SIDE_PX, SIDE_PX)
    return picture_descriptors(stacked.clip(0, 255).astype(np.uint8))


@given(descriptors=corpora(), max_pairs=st.sampled_from([5, 1 << 17]))
@settings(max_examples=60, deadline=None)
def test_the_search_finds_the_nearest_of_all_pairs(descriptors, max_pairs):
    """Among those that are much alike, any."""
    with mock.patch.multiple(search, MAX_PAIRS=max_pairs, BATCH_ROWS=3):
        found = nearest_similar(descriptors)
    for i, other in enumerate(found):
        before = descriptors[:i]
        own = descriptors[[i]].repeat(i, axis=0)
        equal = np.flatnonzero((before == own).all(axis=1))
        alike = likenesses(before, own)
        if not has_contrast(descriptors[[i]])[0] or not (len(equal) or alike.any()):
            assert other == i
        elif len(equal):
            assert other == equal[0]
        else:
            assert alike[other] >= min(SETTLED, alike.max())
