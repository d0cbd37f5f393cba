"""Transfer with registers, fixed positions, and class tokens with and without a position."""

from __future__ import annotations

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.models.positions import fixed_positions, sincos_position_embedding
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.models.weights.transfer import transfer_weights

SMALL = ViTSettings(image_size=16, patch_size=4, width=24, depth=1, num_heads=2, mlp_width=40)


def shaken(**changes: object) -> torch.nn.Module:
    """A model in evaluation mode whose weights, the head's too, are all random."""
    settings = SMALL.model_copy(update=changes)
    model = build_model(settings.resolved(num_classes=5), seed=0).eval()
    random = torch.Generator().manual_seed(len(changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=random)
    return model


def transfer(
    target: torch.nn.Module,
    source: torch.nn.Module,
    grid: tuple[int, int] = (4, 4),
    **options: bool,
) -> list[str]:
    return transfer_weights(
        target,
        weights=source.state_dict(),
        source_grid=(4, 4),
        target_grid=grid,
        num_prefix_tokens=source.num_prefix_tokens,
        convention="google",
        where="there",
        **options,
    )


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_registers_carry_over_to_another_grid(pool: str) -> None:
    source = shaken(num_registers=2, pool=pool)
    target = shaken(num_registers=2, pool=pool, image_size=24)
    transfer(target, source, (6, 6))
    assert torch.equal(target.reg_token, source.reg_token)
    assert target.pos_embed.shape == (1, 36, 24)
    # Align-corners resampling keeps the corners: no register was taken for a patch.
    corners = [0, 5, 30, 35], [0, 3, 12, 15]
    assert torch.allclose(target.pos_embed[0, corners[0]], source.pos_embed[0, corners[1]])


def test_modules_of_an_objective_are_left_out_and_named() -> None:
    source, target = shaken(), shaken(num_classes=3)
    assert transfer(target, source) == []
    source.objective = torch.nn.Linear(2, 2)
    assert transfer(target, source) == ["objective.bias", "objective.weight"]
    assert torch.equal(target.cls_token, source.cls_token)


def test_fixed_positions_are_computed_for_the_new_grid() -> None:
    source, target = shaken(positions="sincos2d"), shaken(positions="sincos2d", image_size=24)
    transfer(target, source, (6, 6))
    assert torch.equal(target.pos_embed[0], sincos_position_embedding((6, 6), width=24))
    assert torch.equal(target.cls_token, source.cls_token)


def test_a_norm_after_the_mean_starts_fresh() -> None:
    pooled = {"pool": "gap", "class_token": True, "pool_norm": True}
    source, target, again = shaken(), shaken(**pooled), shaken(**pooled, num_classes=3)
    fresh = target.fc_norm.weight.clone()
    assert transfer(target, source) == ["norm.bias", "norm.weight"]
    assert torch.equal(target.fc_norm.weight, fresh)
    assert torch.equal(target.cls_token, source.cls_token)
    assert transfer(again, target) == []
    assert torch.equal(again.fc_norm.weight, fresh)


def test_fixed_positions_become_learned_ones_of_another_grid() -> None:
    source = shaken(positions="sincos2d_mae")
    settings = SMALL.model_copy(update={"positions": "sincos2d_mae"})
    description = settings.resolved(num_classes=5).description()
    positions = fixed_positions(description, grid=(4, 4))
    assert fixed_positions(SMALL.resolved(num_classes=5).description(), grid=(4, 4)) == {}
    for size, grid in ((16, (4, 4)), (24, (6, 6))):
        target = shaken(image_size=size)
        transfer_weights(
            target,
            weights=source.state_dict() | positions,
            source_grid=(4, 4),
            target_grid=grid,
            num_prefix_tokens=1,
            convention="deit",
            where="there",
        )
        assert not target.pos_embed[:, 0].any()
        if size == 16:
            images = torch.randn(2, 3, 16, 16)
            assert torch.allclose(
                target.forward_features(images), source.forward_features(images), atol=1e-6
            )


@pytest.mark.parametrize("with_position", [True, False])
def test_adding_or_removing_the_class_position_keeps_features(with_position: bool) -> None:
    source = shaken(class_position=with_position)
    target = shaken(class_position=not with_position)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before = target.forward_features(images)
        transfer(target, source)
        features = target.forward_features(images)
        assert torch.allclose(features, source.forward_features(images), atol=1e-5)
    assert not torch.allclose(features, before, atol=1e-2)


@pytest.mark.parametrize(
    ("source", "target", "row"),
    [
        ({"num_registers": 2}, {"class_position": False}, "reg_token: model not in this model"),
        ({"class_position": False}, {"num_registers": 2}, "reg_token: model"),
        ({}, {"positions": "sincos2d"}, "pos_embed: model not in this model"),
        ({"positions": "sincos2d"}, {}, "pos_embed: model"),
        ({"layer_scale": 0.1}, {}, "blocks.0.ls1.gamma: model not in this model"),
    ],
)
def test_another_kind_of_model_is_refused_by_name(
    source: dict[str, object], target: dict[str, object], row: str
) -> None:
    with pytest.raises(UserError) as caught:
        transfer(shaken(**target), shaken(**source))
    assert row in str(caught.value) and "keys of `model`" in str(caught.value)


def test_a_wrong_grid_is_refused_with_registers_too() -> None:
    model = shaken(num_registers=2)
    with pytest.raises(UserError, match="does not hold"):
        transfer_weights(
            model,
            weights=model.state_dict(),
            source_grid=(3, 4),
            target_grid=(4, 4),
            num_prefix_tokens=3,
            convention="google",
            where="there",
        )


def test_a_kept_head_gives_the_same_logits() -> None:
    source, target, fresh = shaken(), shaken(pool="cls", depth=1), shaken(num_classes=3)
    images = torch.randn(2, 3, 16, 16)
    transfer(target, source)
    assert not torch.equal(target(images), source(images))
    transfer(target, source, keep_head=True)
    assert torch.equal(target(images), source(images))
    with pytest.raises(UserError, match=r"head.weight: model \(3, 24\), checkpoint \(5, 24\)"):
        transfer(fresh, source, keep_head=True)
