"""The distillation token and its head equal timm's distilled DeiT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from timm.models.deit import VisionTransformerDistilled

from vitscale.models.costs import num_parameters, train_flops_per_image
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model, decayed, layers_above
from vitscale.models.weights.reading import read_weights
from vitscale.models.weights.transfer import transfer_weights

SMALL = ViTSettings(
    image_size=16, patch_size=4, width=24, depth=2, num_heads=2, mlp_width=96, gelu="erf",
    distillation_token=True,
)  # fmt: skip
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def built(**changes: Any) -> Any:
    settings = SMALL.model_copy(update=changes)
    return build_model(settings.resolved(num_classes=5), seed=0).eval()


def timms() -> Any:
    torch.manual_seed(0)
    model = VisionTransformerDistilled(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=5
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize(
    ("preset", "px", "count"),
    [
        ("Ti/16", 224, 5_910_800),
        ("S/16", 224, 22_436_432),
        ("B/16", 224, 87_338_192),
        ("B/16", 384, 87_630_032),
    ],
)
def test_distilled_sizes_have_the_published_counts(preset: str, px: int, count: int) -> None:
    model = ViTSettings(preset=preset, image_size=px, distillation_token=True)
    assert num_parameters(model.resolved(num_classes=1000)) == count


def test_counts_by_formula_are_those_of_the_modules() -> None:
    arch = SMALL.resolved(num_classes=5)
    assert num_parameters(arch) == sum(p.numel() for p in built().parameters())
    assert arch.num_tokens == 18 and arch.num_position_rows == 18
    plain = SMALL.model_copy(update={"distillation_token": False}).resolved(num_classes=5)
    assert train_flops_per_image(arch) > train_flops_per_image(plain)


def test_weights_and_logits_are_those_of_timm() -> None:
    ours, theirs = built(), timms()
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(IMAGES), theirs(IMAGES))
    both = torch.stack(ours(IMAGES, output="heads"))
    torch.testing.assert_close(both.mean(0), theirs(IMAGES))
    theirs.set_distilled_training(True)
    assert torch.equal(both, torch.stack(theirs.train()(IMAGES)))
    assert torch.equal(
        ours(IMAGES, output="features"),
        theirs.eval().forward_head(theirs.forward_features(IMAGES), pre_logits=True),
    )


def test_training_outputs_the_mean_of_both_heads_too() -> None:
    """Supervised training without a teacher trains both heads, through what is used at test."""
    model = built(head_std=0.02).train()
    both = model(IMAGES, output="heads")
    torch.testing.assert_close(model(IMAGES), (both[0] + both[1]) / 2)
    model(IMAGES).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("keep_head", [False, True])
def test_deit_weights_load_from_a_file(tmp_path: Path, keep_head: bool) -> None:
    theirs = timms()
    save_file(theirs.state_dict(), tmp_path / "deit.safetensors")
    external = read_weights(tmp_path / "deit.safetensors", grid=None)
    assert external.grid == (4, 4)
    ours = built(head_std=0.02)
    transfer_weights(
        ours,
        weights=external.tensors,
        source_grid=external.grid,
        target_grid=(4, 4),
        num_prefix_tokens=2,
        convention="deit",
        where="file",
        keep_head=keep_head,
    )
    assert torch.equal(ours(IMAGES), theirs(IMAGES)) is keep_head
    assert torch.equal(ours.forward_features(IMAGES), theirs.forward_features(IMAGES))


def test_another_resolution_keeps_both_prefix_positions() -> None:
    source, target = timms(), built(image_size=24)
    transfer_weights(
        target,
        weights=source.state_dict(),
        source_grid=(4, 4),
        target_grid=(6, 6),
        num_prefix_tokens=2,
        convention="google",
        where="file",
    )
    assert torch.equal(target.pos_embed[:, :2], source.pos_embed[:, :2])
    assert target.pos_embed.shape == (1, 38, 24)
    corners = [2, 7, 32, 37], [2, 5, 14, 17]
    assert torch.allclose(target.pos_embed[0, corners[0]], source.pos_embed[0, corners[1]])


def test_the_token_starts_as_the_class_token_does() -> None:
    deit = built(weight_init="deit", head_std=0.02, width=192)
    for tensor in (deit.dist_token, deit.cls_token, deit.head_dist.weight, deit.head.weight):
        assert tensor.std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(deit.head.weight, deit.head_dist.weight)
    zero = built(head_bias=-2.0)
    assert zero.dist_token.abs().max() == 0 and zero.head_dist.bias.tolist() == [-2.0] * 5
    without = built(weight_init="deit", distillation_token=False, width=192)
    assert torch.equal(without.blocks[1].mlp.fc1.weight, deit.blocks[1].mlp.fc1.weight)


def test_the_token_decays_and_scales_as_the_embedding() -> None:
    names, arch = dict(built().named_parameters()), SMALL.resolved(num_classes=5)
    assert not decayed("dist_token", names["dist_token"])
    assert decayed("head_dist.weight", names["head_dist.weight"])
    assert layers_above("dist_token", arch) == 3
    assert layers_above("head_dist.weight", arch) == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pool", "gap"),
        ("positions", "sincos2d"),
        ("num_registers", 2),
        ("representation_layer", True),
        ("class_position", False),
    ],
)
def test_options_that_do_not_go_with_the_token(key: str, value: Any) -> None:
    found = dict(SMALL.model_copy(update={key: value}).problems())
    assert "a distillation token needs" in found[f"model.{key}"]
    assert not list(SMALL.problems())
