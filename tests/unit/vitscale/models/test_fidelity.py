"""Every option of the model equals an independent forward pass in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from vitscale.config.section import Section
from vitscale.models.costs import num_parameters
from vitscale.models.positions import sincos_position_embedding
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model, decayed
from vitscale.training.loop import seed_step

SMALL = ViTSettings(image_size=16, patch_size=4, width=24, depth=2, num_heads=2, mlp_width=40)


def small(**changes: object) -> torch.nn.Module:
    settings = SMALL.model_copy(update=changes)
    return build_model(settings.resolved(num_classes=5), seed=3)


# The reference: state names and arithmetic only, no module of torch or timm.
def norm(x: np.ndarray, w: dict[str, np.ndarray], name: str, eps: float) -> np.ndarray:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def dense(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def gelu(x: np.ndarray, form: str) -> np.ndarray:
    if form == "erf":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    q, k, v = np.split(dense(x, w, f"{name}.qkv"), 3, axis=-1)
    outputs, width = [], q.shape[-1] // 2
    for head in range(2):
        part = slice(width * head, width * head + width)
        scores = q[:, part] @ k[:, part].T / math.sqrt(width)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        outputs.append(scores / scores.sum(-1, keepdims=True) @ v[:, part])
    return dense(np.concatenate(outputs, -1), w, f"{name}.proj")


def slow_sincos(rows: int, columns: int, width: int) -> np.ndarray:
    table = []
    for y in range(rows):
        for x in range(columns):
            omega = [10_000.0 ** -(i / (width // 4 - 1)) for i in range(width // 4)]
            table.append(
                [math.sin(x * o) for o in omega]
                + [math.cos(x * o) for o in omega]
                + [math.sin(y * o) for o in omega]
                + [math.cos(y * o) for o in omega]
            )
    return np.array(table)


def reference(
    w: dict[str, np.ndarray], image: np.ndarray, *, form: str, eps: float, gap: bool
) -> np.ndarray:
    """Logits of one [3, 16, 16] image: prefix is class token then registers, then patches."""
    kernel = w["patch_embed.proj.weight"].reshape(24, -1)
    patches = [
        kernel @ image[:, y : y + 4, x : x + 4].reshape(-1) + w["patch_embed.proj.bias"]
        for y in range(0, 16, 4)
        for x in range(0, 16, 4)
    ]
    tokens = np.stack(patches)
    pos = w.get("pos_embed", slow_sincos(4, 4, 24)[None])[0]
    tokens = tokens + pos[-16:]
    registers = w.get("reg_token", np.zeros((1, 0, 24)))[0]
    first = w.get("cls_token", np.zeros((1, 0, 24)))[0]
    if len(pos) == 17:
        first = first + pos[:1]
    x = np.concatenate([first, registers, tokens])
    one = np.ones(24)
    for i in range(2):
        b = f"blocks.{i}"
        out = attention(norm(x, w, f"{b}.norm1", eps), w, f"{b}.attn")
        x = x + w.get(f"{b}.ls1.gamma", one) * out
        hidden = gelu(dense(norm(x, w, f"{b}.norm2", eps), w, f"{b}.mlp.fc1"), form)
        x = x + w.get(f"{b}.ls2.gamma", one) * dense(hidden, w, f"{b}.mlp.fc2")
    after_mean = "fc_norm.weight" in w
    x = x if after_mean else norm(x, w, "norm", eps)
    pooled = x[len(first) + len(registers) :].mean(0) if gap else x[0]
    pooled = norm(pooled, w, "fc_norm", eps) if after_mean else pooled
    if "head.2.weight" in w:
        return dense(np.tanh(dense(pooled, w, "head.0")), w, "head.2")
    return dense(pooled, w, "head")


def shaken(**changes: object) -> tuple[torch.nn.Module, dict[str, np.ndarray], torch.Tensor]:
    """A model in double precision in which no weight is zero and the eps of the norms matters."""
    model = small(**changes).double().eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random).double() * 0.05)
            if name.split(".")[0] in ("patch_embed", "cls_token", "pos_embed", "reg_token"):
                parameter.mul_(0.02)
    if "pos_embed" not in dict(model.named_parameters()):
        model.pos_embed.copy_(torch.from_numpy(slow_sincos(4, 4, 24))[None])
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return model, weights, torch.randn(1, 3, 16, 16, generator=random).double()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"gelu": "erf", "representation_layer": True},
    {"pool": "gap"},
    {"layer_norm_eps": 1e-5},
    {"class_position": False},
    {"num_registers": 3},
    {"num_registers": 2, "pool": "gap", "layer_scale": 0.1},
    {"pool": "gap", "class_token": True},
    {"pool": "gap", "class_token": True, "pool_norm": True, "positions": "sincos2d_mae"},
    {"pool": "gap", "pool_norm": True, "num_registers": 1},
    {"head_width": 7},
    {"positions": "sincos2d"},
    {"positions": "sincos2d", "pool": "gap", "num_registers": 1, "representation_layer": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_equals_independent_reference(options: dict[str, Any]) -> None:
    model, weights, image = shaken(**options)
    settings = SMALL.model_copy(update=options)
    facts = {"form": settings.gelu, "eps": settings.layer_norm_eps, "gap": settings.pool == "gap"}
    with torch.no_grad():
        logits = model(image)[0].numpy()
    assert np.allclose(logits, reference(weights, image[0].numpy(), **facts), atol=1e-10)
    # The comparison is sensitive: another GELU or another eps fails.
    for wrong in ({"form": "erf" if settings.gelu == "tanh" else "tanh"}, {"eps": 3e-6}):
        other = reference(weights, image[0].numpy(), **(facts | wrong))
        assert not np.allclose(logits, other, atol=1e-7)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_formula_counts_every_option(options: dict[str, Any]) -> None:
    model = small(**options)
    arch = SMALL.model_copy(update=options).resolved(num_classes=5)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(arch)
    assert model.patch_embed.num_patches + model.num_prefix_tokens == arch.num_tokens
    assert not any(decayed(name, p) for name, p in model.named_parameters() if "token" in name)
    assert not any(decayed(name, p) for name, p in model.named_parameters() if "gamma" in name)


def test_default_state_is_pinned() -> None:
    """Names, their order, and the weights of a seed."""
    state = small().state_dict()
    block = ["norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight"]
    block += ["attn.proj.bias", "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias"]
    block += ["mlp.fc2.weight", "mlp.fc2.bias"]
    expected = ["cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
    expected += [f"blocks.{i}.{name}" for i in range(2) for name in block]
    expected += ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert list(state) == expected
    # Uniform draws only: torch 2.11 and 2.15 draw other normal numbers from one seed.
    names = ["blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight", "blocks.1.mlp.fc2.weight"]
    values = [state[name][0, 0].item() for name in names]
    assert values == pytest.approx([-0.3505386, 0.2471785, 0.2022812], abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"num_registers": 2, "class_position": False}, {"layer_scale": 0.1}, {"drop_path": 0.1},
     {"attention_dropout": 0.1}, {"head_std": 0.1}],
    ids=str,
)  # fmt: skip
def test_options_do_not_change_the_other_weights_of_a_seed(options: dict[str, Any]) -> None:
    alike = {"class_position": options["class_position"]} if "class_position" in options else {}
    plain, changed = small(**alike).state_dict(), small(**options).state_dict()
    different = [name for name in plain if not torch.equal(plain[name], changed[name])]
    assert different == (["head.weight"] if "head_std" in options else [])


@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (37, 37)])
def test_sincos_table_equals_a_slow_one(grid: tuple[int, int]) -> None:
    table = sincos_position_embedding(grid, width=24)
    assert table.dtype == torch.float32
    assert np.allclose(table.numpy(), slow_sincos(*grid, 24), atol=1e-6)


def test_fixed_positions_are_neither_trained_nor_saved() -> None:
    model = small(positions="sincos2d", dropout=0.5)
    assert "pos_embed" not in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())
    assert torch.equal(model.pos_embed[0], sincos_position_embedding((4, 4), width=24))
    assert model.cls_token.abs().sum() == 0
    zeros = (model._pos_embed(torch.ones(1, 16, 24)) == 0).float().mean()
    assert zeros > 0.3  # dropout follows fixed positions too


def test_position_init_has_the_published_spread() -> None:
    settings = SMALL.model_copy(update={"image_size": 128, "width": 96, "num_heads": 4})
    for name, std in (("vit", 0.02), ("big_vision", 1 / math.sqrt(96))):
        chosen = settings.model_copy(update={"position_init": name})
        model = build_model(chosen.resolved(num_classes=5), seed=0)
        assert model.pos_embed.std().item() == pytest.approx(std, rel=0.02)


def test_deit_initialisation() -> None:
    """DeiT-III's models_v2.py: N(0, 0.02) everywhere; patches U(+-1 / sqrt(fan-in)), PyTorch's."""
    model = small(weight_init="deit", head_std=0.02, width=96, num_heads=4, depth=2)
    weights = dict(model.named_parameters())
    for name in ("cls_token", "pos_embed", "blocks.1.attn.qkv.weight", "blocks.0.mlp.fc1.weight"):
        assert weights[name].std().item() == pytest.approx(0.02, rel=0.15), name
    assert weights["head.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    bound = 1 / math.sqrt(48)
    patches = weights["patch_embed.proj.weight"]
    assert 0.98 * bound < patches.abs().max().item() <= bound
    assert 0 < weights["patch_embed.proj.bias"].abs().max().item() <= bound
    biases = [p for name, p in weights.items() if name.endswith(("fc1.bias", "qkv.bias"))]
    assert biases and all(p.abs().max() == 0 for p in biases)


def test_representation_layer_starts_lecun_normal() -> None:
    """It names no initialisation in models_vit.py, so it has Flax's default."""
    weight = small(representation_layer=True, width=96, num_heads=4).head[0].weight
    std = 1 / math.sqrt(96)
    assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert weight.abs().max().item() == pytest.approx(2 * std / 0.8796, rel=0.01)


