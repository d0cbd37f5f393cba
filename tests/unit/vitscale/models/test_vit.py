"""The built model against the papers' numbers."""

from __future__ import annotations

import math

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import ViT, build_model, decayed
from vitscale.models.weights.transfer import transfer_weights
from vitscale.training.losses import sigmoid_loss, softmax_loss

SMALL = ViTSettings(image_size=16, patch_size=4, width=24, depth=2, num_heads=2, mlp_width=40)


def small(**changes: object) -> torch.nn.Module:
    settings = SMALL.model_copy(update=changes)
    return build_model(settings.resolved(num_classes=5), seed=0)


def test_built_b16_has_the_papers_parameter_count() -> None:
    settings = ViTSettings(preset="B/16")
    model = build_model(settings.resolved(num_classes=1000), seed=0)
    assert sum(p.numel() for p in model.parameters()) == 86_567_656


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize(("width", "mlp_width"), [(88, 120), (104, 240), (24, 96)])
def test_mlps_have_the_width_that_is_asked_for(width: int, mlp_width: int, mlp: str) -> None:
    """timm rounds the product of width and ratio down."""
    settings = SMALL.model_copy(
        update={"width": width, "num_heads": 2, "mlp_width": mlp_width, "mlp": mlp}
    )
    model = build_model(settings.resolved(num_classes=5), seed=0)
    assert model.get_submodule("blocks.0.mlp.fc2").in_features == mlp_width


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("representation_layer", [False, True])
def test_features_are_what_the_head_sees(pool: str, representation_layer: bool) -> None:
    model = small(pool=pool, representation_layer=representation_layer, head_std=0.1)
    images = torch.randn(3, 3, 16, 16)
    tokens = model.forward_features(images)
    features = model(images, output="features")
    assert torch.equal(features, tokens[:, 0] if pool == "cls" else tokens.mean(dim=1))
    assert torch.equal(model.head(features), model(images))


def test_initial_summed_sigmoid_loss_with_21k_classes() -> None:
    settings = SMALL.model_copy(update={"head_bias": -10.0, "num_classes": 21_843})
    model = build_model(settings.resolved(num_classes=21_843), seed=0)
    with torch.no_grad():
        loss = sigmoid_loss(model(torch.randn(4, 3, 16, 16)), torch.tensor([0, 5, 9, 21_842]), 0.0)
    # ln(1 + e^10) for the true class, and 21,842 times ln(1 + e^-10).
    assert loss.item() == pytest.approx(
        math.log1p(math.exp(10)) + 21_842 * math.log1p(math.exp(-10))
    )
    assert loss.item() == pytest.approx(10.99, abs=0.01)


def test_zero_head_starts_at_equal_probabilities() -> None:
    logits = small()(torch.randn(2, 3, 16, 16))
    assert softmax_loss(logits, torch.tensor([0, 1]), 0.0).item() == pytest.approx(math.log(5))


def test_q_k_v_have_their_own_xavier_bounds() -> None:
    weight = small(width=96, num_heads=4).blocks[0].attn.qkv.weight
    bound = math.sqrt(6 / (96 + 96))
    for part in weight.chunk(3):
        assert 0.98 * bound < part.abs().max().item() <= bound


def test_dropout_follows_every_dense_layer_but_qkv() -> None:
    block = small(dropout=0.3).blocks[0]
    assert block.attn.proj_drop.p == block.mlp.drop1.p == block.mlp.drop2.p == 0.3
    assert small(dropout=0.3).pos_drop.p == 0.3
    assert block.attn.attn_drop.p == 0.0


def test_weight_decay_acts_on_kernels_only() -> None:
    names = {name for name, p in small().named_parameters() if decayed(name, p)}
    assert names and all(name.endswith("weight") for name in names)
    assert not any("norm" in name or "embed" in name and "patch" not in name for name in names)
    assert "patch_embed.proj.weight" in names and "head.weight" in names


def test_same_seed_same_weights() -> None:
    first, second = small().state_dict(), small().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def transfer(target: torch.nn.Module, source: torch.nn.Module, *, grid: tuple[int, int]) -> None:
    transfer_weights(
        target,
        weights=source.state_dict(),
        source_grid=(4, 4),
        target_grid=grid,
        num_prefix_tokens=1,
        convention="google",
        where="there",
    )


def test_transfer_keeps_the_trunk_and_a_fresh_head() -> None:
    source, target = small(representation_layer=True), small(image_size=24)
    torch.nn.init.normal_(source.head[-1].weight)
    torch.nn.init.normal_(source.norm.weight)
    transfer(target, source, grid=(6, 6))
    assert torch.equal(target.norm.weight, source.norm.weight)
    assert target.pos_embed.shape == (1, 37, 24)
    assert target.head.weight.abs().sum() == 0


def test_checkpoint_of_another_model_is_refused_with_a_table() -> None:
    target = small(depth=3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(UserError, match="checkpoint of another model") as caught:
        transfer(target, small(mlp_width=44), grid=(4, 4))
    assert "blocks.0.mlp.fc1.weight: model (40, 24), checkpoint (44, 24)" in str(caught.value)
    assert "blocks.2.attn.proj.bias: model (24,), checkpoint not in" in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def model_with(**changes: object) -> ViT:
    values: dict[str, object] = {
        **{"image_size": 16, "patch_size": 4, "width": 12, "depth": 5, "num_heads": 2},
        **{"mlp_width": 24, "num_registers": 1, "head_std": 0.1},
    }
    settings = ViTSettings.model_validate(values | changes)
    return build_model(settings.resolved(num_classes=3), seed=0).eval()


@torch.no_grad()
def tokens_after(model: ViT, num_blocks: int) -> torch.Tensor:
    """Through the last norm; the class token is first, one register follows."""
    patches = model.patch_embed(PIXELS)
    cls, register = (token.expand(2, 1, 12) for token in (model.cls_token, model.reg_token))
    tokens = torch.cat([cls, register, patches + model.pos_embed], dim=1)
    for block in list(model.blocks)[:num_blocks]:
        tokens = block(tokens)
    return torch.as_tensor(model.norm(tokens))


@torch.no_grad()
def test_blocks_are_the_last_class_tokens_and_the_mean_patch() -> None:
    model = model_with(class_position=False)
    expected = [tokens_after(model, number)[:, 0] for number in (5, 4, 3, 2)]
    expected.append(tokens_after(model, 5)[:, 2:].mean(dim=1))
    assert torch.allclose(model(PIXELS, output="blocks"), torch.cat(expected, dim=1), atol=1e-6)


@torch.no_grad()
def test_the_representation_is_what_the_last_layer_sees() -> None:
    model = model_with(representation_layer=True)
    last = model.head[2]
    found = model(PIXELS, output="representation")
    assert torch.equal(last(found), model(PIXELS))
    assert not torch.allclose(found, model(PIXELS, output="features"))


@pytest.mark.parametrize(
    ("changes", "missing"), [({"pool": "gap"}, "blocks"), ({"depth": 3}, "blocks"), ({}, "heads")]
)
def test_outputs_that_a_model_lacks_are_refused(changes: dict[str, object], missing: str) -> None:
    model = model_with(**changes)
    assert missing not in model.known_outputs
    with pytest.raises(ValueError, match=f"'{missing}' is not one of logits, features"):
        model(PIXELS, output=missing)


@pytest.mark.parametrize("depth, has_blocks", [(3, False), (4, True)])
def test_four_blocks_are_enough_for_their_features(depth: int, has_blocks: bool) -> None:
    assert ("blocks" in small(depth=depth).known_outputs) == has_blocks
