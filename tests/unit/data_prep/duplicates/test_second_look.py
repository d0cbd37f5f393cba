"""Likely copies are compared at 128 px: copies stay copies, look-alikes do not become ones."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

from benchmarks.corpora.lookalikes import icon, inspection_picture
from benchmarks.near_duplicates import PROMISED, encoded, matching_pairs
from data_prep.duplicates.descriptors import image_descriptors
from data_prep.duplicates.likely_copies import (
    LikelyCopies,
    LikelyPair,
    check_similar_fraction,
    num_parts,
    part_of_candidates,
    verdict_table,
)
from data_prep.duplicates.second_look import SIDE_PX, Look, look_at, nearly_equal, verdicts
from tests.support.corpora.shard_folders import photo
from vitscale.config.errors import UserError

ONE_RANK_EVERY = 3


@pytest.mark.parametrize("name", PROMISED)
def test_copies_of_photographs_are_nearly_equal(name: str) -> None:
    for seed in range(4):
        content = photo(seed, width=320, height=240)
        with Image.open(io.BytesIO(content)) as image:
            copy = PROMISED[name](image.convert("RGB"), random.Random(seed))
        assert nearly_equal(look_at(content), look_at(copy)), seed
        assert not nearly_equal(look_at(content), look_at(photo(seed + 100)))


def test_lookalikes_are_not_nearly_equal() -> None:
    for draw in (inspection_picture, icon):
        contents = [encoded(draw(seed)[0], "PNG") for seed in range(80)]
        pairs = matching_pairs(image_descriptors(contents))
        assert len(pairs) > 3, "the descriptors alone take these for copies"
        looks = [look_at(content) for content in contents]
        # Two icons of one badge with signs that differ in a cell of 4 px may pass.
        assert sum(nearly_equal(looks[a], looks[b]) for a, b in pairs) <= len(pairs) / 20


def test_a_small_mark_makes_the_difference() -> None:
    y, x = np.mgrid[:200, :200]
    surface = Image.fromarray((100 + x / 3 + y / 5).astype(np.uint8))
    marked = surface.copy()
    ImageDraw.Draw(marked).line((90, 90, 104, 98), fill=20, width=2)
    plain, scratched = (look_at(encoded(image, "PNG")) for image in (surface, marked))
    assert nearly_equal(plain, look_at(encoded(surface, "JPEG", quality=30)))
    assert not nearly_equal(plain, scratched)


def test_colours_count_unless_one_is_grey() -> None:
    red, green = (Image.new("RGB", (96, 96), "white") for _ in range(2))
    for image, colour in ((red, (200, 40, 40)), (green, (10, 130, 40))):
        ImageDraw.Draw(image).ellipse((20, 30, 70, 60), fill=colour)
    looks = [look_at(encoded(one, "PNG")) for one in (red, green, red.convert("L"))]
    assert not nearly_equal(looks[0], looks[1])
    assert nearly_equal(looks[0], looks[2])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "CMYK"])
def test_every_kind_of_image_is_looked_at(mode: str) -> None:
    with Image.open(io.BytesIO(photo(1))) as image:
        converted = image.convert(mode)
    found = look_at(encoded(converted, "JPEG" if mode in ("L", "CMYK") else "PNG"))
    assert found is not None and found.short_side == min(converted.size)
    mirrored = encoded(ImageOps.mirror(converted.convert("RGB")), "PNG")
    assert nearly_equal(found, look_at(mirrored))
    assert look_at(b"no image") is None
    assert not nearly_equal(found, None)


def test_verdicts_take_the_first_original_that_is_equal() -> None:
    looks = {rank: look_at(photo(rank % ONE_RANK_EVERY)) for rank in range(6)}
    found = list(verdicts({4: [0, 1, 2], 5: [0, 1]}, looks.__getitem__))
    assert [(v.rank, v.kept_rank, v.is_copy) for v in found] == [(4, 1, True), (5, 0, False)]


def test_copies_of_one_another_reduce_to_one() -> None:
    """Six copies of one picture look like an original that differs from them."""
    looks = {rank: look_at(photo(1 if rank < 3 else 2)) for rank in range(9)}
    looks[1], looks[2] = look_at(photo(8)), look_at(photo(9))
    found = list(verdicts({rank: [0, 1, 2] for rank in range(3, 9)}, looks.__getitem__))
    assert [verdict.is_copy for verdict in found] == [False] + 5 * [True]
    assert {verdict.kept_rank for verdict in found[1:]} == {3}


def grey_look(values: np.ndarray) -> Look:
    pixels = np.full((SIDE_PX, SIDE_PX, 3), 128, dtype=np.uint8)
    pixels[..., 0] = values.clip(0, 255)
    return Look(pixels, short_side=400)


def test_lost_detail_is_not_lost_contrast() -> None:
    """Gravel that a copy softens, beside a flat dark part that stays as it is."""
    gravel = np.random.default_rng(0).normal(0, 1, (SIDE_PX, SIDE_PX))
    gravel[32:, :64] = 0
    picture = np.where(gravel == 0, 4.0, 170.0)
    sharp, soft = (grey_look(picture + scale * gravel) for scale in (60, 34))
    assert nearly_equal(sharp, soft)


def test_detail_finer_than_two_pixels_may_be_lost() -> None:
    y, x = np.mgrid[:SIDE_PX, :SIDE_PX]
    picture = 60.0 + 100 * (x // 32 % 2) + 40 * (y // 32 % 2)
    fine, coarse = picture.copy(), picture.copy()
    fine[40:56, 40:56] += 20 * (x % 2 * 2 - 1)[40:56, 40:56]
    coarse[40:56, 40:56] += 20 * (x // 3 % 2 * 2 - 1)[40:56, 40:56]
    assert nearly_equal(grey_look(fine), grey_look(picture))
    assert not nearly_equal(grey_look(coarse), grey_look(picture))


def test_smooth_parts_differ_by_the_noise_of_jpeg_at_most() -> None:
    y, x = np.mgrid[:SIDE_PX, :SIDE_PX]
    picture = 40.0 + x + 0.5 * y
    for step, same in ((3, True), (6, False)):
        brighter = picture.copy()
        brighter[32:80, 32:80] += step
        assert nearly_equal(grey_look(picture), grey_look(brighter)) is same, step


def test_parts_of_candidates_never_divide_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa

    monkeypatch.setattr("data_prep.duplicates.likely_copies.CANDIDATES_PER_UNIT", 3)
    rows = [(1, 0, "similar"), (2, 0, "exact"), *[(7, k, "similar") for k in range(5)]]
    rows += [(9, 0, "similar")]
    names = ("rank", "kept_rank", "kind")
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
    parts = [part_of_candidates(table, number) for number in range(num_parts(table))]
    assert sum(len(part) for part, _ in parts) == len(rows)
    merged = {rank: kept for _, found in parts for rank, kept in found.items()}
    assert merged == {1: [0], 7: [0, 1, 2, 3, 4], 9: [0]}
    kept = verdict_table(table, [])
    assert kept.to_pylist() == [{"rank": 2, "kept_rank": 0, "kind": "exact"}]


def test_too_many_similar_images_stop_with_the_numbers() -> None:
    copies = LikelyCopies()
    for number in range(27):
        copies.add(LikelyPair(f"a/{number}.png", "a", "b/0.png", "ab"[number % 2]), kind="similar")
    copies.add(LikelyPair("a/x.png", "a", "a/y.png", "a"), kind="unlike")
    check_similar_fraction(copies, num_images=100, max_fraction=0.27)
    with pytest.raises(UserError) as caught:
        check_similar_fraction(copies, num_images=100, max_fraction=0.01)
    text = caught.value.text()
    assert "27 of 100 images look like others" in text and "'a/0.png' like 'b/0.png'" in text
    assert "13 of these" in text and "1 kept" in text
    assert "selection.max_similar_fraction=0.27;" in text
