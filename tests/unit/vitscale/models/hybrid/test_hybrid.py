"""Hybrids against an independent forward pass in Google's names, timm, and published counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.vitscale.models.hybrid.google_hybrid import Arrays, GoogleHybrid, hybrid_arrays
from vitscale.models.costs import num_parameters, train_flops_per_image
from vitscale.models.hybrid.architecture import HybridArchitecture
from vitscale.models.hybrid.costs import activation_bytes_per_image
from vitscale.models.hybrid.model import (
    StandardizedConv,
    build_model,
    checkpoint_activations,
    compile_blocks,
    decayed,
    layers_above,
)
from vitscale.models.hybrid.settings import PRESETS, HybridSettings
from vitscale.models.vit.model import ViT
from vitscale.models.weights.reading import read_external_weights
from vitscale.models.weights.transfer import transfer_weights

# Two stages: 8 pixels a patch. Channels are as few as 32 groups allow.
SMALL = HybridSettings(
    image_size=32, stage_depths=(2, 1), root_width=32, patch_size=1, width=24, depth=1,
    num_heads=2, mlp_width=48,
)  # fmt: skip
ROOT_ONLY = SMALL.model_copy(update={"stage_depths": (), "patch_size": 2})


def arch_of(settings: HybridSettings) -> HybridArchitecture:
    return settings.architecture(num_classes=5)


def built(settings: HybridSettings = SMALL) -> ViT:
    return build_model(settings, arch_of(settings), seed=3).eval()


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


# timm, 1,000 classes at 224 px; at 384 px, where it has such a model.
@pytest.mark.parametrize(
    ("preset", "small", "large"),
    [
        ("R+Ti/16", 6_337_704, 6_355_944),
        ("R26+S/32", 36_431_912, 36_468_392),
        ("R50+B/16", 98_659_112, 98_950_952),
        ("R50+B/32", 110_945_832, None),
        ("R50+L/16", 316_483_624, None),
        ("R50+L/32", 328_994_856, 329_092_136),
    ],
)
def test_presets_have_the_papers_parameters(preset: str, small: int, large: int | None) -> None:
    assert list(HybridSettings(preset=preset).problems()) == []
    counts = {
        size: num_parameters(
            HybridSettings(preset=preset, image_size=size).architecture(num_classes=1000)
        )
        for size in (224, 384)
    }
    assert counts[224] == small and large in (None, counts[384])


@pytest.mark.parametrize("settings", [SMALL, ROOT_ONLY])
def test_parameters_and_flops_equal_those_of_the_model(settings: HybridSettings) -> None:
    model = built(settings)
    arch = arch_of(settings)
    assert num_parameters(arch) == sum(p.numel() for p in model.parameters())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images())
    assert train_flops_per_image(arch) * 2 == 3 * counter.get_total_flops()


def test_activation_bytes_equal_what_autograd_keeps_of_the_stem() -> None:
    settings = SMALL.model_copy(update={"image_size": 64, "stage_depths": (2, 2, 1)})
    model, kept = built(settings), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.patch_embed(images(64))
    found = sum(t.nbytes for pointer, t in kept.items() if pointer not in own and t.shape[0] == 2)
    arch = arch_of(settings)
    blocks = arch.depth * arch.num_train_tokens * (18 * arch.width + 4 * arch.mlp_width) * 2
    formula = activation_bytes_per_image(arch, precision="fp32", activation_checkpointing=False)
    assert found / 2 == pytest.approx(formula - blocks, rel=0.02)


def npz(path: Path, arrays: Arrays, *, old_norms: bool = False) -> Path:
    if old_norms:
        is_norm = "gn_", "/gn"
        arrays = {
            name: array[None, None, None] if any(n in name for n in is_norm) else array
            for name, array in arrays.items()
        }
    np.savez(path, **arrays)  # type: ignore[arg-type]  # names to arrays
    return path


def loaded(path: Path, settings: HybridSettings) -> ViT:
    """Our model with the trunk of the file and, for the comparison, its head."""
    model = built(settings)
    external = read_external_weights(path, grid=None)
    transfer_weights(
        model,
        weights=external.weights,
        source_grid=external.grid,
        target_grid=arch_of(settings).grid,
        num_prefix_tokens=1,
        convention="google",
        where=str(path),
    )
    assert isinstance(model.head, nn.Linear) and model.head.weight.abs().max() == 0
    head = {name: external.weights[f"head.{name}"] for name in ("weight", "bias")}
    model.head.load_state_dict(head)
    return model


@pytest.mark.parametrize("old_norms", [False, True])
@pytest.mark.parametrize(("settings", "patch"), [(SMALL, 1), (ROOT_ONLY, 2)])
def test_logits_of_an_npz_are_those_of_googles_code(
    tmp_path: Path, settings: HybridSettings, patch: int, old_norms: bool
) -> None:
    arch = arch_of(settings)
    arrays = hybrid_arrays(
        arch.stage_depths, root=32, grid=arch.grid[0], patch=patch, width=24, heads=2
    )
    model = loaded(npz(tmp_path / "hybrid.npz", arrays, old_norms=old_norms), settings)
    with torch.no_grad():
        ours = model(images())
    theirs = GoogleHybrid(arrays).logits(images()).float()
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_npz_is_transferred_to_another_feature_grid(tmp_path: Path) -> None:
    """Doubling the side of constant positions keeps them; the stem does not change."""
    arrays = hybrid_arrays((2, 1), root=32, grid=4, patch=1, width=24, heads=2)
    positions = arrays["Transformer/posembed_input/pos_embedding"]
    positions[:, 1:] = positions[:, 1:2]
    larger = SMALL.model_copy(update={"image_size": 64})
    model = loaded(npz(tmp_path / "hybrid.npz", arrays), larger)
    assert arch_of(larger).grid == (8, 8)
    expected = torch.from_numpy(positions[:, 1:2]).expand(1, 64, -1)
    torch.testing.assert_close(model.pos_embed[:, 1:], expected)
    assert model(images(64)).shape == (2, 5)


def test_names_and_features_are_those_of_timm() -> None:
    from timm.layers import HybridEmbed
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import _resnetv2

    stem = _resnetv2((2, 1))
    timm = VisionTransformer(
        img_size=32, patch_size=1, embed_dim=24, depth=1, num_heads=2, mlp_ratio=2, num_classes=5,
        embed_layer=lambda **options: HybridEmbed(stem, **options),
    )  # fmt: skip
    model = built(SMALL.model_copy(update={"root_width": 64}))
    timm.load_state_dict(model.state_dict())
    theirs = timm.eval().patch_embed(images())
    torch.testing.assert_close(model.patch_embed(images()), theirs, rtol=2e-3, atol=2e-3)


def test_stem_starts_as_in_googles_code() -> None:
    model = built()
    values = dict(model.named_parameters())
    last = [name for name in values if name.endswith("norm3.weight")]
    assert len(last) == 3 and all(values[name].abs().max() == 0 for name in last)
    kernel = values["patch_embed.backbone.stages.0.blocks.0.conv2.weight"]
    assert float(kernel.std()) == pytest.approx((9 * 32) ** -0.5, rel=0.03)
    assert values["patch_embed.backbone.stem.norm.weight"].min() == 1
    other = build_model(SMALL, arch_of(SMALL), seed=4)
    again = build_model(SMALL, arch_of(SMALL), seed=3)
    name = "patch_embed.backbone.stem.conv.weight"
    assert torch.equal(values[name], dict(again.named_parameters())[name])
    assert not torch.equal(values[name], dict(other.named_parameters())[name])


def test_stem_decays_and_scales_as_the_patch_embedding() -> None:
    arch = arch_of(SMALL)
    names = dict(built().named_parameters())
    stem = {name: p for name, p in names.items() if name.startswith("patch_embed.backbone.")}
    for name, parameter in stem.items():
        assert decayed(name, parameter) == (".conv" in name)
        assert layers_above(name, arch) == arch.depth + 1


def test_features_and_logits_go_through_one_head() -> None:
    model = built()
    features = model(images(), output="features")
    assert features.shape == (2, 24)
    torch.testing.assert_close(model(images()), model.head(features))


def gradients(model: ViT) -> dict[str, torch.Tensor]:
    assert isinstance(model.head, nn.Linear)
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    model.train()(images()).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain, recomputed = built(), built()
    checkpoint_activations(recomputed)
    calls = {"plain": 0, "recomputed": 0}
    for name, model in (("plain", plain), ("recomputed", recomputed)):
        conv = model.patch_embed.backbone.stages[0].blocks[1].conv2
        conv.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    expected, found = gradients(plain), gradients(recomputed)
    assert calls == {"plain": 1, "recomputed": 2}
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_units_and_blocks_are_compiled_in_place() -> None:
    model = built()
    expected, names = model(images()), list(model.state_dict())
    compile_blocks(model, backend="eager")
    torch.testing.assert_close(model(images()), expected)
    assert list(model.state_dict()) == names


def test_epsilon_is_added_to_the_deviation() -> None:
    """Of kernels so small that it matters; norms after the convolution would hide it."""
    conv = StandardizedConv(32, 64, 3, stride=2)
    nn.init.normal_(conv.weight, std=1e-4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 32, 8, 8, generator=torch.Generator().manual_seed(1))
    kernel = conv.weight.detach().permute(2, 3, 1, 0).numpy()
    expected = GoogleHybrid({"c/kernel": kernel}).conv(x.double(), "c", 2).float()
    torch.testing.assert_close(conv(x), expected, rtol=1e-4, atol=1e-4)


def test_kernels_are_standardised_in_fp32() -> None:
    """Rounded to bf16 before the division, the deviation would be off by up to 0.4 percent."""
    conv = StandardizedConv(32, 32, 3).bfloat16()
    exact = StandardizedConv(32, 32, 3)
    exact.load_state_dict({name: value.float() for name, value in conv.state_dict().items()})
    x = torch.randn(1, 32, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    error = (conv(x).float() - exact(x.float())).abs().max() / exact(x.float()).abs().max()
    assert error < 0.01


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"preset": "R50+B/8"}, "model.preset", "R50+B/16"),
        ({"image_size": 36}, "model.image_size", "not a multiple of the 8 px"),
        ({"root_width": 48}, "model.root_width", "32 groups"),
        ({"stage_depths": (1, 0)}, "model.stage_depths", "at least 1"),
        ({"stage_depths": None}, "model", "stage_depths"),
        ({"num_heads": 5}, "model.num_heads", "do not divide"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], key: str, text: str) -> None:
    ((found, what),) = SMALL.model_copy(update=changes).problems()
    assert found == key and text in what


def test_every_preset_refuses_sizes_beside_its_grid() -> None:
    for preset in PRESETS:
        stride = HybridSettings(preset=preset).architecture(num_classes=1).stride
        assert stride == (16 if preset.startswith("R50") and preset.endswith("/16") else 32)
        ((key, _),) = HybridSettings(preset=preset, image_size=stride + 8).problems()
        assert key == "model.image_size"


def test_description_holds_json_values() -> None:
    description = arch_of(SMALL).description()
    assert description["stage_depths"] == [2, 1] and description["name"] == "hybrid"