def test_registers_start_apart_from_each_other() -> None:
    registers = small(num_registers=3).reg_token[0]
    assert 0 < registers.abs().max() < 1e-5
    assert not torch.equal(registers[0], registers[1])


def test_head_starts_at_the_configured_std() -> None:
    model = small(head_bias=-10.0, head_std=2e-2, representation_layer=True)
    assert model.head[-1].bias.tolist() == [-10.0] * 5
    assert model.head[-1].weight.std().item() == pytest.approx(2e-2, rel=0.2)


def drop_path_rates(model: torch.nn.Module) -> list[float]:
    return [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]


def test_drop_path_grows_linearly_or_is_constant() -> None:
    assert drop_path_rates(small(drop_path=0.3, depth=4)) == pytest.approx([0, 0.1, 0.2, 0.3])
    constant = small(drop_path=0.3, depth=4, drop_path_by_depth="constant")
    assert drop_path_rates(constant) == [0.3] * 4
    assert constant.blocks[0].drop_path2.drop_prob == 0.3


def test_impossible_positions_are_refused() -> None:
    def keys(**changes: object) -> list[str]:
        return [key for key, _ in SMALL.model_copy(update=changes).problems()]

    assert isinstance(SMALL, Section) and keys() == []
    assert keys(positions="sincos2d", width=6) == ["model.positions"]
    for changes in ({"pool": "gap"}, {"positions": "sincos2d"}, {"num_registers": 1}):
        assert keys(class_position=True, **changes) == ["model.class_position"]
        assert keys(class_position=False, **changes) == []
        assert keys(**changes) == []


def test_attention_dropout_is_a_function_of_the_position() -> None:
    model, images = small(attention_dropout=0.5), torch.randn(2, 3, 16, 16)

    def features(step: int) -> torch.Tensor:
        seed_step(0, step=step, micro_step=0, rank=0)
        return model(images, output="features")

    assert torch.equal(features(1), features(1)) and not torch.equal(features(1), features(2))
    model.eval()
    assert torch.equal(features(1), features(2))


def test_misfits_of_heads_and_patches_name_the_option() -> None:
    def problems(**changes: object) -> list[str]:
        return [text for _, text in SMALL.model_copy(update=changes).problems()]

    assert problems(num_heads=5, head_width=3) == problems(num_heads=2) == []
    assert "or set model.head_width" in problems(num_heads=5)[0]
    assert "nearest: 16 or 20" in problems(image_size=18)[0]
    assert problems(image_size=3) == ["3 px hold no patch of 4 px; give at least 4"]
