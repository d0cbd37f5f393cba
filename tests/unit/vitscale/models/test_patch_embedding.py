"""Patches of another size: PI-resize against its definition, and what a resized model sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitscale.config.errors import UserError
from vitscale.models.positions import resize_patch_embedding
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import ViT, build_model
from vitscale.models.weights.transfer import transfer_weights

SMALL = ViTSettings(image_size=16, patch_size=4, width=24, depth=2, num_heads=2, mlp_width=40)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def model_of(**changes: object) -> ViT:
    """All weights are random, the head's too."""
    settings = SMALL.model_copy(update=changes)
    model = build_model(settings.resolved(num_classes=5), seed=0).eval()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=random)
    return model


def moved(source: ViT, *, resize_patches: bool = True, **changes: object) -> ViT:
    target = model_of(**changes)
    transfer_weights(
        target,
        weights=source.state_dict(),
        source_grid=source.patch_embed.grid_size,
        target_grid=target.patch_embed.grid_size,
        num_prefix_tokens=1,
        convention="google",
        where="there",
        keep_head=True,
        resize_patches=resize_patches,
    )
    return target


def resized(images: torch.Tensor, side: int) -> torch.Tensor:
    return F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)


def bilinear_matrix(old: int, new: int) -> np.ndarray:
    """[new * new, old * old], half-pixel centres, the border repeated; without torch."""
    line = np.zeros((new, old))
    for row in range(new):
        at = min(max((row + 0.5) * old / new - 0.5, 0), old - 1)
        low = min(int(at), old - 2)
        line[row, low], line[row, low + 1] = 1 - (at - low), at - low
    return np.kron(line, line)


@pytest.mark.parametrize("new", [3, 6, 8, 14])
def test_resized_kernels_equal_the_definition_in_float64(new: int) -> None:
    kernel = normal(7, 3, 6, 6)
    inverse = np.linalg.pinv(bilinear_matrix(6, new).T)
    expected = inverse @ kernel.double().numpy().reshape(21, 36).T
    found = resize_patch_embedding(kernel, patch_size=new)
    expected_DCPP = torch.from_numpy(expected.T.reshape(7, 3, new, new)).float()
    assert torch.allclose(found, expected_DCPP, atol=2e-5)


def test_a_model_sees_upsized_patches_as_their_originals() -> None:
    source = model_of()
    target = moved(source, patch_size=8, image_size=32)
    images = normal(2, 3, 16, 16)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4)  # [2, 3, 4, 4, 4, 4]
    upsized = resized(patches.reshape(2, 48, 4, 4), 8).reshape(2, 3, 4, 4, 8, 8)
    upsized = upsized.permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(target(upsized), source(images), atol=1e-4)


def test_another_patch_size_is_refused_unless_allowed() -> None:
    with pytest.raises(
        UserError, match=r"patch_embed.proj.weight: model \(24, 3, 8, 8\)"
    ) as caught:
        moved(model_of(), patch_size=8, image_size=32, resize_patches=False)
    assert "init_patch=resize" in str(caught.value)
    with pytest.raises(UserError) as caught:
        moved(model_of(), width=32, resize_patches=False)
    assert "init_patch" not in str(caught.value)
