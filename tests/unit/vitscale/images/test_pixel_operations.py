"""Every operation against Pillow or torchvision on the same pixels, and against its definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torchvision.transforms import functional as torchvision

from vitscale.images import pixel_operations as ops

Reference = Callable[[Image.Image], Image.Image]
Own = Callable[[torch.Tensor], torch.Tensor]

FILL = (128, 128, 128)


def _to_pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))


def _from_pil(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def smooth_image(size: int) -> torch.Tensor:
    """Content like a photograph's: slow changes, the whole range."""
    coarse = torch.rand(1, 3, 7, 7, generator=torch.Generator().manual_seed(size)) * 300 - 20
    fine = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    return fine.clamp(0, 255).byte()[0]


def _affine(matrix: ops.Matrix, kind: str) -> tuple[Own, Reference]:
    resampling = Image.Resampling[kind.upper()]
    return (
        lambda x: ops.affine(x, matrix, interpolation=kind),
        lambda p: p.transform(p.size, Image.Transform.AFFINE, matrix, resampling, fillcolor=FILL),
    )


def _turned(degrees: float, kind: str) -> tuple[Own, Reference]:
    def own(x: torch.Tensor) -> torch.Tensor:
        matrix = ops.rotation(degrees, width=x.shape[2], height=x.shape[1])
        return ops.affine(x, matrix, interpolation=kind)

    return own, lambda p: p.rotate(degrees, Image.Resampling[kind.upper()], fillcolor=FILL)


def _solarize_add(image: Image.Image) -> Image.Image:
    return image.point([min(255, i + 77) if i < 128 else i for i in range(256)] * 3)


PAIRS: dict[str, tuple[Own, Reference]] = {
    "invert": (ops.invert, ImageOps.invert),
    "auto_contrast": (ops.auto_contrast, ImageOps.autocontrast),
    "equalize": (ops.equalize, ImageOps.equalize),
    "solarize_add": (lambda x: ops.solarize_add(x, addition=77), _solarize_add),
    "desaturate": (ops.desaturate, lambda p: torchvision.to_grayscale(p, 3)),
    "shear_x nearest": _affine((1, 0.2137, 0, 0, 1, 0), "nearest"),
    "shear_y bilinear": _affine((1, 0, 0, -0.3, 1, 0), "bilinear"),
    "shift bicubic": _affine((1, 0, 20.3, 0, 1, -4.9), "bicubic"),
    "rotate nearest": _turned(-30, "nearest"),
    "rotate bilinear": _turned(17, "bilinear"),
    "rotate bicubic": _turned(3, "bicubic"),
}
for bits in (1, 3, 8):
    PAIRS[f"posterize {bits}"] = (
        lambda x, bits=bits: ops.posterize(x, bits=bits),
        lambda p, bits=bits: ImageOps.posterize(p, bits),
    )
for threshold in (0, 100, 128, 256):
    PAIRS[f"solarize {threshold}"] = (
        lambda x, threshold=threshold: ops.solarize(x, threshold=threshold),
        lambda p, threshold=threshold: ImageOps.solarize(p, threshold),
    )
for factor in (0.0, 0.1, 0.73, 1.0, 1.9):
    for name, enhancer, own in (
        ("brightness", ImageEnhance.Brightness, ops.brightness),
        ("contrast", ImageEnhance.Contrast, ops.contrast),
        ("saturation", ImageEnhance.Color, ops.saturation),
        ("sharpness", ImageEnhance.Sharpness, ops.sharpness),
    ):
        PAIRS[f"{name} {factor}"] = (
            lambda x, own=own, factor=factor: own(x, factor=factor),
            lambda p, enhancer=enhancer, factor=factor: enhancer(p).enhance(factor),
        )
for sigma in (0.1, 0.7, 2.0):
    PAIRS[f"blur {sigma}"] = (
        lambda x, sigma=sigma: ops.gaussian_blur(x, sigma=sigma),
        lambda p, sigma=sigma: p.filter(ImageFilter.GaussianBlur(sigma)),
    )


@pytest.mark.parametrize("name", PAIRS)
def test_equals_pillow(name: str) -> None:
    """Exact; a blend may differ by 1 on machines that round float32 products differently."""
    own, reference = PAIRS[name]
    noise = torch.randint(0, 256, (3, 33, 40), generator=torch.Generator().manual_seed(1)).byte()
    for image in (smooth_image(64), smooth_image(224), noise):
        before = image.clone()
        result = own(image)
        assert result.dtype == torch.uint8 and result.shape == image.shape
        assert torch.equal(image, before), "the input was written to"
        difference = (result.int() - _from_pil(reference(_to_pil(image))).int()).abs()
        assert difference.max() <= 1 and (difference > 0).float().mean() < 1e-3


@pytest.mark.parametrize("name", PAIRS)
@given(
    height=st.integers(1, 9), width=st.integers(1, 9), low=st.integers(0, 255), key=st.integers(0)
)
@settings(max_examples=6, deadline=None)
def test_equals_pillow_on_tiny_and_flat_images(
    name: str, height: int, width: int, low: int, key: int
) -> None:
    own, reference = PAIRS[name]
    levels = np.random.default_rng(key % 2**32).integers(low, 256, (3, height, width))
    image = torch.from_numpy(levels.astype(np.uint8))
    difference = own(image).int() - _from_pil(reference(_to_pil(image))).int()
    assert difference.abs().max() <= 1


@given(x=st.integers(-12, 12), y=st.integers(-12, 12))
def test_translate_moves_pixels(x: int, y: int) -> None:
    image = smooth_image(9)
    moved = ops.translate(image, x=x, y=y)
    for row in range(9):
        for column in range(9):
            inside = 0 <= row + y < 9 and 0 <= column + x < 9
            expected = image[:, row + y, column + x].tolist() if inside else [128] * 3
            assert moved[:, row, column].tolist() == expected
