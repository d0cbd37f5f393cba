"""Image sizes as settings, and images that are not square from every decoder."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from vitscale.config.wording import describe_field
from vitscale.distributed.random_numbers import CounterRandom, stream_key
from vitscale.images.crops import (
    CropBox,
    CropRequest,
    area_resized,
    center_crop,
    crop_and_resize,
    plain_crop_box,
    reflected,
)
from vitscale.images.decoders import DECODERS, Decoder, RegionDecoder, missing
from vitscale.images.size import image_size, show_size
from vitscale.models.vit.settings import ViTSettings

USABLE = {name: DECODERS[name] for name in DECODERS if missing(name) is None}


def picture(width: int = 83, height: int = 61) -> np.ndarray:
    small = np.random.default_rng(0).integers(0, 256, (6, 7, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=92)
    return file.getvalue()


def test_a_square_has_one_spelling() -> None:
    for given in (32, [32, 32], (32, 32)):
        assert image_size(given) == 32
        settings = ViTSettings.model_validate({"preset": "Ti/16", "image_size": given})
        assert settings.image_size == 32 and show_size(settings.image_size) == "32"
    wide = ViTSettings.model_validate({"preset": "Ti/16", "image_size": [32, 64]})
    assert wide.image_size == (32, 64) and show_size(wide.image_size) == "32 x 64"
    assert describe_field(ViTSettings.model_fields["image_size"]) == (
        "a whole number above 0 or a list of 2 values, each a whole number above 0"
    )


@pytest.mark.parametrize("given", [0, [0, 32], [32], [32, 32, 32], "32", 32.0, [32, 48.0], True])
def test_what_is_no_image_size_is_refused(given: object) -> None:
    with pytest.raises(ValidationError):
        ViTSettings.model_validate({"preset": "Ti/16", "image_size": given})


def test_each_side_must_be_a_multiple_of_the_patch() -> None:
    settings = ViTSettings.model_validate({"preset": "Ti/16", "image_size": [40, 64]})
    ((key, text),) = settings.problems()
    assert key == "model.image_size" and "40 px is not a multiple" in text


@pytest.mark.parametrize("size", [(16, 48), (70, 9), (33, 32), (1, 100)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_all_decoders_give_the_same_pixels_in_any_shape(
    size: tuple[int, int], interpolation: str
) -> None:
    pixels = picture()
    forms: dict[str, Decoder] = {name: make() for name, make in USABLE.items()}
    if "region" in forms:
        forms["region without AVX2"] = RegionDecoder(allow_avx2=False)
    for antialias in (False, True):
        for flip in (False, True):
            request = CropRequest(
                box=CropBox(5, 3, 70, 50),
                size=size,
                interpolation=interpolation,
                antialias=antialias,
                flip=flip,
            )
            data = jpeg(pixels)
            expected = forms["pillow"].crop(data, request)
            assert expected.shape == (3, *size)
            for name, decoder in forms.items():
                out = torch.zeros(3, *size, dtype=torch.uint8)
                assert decoder.crop(data, request, out=out) is out
                assert torch.equal(out, expected), name


@pytest.mark.parametrize("size", [(16, 48), (70, 9), (120, 200)])
def test_resized_pixels_equal_those_of_pillow(size: tuple[int, int]) -> None:
    pixels = picture()
    request = CropRequest(
        box=CropBox(0, 0, 83, 61), size=size, interpolation="bicubic", antialias=True, flip=False
    )
    found = crop_and_resize(torch.from_numpy(pixels.copy()), request)
    resized = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC)
    difference = found.permute(1, 2, 0).numpy().astype(int) - np.asarray(resized).astype(int)
    assert np.abs(difference).max() <= 1


def test_the_centre_has_the_shape_of_the_output() -> None:
    """100 x 50 px to 25 x 12 (of 10 / 0.8 = 12.5 rows), 80 x 40, 20 x 10."""
    found = [
        center_crop(100, 50, size=(10, 20), fraction=0.8),
        center_crop(100, 50, size=(20, 10), fraction=0.5),
        center_crop(50, 100, size=(10, 20), fraction=1.0),
    ]
    assert [plan.resized for plan in found] == [(12, 25), (40, 80), (40, 20)]
    assert [(plan.top, plan.left) for plan in found] == [(1, 2), (10, 35), (15, 0)]
    assert all(plan.box.width * plan.box.height == 5000 for plan in found)


@pytest.mark.parametrize(("width", "height"), [(83, 61), (40, 90), (48, 16)])
def test_plain_crops_cover_the_image_and_its_reflection(width: int, height: int) -> None:
    boxes, beyond = set(), set()
    for key in range(300):
        random = CounterRandom(stream_key(key))
        box, right, down = plain_crop_box(width, height, size=(16, 48), random=random)
        assert 0 <= box.left <= width - box.width and 0 <= box.top <= height - box.height
        assert box.width / box.height == pytest.approx(3, rel=0.05)
        assert max(abs(right), abs(down)) <= 4
        boxes.add(box)
        beyond.add((right, down))
    assert len(beyond) > 20
    image = torch.arange(3 * 16 * 48).view(3, 16, 48)
    moved = reflected(image, right=2, down=-1)
    assert torch.equal(moved[:, 1:, :46], image[:, :15, 2:])
    assert torch.equal(moved[:, 0], moved[:, 2])


def test_area_averages_whole_pixels_in_each_direction() -> None:
    pixels = torch.from_numpy(picture(60, 40).copy())
    found = area_resized(pixels, resized=(8, 20), size=(8, 20))
    blocks = pixels.float().unfold(0, 5, 5).unfold(1, 3, 3).mean(dim=(-1, -2))
    assert (found.permute(1, 2, 0) - blocks).abs().max() <= 0.5 + 1e-4
    kept = area_resized(pixels, resized=(8, 20), size=(4, 10))
    assert torch.equal(kept, found[:, 2:6, 5:15])
