"""Position embeddings: conventions against independent implementations."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from vitscale.models.positions import resize_position_embedding


def embedding(rows: int, columns: int, *, prefix: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(prefix + rows * columns, 6, generator=random)


def scipy_zoom(grid_RCD: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    rows, columns, _ = grid_RCD.shape
    factors = (size[0] / rows, size[1] / columns, 1)
    return torch.from_numpy(zoom(grid_RCD.double().numpy(), factors, order=1)).float()


def timm_resample(grid_RCD: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    rows, columns, _ = grid_RCD.shape
    pos_1LD = grid_RCD.flatten(0, 1)[None]
    found = resample_abs_pos_embed(
        pos_1LD, new_size=list(size), old_size=[rows, columns], num_prefix_tokens=0
    )
    return found.reshape(*size, -1)


def cubic(grid_RCD: torch.Tensor, size: tuple[int, int], *, offset: float) -> torch.Tensor:
    """Cubic convolution (a = -0.75) along each side in float64, borders repeated.

    The side of an output pixel is M / (n + offset) input pixels.
    """

    def weights(num_in: int, num_out: int) -> np.ndarray:
        matrix = np.zeros((num_out, num_in))
        for out in range(num_out):
            centre = (out + 0.5) * num_in / (num_out + offset) - 0.5
            first = math.floor(centre)
            for each in range(first - 1, first + 3):
                far = abs(centre - each)
                if far <= 1:
                    weight = 1.25 * far**3 - 2.25 * far**2 + 1
                else:
                    weight = -0.75 * (far**3 - 5 * far**2 + 8 * far - 4)
                matrix[out, min(max(each, 0), num_in - 1)] += weight
        return matrix

    rows, columns, _ = grid_RCD.shape
    along_rows, along_columns = weights(rows, size[0]), weights(columns, size[1])
    grid = grid_RCD.double().numpy()
    return torch.from_numpy(np.einsum("ir,jc,rcd->ijd", along_rows, along_columns, grid)).float()


REFERENCES = {
    "google": scipy_zoom,
    "timm": timm_resample,
    "deit": partial(cubic, offset=0.0),
    "dinov2": partial(cubic, offset=0.1),
}


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("convention", REFERENCES)
def test_conventions_equal_independent_references(convention: str, prefix: int) -> None:
    """14 x 14 to the grids of 112 x 448 and 384 x 512 px, a smaller one, and from no square."""
    for source, target in (
        ((14, 14), (7, 28)),
        ((14, 14), (24, 32)),
        ((14, 14), (9, 9)),
        ((4, 5), (3, 9)),
    ):
        pos_LD = embedding(*source, prefix=prefix)
        resized_LD = resize_position_embedding(
            pos_LD,
            source_grid=source,
            target_grid=target,
            num_prefix_tokens=prefix,
            convention=convention,
        )
        assert torch.equal(resized_LD[:prefix], pos_LD[:prefix])
        expected = REFERENCES[convention](pos_LD[prefix:].reshape(*source, -1), target)
        found = resized_LD[prefix:].reshape(*target, -1)
        assert torch.allclose(found, expected, atol=1e-5), (source, target)


def test_transformers_resizes_dinov2_as_deit_does() -> None:
    """Its port passes the size; the original passes a factor, so the positions differ."""
    # Imported here: it takes seconds.
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Config, Dinov2Embeddings

    config = Dinov2Config(hidden_size=6, num_attention_heads=2, image_size=28)
    embeddings = Dinov2Embeddings(config)
    patch = config.patch_size
    grid, target = (28 // patch, 28 // patch), (5, 3)
    with torch.no_grad():
        embeddings.position_embeddings.normal_(generator=torch.Generator().manual_seed(0))
        theirs = embeddings.interpolate_pos_encoding(
            torch.zeros(1, 1 + 15, 6), target[0] * patch, target[1] * patch
        )
        deit, dinov2 = (
            resize_position_embedding(
                embeddings.position_embeddings[0],
                source_grid=grid,
                target_grid=target,
                num_prefix_tokens=1,
                convention=name,
            )
            for name in ("deit", "dinov2")
        )
    assert torch.allclose(deit, theirs[0], atol=1e-6)
    assert 0.005 < (dinov2 - theirs[0]).abs().max()


def test_resampling_conventions_differ() -> None:
    pos_LD = embedding(4, 4, prefix=0)
    google, timm, deit, dinov2 = (
        resize_position_embedding(
            pos_LD, source_grid=(4, 4), target_grid=(3, 3), num_prefix_tokens=0, convention=name
        )
        for name in ("google", "timm", "deit", "dinov2")
    )
    assert not torch.allclose(google, timm) and not torch.allclose(timm, deit)
    assert not torch.allclose(deit, dinov2)


def test_equal_token_counts_on_another_grid_are_resampled() -> None:
    pos_LD = embedding(4, 4, prefix=1)
    resized = resize_position_embedding(
        pos_LD, source_grid=(4, 4), target_grid=(2, 8), num_prefix_tokens=1, convention="google"
    )
    assert resized.shape == pos_LD.shape and not torch.allclose(resized, pos_LD)


def test_wrong_source_grid_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold 1 prefix tokens and a 4 x 4 grid"):
        resize_position_embedding(
            embedding(4, 5, prefix=1),
            source_grid=(4, 4),
            target_grid=(6, 6),
            num_prefix_tokens=1,
            convention="google",
        )


@pytest.mark.parametrize("target", [(4, 4), (6, 6)])
def test_half_precision_positions_are_resized_in_fp32(target: tuple[int, int]) -> None:
    pos_LD = embedding(4, 4, prefix=1).bfloat16()
    options = {"source_grid": (4, 4), "target_grid": target, "num_prefix_tokens": 1}
    found = resize_position_embedding(pos_LD, convention="timm", **options)
    expected = resize_position_embedding(pos_LD.float(), convention="timm", **options)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
