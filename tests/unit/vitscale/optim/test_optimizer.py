"""Parameter groups and their decay, against slow versions written out."""

from __future__ import annotations

import pytest
import torch

from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model, decayed, layers_above
from vitscale.optim.optimizer import build_optimizer, optimizer_groups
from vitscale.optim.settings import OptimSettings, optim_problems

CPU = torch.device("cpu")
DEPTH = 3
MODEL = ViTSettings(
    image_size=8, patch_size=4, width=12, depth=DEPTH, num_heads=2, mlp_width=16, num_classes=5
)


def settings(**values: object) -> OptimSettings:
    return OptimSettings.model_validate({"lr": 1e-3, **values})


def vit() -> torch.nn.Module:
    return build_model(MODEL.resolved(num_classes=5), seed=0)


def above(name: str) -> int:
    return layers_above(name, MODEL.resolved(num_classes=5))


def test_default_groups_are_kernels_and_the_rest_at_one_rate() -> None:
    model = vit()
    groups = optimizer_groups(
        model.named_parameters(),
        settings=settings(weight_decay=0.03),
        decayed=decayed,
        layers_above=above,
    )
    assert [(g["weight_decay"], g["lr_scale"]) for g in groups] == [(0.03, 1.0), (0.0, 1.0)]
    named = dict(model.named_parameters())
    kernels = [p for name, p in named.items() if decayed(name, p)]
    assert [id(p) for p in groups[0]["params"]] == [id(p) for p in kernels]
    assert sum(len(g["params"]) for g in groups) == len(named)


def masked_autoencoder_layer(name: str) -> int:
    """MAE's util/lr_decay.py numbers layers from the embedding (0) to the head (depth + 1)."""
    if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
        return 0
    return int(name.split(".")[1]) + 1 if name.startswith("blocks") else DEPTH + 1


def test_layer_decay_gives_the_rates_of_mae() -> None:
    model = vit()
    groups = optimizer_groups(
        model.named_parameters(),
        settings=settings(layer_decay=0.75),
        decayed=decayed,
        layers_above=above,
    )
    found = {id(p): g["lr_scale"] for g in groups for p in g["params"]}
    names = dict(model.named_parameters())
    assert found.keys() == {id(p) for p in names.values()}
    for name, parameter in names.items():
        expected = 0.75 ** (DEPTH + 1 - masked_autoencoder_layer(name))
        assert found[id(parameter)] == pytest.approx(expected), name
    assert len(groups) == 2 * (DEPTH + 2)


@pytest.mark.parametrize("layer_decay", [1.0, 0.5])
@pytest.mark.parametrize("peak", [1e-3, 0.2])
def test_independent_decay_is_big_visions_over_20_steps(peak: float, layer_decay: float) -> None:
    """big_vision: x -= schedule * (peak * multiplier * adam + decay * x), decay on kernels."""
    decay, beta1, beta2, eps = 1e-4 * 300, 0.9, 0.999, 1e-8
    random = torch.Generator().manual_seed(0)
    model = vit().double()
    chosen = settings(
        lr=peak, weight_decay=decay, weight_decay_mode="independent", layer_decay=layer_decay
    )
    groups = optimizer_groups(
        model.named_parameters(), settings=chosen, decayed=decayed, layers_above=above
    )
    optimizer = build_optimizer(groups, settings=chosen, device=CPU)
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    mean = {name: torch.zeros_like(p) for name, p in slow.items()}
    square = {name: torch.zeros_like(p) for name, p in slow.items()}
    for step in range(20):
        schedule = min((step + 1) / 5, 1 - step / 25)
        for group in optimizer.param_groups:
            group["lr"] = peak * schedule * group["lr_scale"]
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.grad = gradient
            mean[name] = beta1 * mean[name] + (1 - beta1) * gradient
            square[name] = beta2 * square[name] + (1 - beta2) * gradient**2
            adam = (mean[name] / (1 - beta1 ** (step + 1))) / (
                torch.sqrt(square[name] / (1 - beta2 ** (step + 1))) + eps
            )
            kernel = name.endswith("weight") and "norm" not in name
            multiplier = layer_decay ** (DEPTH + 1 - masked_autoencoder_layer(name))
            slow[name] = slow[name] - schedule * (
                peak * multiplier * adam + (decay if kernel else 0.0) * slow[name]
            )
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), slow[name], rtol=1e-9, atol=1e-12)


def test_published_decay_is_a_tenth_at_the_published_rate() -> None:
    """big_vision's 1e-4 at a peak of 1e-3 is 0.1 in torch."""
    groups = optimizer_groups(
        vit().named_parameters(),
        settings=settings(weight_decay=1e-4, weight_decay_mode="independent"),
        decayed=decayed,
        layers_above=above,
    )
    assert groups[0]["weight_decay"] == pytest.approx(0.1)


@pytest.mark.parametrize("betas", [(1.5, 0.999), (0.9, -1.0), (0.9, 1.0)])
def test_betas_out_of_range_are_refused(betas: tuple[float, float]) -> None:
    ((key, why),) = optim_problems(settings(betas=betas), zero_stage=1)
    assert key == "optim.betas" and "below 1" in why
