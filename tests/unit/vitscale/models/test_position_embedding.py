"""Position embeddings: conventions against independent implementations."""

from __future__ import annotations

import pytest
import torch
from scipy.ndimage import zoom
from timm.layers import resample_abs_pos_embed

from vitscale.models.vit.position_embedding import resize_position_embedding, resize_position_state


def embedding(rows: int, columns: int, *, prefix: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(prefix + rows * columns, 6, generator=random)


@pytest.mark.parametrize("target", [(6, 6), (3, 9), (2, 3)])
def test_google_convention_equals_scipy_zoom(target: tuple[int, int]) -> None:
    pos_LD = embedding(4, 5, prefix=1)
    resized = resize_position_embedding(
        pos_LD, source_grid=(4, 5), target_grid=target, num_prefix_tokens=1, convention="google"
    )
    grid = pos_LD[1:].reshape(4, 5, 6).double().numpy()
    expected = zoom(grid, (target[0] / 4, target[1] / 5, 1), order=1)
    assert torch.allclose(
        resized[1:].reshape(*target, 6), torch.from_numpy(expected).float(), atol=1e-6
    )
    assert torch.equal(resized[:1], pos_LD[:1])


def test_timm_convention_equals_timm() -> None:
    pos_LD = embedding(4, 4, prefix=1)
    resized = resize_position_embedding(
        pos_LD, source_grid=(4, 4), target_grid=(6, 6), num_prefix_tokens=1, convention="timm"
    )
    expected = resample_abs_pos_embed(pos_LD[None], new_size=[6, 6], old_size=[4, 4])[0]
    assert torch.allclose(resized, expected, atol=1e-6)


def test_resampling_conventions_differ() -> None:
    pos_LD = embedding(4, 4, prefix=0)
    google, timm, deit = (
        resize_position_embedding(
            pos_LD, source_grid=(4, 4), target_grid=(3, 3), num_prefix_tokens=0, convention=name
        )
        for name in ("google", "timm", "deit")
    )
    assert not torch.allclose(google, timm) and not torch.allclose(timm, deit)


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


def test_states_are_resampled_as_what_they_are() -> None:
    """A spike of a second moment: bicubic resampling would undershoot beside it."""
    spike = torch.zeros(1, 1 + 16, 2)
    spike[0, 0], spike[0, 6] = 7.0, 1.0
    grids = {"source_grid": (4, 4), "target_grid": (7, 7)}
    second = resize_position_state(spike, **grids, non_negative=True)
    first = resize_position_state(spike, **grids, non_negative=False)
    assert second.shape == first.shape == (1, 50, 2)
    assert second.min() >= 0 > first.min()
    assert torch.equal(second[0, 0], spike[0, 0]) and torch.equal(first[0, 0], spike[0, 0])
    expected = resize_position_embedding(spike[0], **grids, num_prefix_tokens=1, convention="deit")
    assert torch.equal(first[0], expected)
