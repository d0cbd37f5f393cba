"""BiT ResNets against an independent forward pass in Google's names, timm, and published counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.vitscale.models.resnet.google_bit import GoogleBiT, bit_arrays
from vitscale.models.costs import num_parameters, train_flops_per_image
from vitscale.models.resnet.architecture import ResNetArchitecture
from vitscale.models.resnet.costs import activation_bytes_per_image
from vitscale.models.resnet.model import (
    BiTResNet,
    build_model,
    checkpoint_activations,
    compile_blocks,
    decayed,
    layers_above,
)
from vitscale.models.resnet.settings import ResNetSettings
from vitscale.models.weights.reading import read_external_weights
from vitscale.models.weights.transfer import transfer_weights

SMALL = ResNetSettings(image_size=32, stage_depths=(2, 1), root_width=32)


def arch_of(settings: ResNetSettings = SMALL) -> ResNetArchitecture:
    return settings.architecture(num_classes=5)


def built(settings: ResNetSettings = SMALL) -> BiTResNet:
    return build_model(settings, arch_of(settings), seed=3).eval()


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


# The released weights of BiT as timm holds them; the others computed with timm, 1,000 classes.
@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("R50x1", 25_549_352),
        ("R101x1", 44_541_480),
        ("R50x3", 217_319_080),
        ("R101x3", 387_934_888),
        ("R152x2", 236_335_208),
        ("R152x4", 936_533_224),
        ("R50x2", 97_988_712),
        ("R152x1", 60_185_128),
        ("R200x3", 568_633_000),
    ],
)
def test_presets_have_the_papers_parameters(preset: str, count: int) -> None:
    settings = ResNetSettings(preset=preset)
    assert list(settings.problems()) == []
    assert num_parameters(settings.architecture(num_classes=1000)) == count


@pytest.mark.parametrize("size", [32, 37])
def test_parameters_and_flops_equal_those_of_the_model(size: int) -> None:
    settings = SMALL.model_copy(update={"image_size": size, "stage_depths": (1, 2, 1)})
    model, arch = built(settings), arch_of(settings)
    assert num_parameters(arch) == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(images(size))
    assert train_flops_per_image(arch) * 2 == 3 * counter.get_total_flops()


def test_activation_bytes_equal_what_autograd_keeps() -> None:
    settings = SMALL.model_copy(update={"image_size": 64, "stage_depths": (2, 2, 1)})
    model, kept = built(settings), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images(64))
    found = sum(t.nbytes for pointer, t in kept.items() if pointer not in own and t.shape[0] == 2)
    formula = activation_bytes_per_image(
        arch_of(settings), precision="fp32", activation_checkpointing=False
    )
    assert found / 2 == pytest.approx(formula, rel=0.02)
    less = activation_bytes_per_image(
        arch_of(settings), precision="fp32", activation_checkpointing=True
    )
    assert less < 0.7 * formula


def loaded(path: Path, settings: ResNetSettings = SMALL) -> BiTResNet:
    """Our model with the trunk of the file and, for the comparison, its head."""
    model = built(settings)
    external = read_external_weights(path, grid=None)
    transfer_weights(
        model,
        weights=external.weights,
        source_grid=external.grid,
        target_grid=arch_of(settings).grid,
        num_prefix_tokens=0,
        convention="google",
        where=str(path),
    )
    assert model.head.fc.weight.abs().max() == 0
    head = {name: external.weights[f"head.fc.{name}"] for name in ("weight", "bias")}
    model.head.fc.load_state_dict(head)
    return model


@pytest.mark.parametrize("numbered", [False, True])
def test_logits_of_an_npz_are_those_of_googles_code(tmp_path: Path, numbered: bool) -> None:
    arrays = bit_arrays((2, 1), root=32)
    theirs = GoogleBiT(arrays).logits(images()).float()
    if numbered:
        names = {name: name.replace("conv2d/k", "conv2d_7/k") for name in arrays if "/b/" in name}
        arrays = {names.get(name, name): array for name, array in arrays.items()}
    path = tmp_path / "bit.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]  # names to arrays
    with torch.no_grad():
        ours = loaded(path)(images())
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_npz_serves_any_image_size(tmp_path: Path) -> None:
    arrays = bit_arrays((2, 1), root=32)
    np.savez(tmp_path / "bit.npz", **arrays)  # type: ignore[arg-type]  # names to arrays
    model = loaded(tmp_path / "bit.npz", SMALL.model_copy(update={"image_size": 48}))
    theirs = GoogleBiT(arrays).logits(images(48)).float()
    torch.testing.assert_close(model(images(48)), theirs, rtol=1e-4, atol=1e-4)


def test_names_are_those_of_timm() -> None:
    from timm.models.resnetv2 import _create_resnetv2_bit

    theirs = _create_resnetv2_bit("resnetv2_50x1_bit", layers=[2, 1], width_factor=1, num_classes=5)
    ours = built(SMALL.model_copy(update={"root_width": 64}))
    theirs.load_state_dict(ours.state_dict())


def test_weights_start_as_in_big_vision() -> None:
    settings = SMALL.model_copy(update={"head_bias": -10.0})
    model = built(settings)
    values = dict(model.named_parameters())
    assert all(v.min() == 1 for name, v in values.items() if "norm" in name and "weight" in name)
    kernel = values["stages.0.blocks.0.conv2.weight"]
    assert float(kernel.std()) == pytest.approx((9 * 32) ** -0.5, rel=0.03)
    assert torch.equal(model(images()), torch.full((2, 5), -10.0))
    other = dict(build_model(SMALL, arch_of(), seed=4).named_parameters())
    assert not torch.equal(kernel, other["stages.0.blocks.0.conv2.weight"])


def test_kernels_decay_and_layers_count_units() -> None:
    names = dict(built().named_parameters())
    assert {name for name, p in names.items() if not decayed(name, p)} == {
        name for name in names if "norm" in name or name.endswith("bias")
    }
    above = {name: layers_above(name, arch_of()) for name in names}
    expected = {"stem.": 4, "stages.0.blocks.0": 3, "stages.0.blocks.1": 2, "stages.1.": 1}
    expected |= {"norm.": 0, "head.": 0}
    for name, found in above.items():
        assert found == next(n for prefix, n in expected.items() if name.startswith(prefix)), name


def test_features_are_the_mean_of_the_last_map() -> None:
    model = built()
    features = model(images(), output="features")
    assert features.shape == (2, arch_of().feature_width) == (2, 256)
    torch.testing.assert_close(features, model.forward_features(images()).mean((2, 3)))
    headless = build_model(SMALL, SMALL.architecture(num_classes=0), seed=3)
    assert torch.equal(headless(images(), output="features"), features)


def gradients(model: BiTResNet) -> dict[str, torch.Tensor]:
    nn.init.normal_(model.head.fc.weight, generator=torch.Generator().manual_seed(0))
    model.train()(images()).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain, recomputed = built(), built()
    checkpoint_activations(recomputed)
    expected, found = gradients(plain), gradients(recomputed)
    assert len(expected) == len(list(plain.parameters()))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_units_are_compiled_in_place() -> None:
    model = built(SMALL.model_copy(update={"head_std": 1.0}))
    expected, names = model(images()), list(model.state_dict())
    compile_blocks(model, backend="eager")
    torch.testing.assert_close(model(images()), expected)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"preset": "R51x1"}, "model.preset"),
        ({"preset": "R50"}, "model.preset"),
        ({"root_width": 20}, "model.root_width"),
        ({"stage_depths": (1, 1, 1, 1, 1)}, "model.stage_depths"),
        ({"stage_depths": None}, "model"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], key: str) -> None:
    assert [found for found, _ in SMALL.model_copy(update=changes).problems()] == [key]


def test_the_two_keys_override_the_preset() -> None:
    arch = ResNetSettings(preset="R50x2", root_width=32).architecture(num_classes=5)
    assert (arch.stage_depths, arch.root_width) == ((3, 4, 6, 3), 32)
    arch = ResNetSettings(preset="R50x2", stage_depths=(1,)).architecture(num_classes=5)
    assert (arch.stage_depths, arch.root_width, arch.feature_shape) == ((1,), 128, (56, 56))
