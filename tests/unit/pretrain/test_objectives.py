"""The objectives: draws by position, any micro-batches, exact costs, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.objectives.mae import MaeSettings
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.data.loader import Batch
from vitscale.models.settings import ViTSettings
from vitscale.training.build import build_model
from vitscale.training.objective import Objective, check_objective
from vitscale.training.supervised import Supervised, SupervisedSettings

MAE = {"name": "mae", "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}
MASKED = {"name": "masked_patch_prediction"}
MODEL = {"width": 16, "depth": 1, "num_heads": 2, "mlp_width": 24, "patch_size": 4}
MODEL |= {"image_size": 16}
RUN: dict[str, Any] = {
    "name": "x",
    "data": {"path": "s", "global_batch": 8},
    "model": MODEL,
    "optim": {"lr": 1e-3},
    "schedule": {"steps": 10},
}
MASKING = pytest.mark.parametrize("section", [MAE, MASKED], ids=["mae", "masked patches"])


class PlainEngine:
    """The forward pass of an engine, without DeepSpeed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def normalized(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() / 255 - 0.5) / 0.5

    def forward(self, images: torch.Tensor, output: str, **inputs: Any) -> Any:
        return self.model(self.normalized(images), output=output, **inputs)


def opened(section: dict[str, Any], *, seed: int = 0) -> tuple[Any, Any]:
    run = PretrainRun.model_validate(RUN | {"objective": section, "seed": seed})
    objective = run.make_objective()
    model = build_model(run, objective, run.model.resolved(num_classes=0))
    for parameter in model.objective.parameters():  # a head of zeros gives the trunk no gradients
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
    return objective, PlainEngine(model)


def batch_of(positions: np.ndarray) -> Batch:
    """Images that are functions of their positions."""
    images = [
        torch.randint(0, 256, (3, 16, 16), generator=torch.Generator().manual_seed(int(p))).byte()
        for p in positions
    ]
    nothing = torch.zeros(len(positions))
    return Batch(torch.stack(images), nothing.long(), nothing, positions=positions)


@MASKING
def test_loss_and_gradients_ignore_the_micro_batch(section: dict[str, Any]) -> None:
    found = []
    for parts in (1, 2, 8):
        objective, engine = opened(section)
        total = 0.0
        for positions in np.split(np.arange(16, 24), parts):
            loss = objective.loss(engine, batch_of(positions)) / parts
            loss.backward()
            total += loss.item()
        found.append((total, [p.grad for p in engine.model.parameters()]))
    for loss_of_parts, gradients in found[1:]:
        assert loss_of_parts == pytest.approx(found[0][0], rel=1e-5)
        for own, whole in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(own, whole, rtol=1e-3, atol=1e-6)


@MASKING
def test_masks_are_functions_of_seed_and_position(section: dict[str, Any]) -> None:
    """Also: every patch is removed equally often; 5 sigma of 1,600 images are 0.063."""

    def masked(*, first: int = 0, count: int = 8, seed: int = 0) -> torch.Tensor:
        objective, engine = opened(section, seed=seed)
        positions = np.arange(first, first + count)
        if section is MASKED:
            return objective.corruption(positions, torch.device("cpu"))["predicted_BK"]
        with torch.no_grad():
            images = torch.zeros(count, 3, 16, 16, dtype=torch.uint8)
            return objective.reconstruct(engine, images, positions=positions)[2]

    first = masked()
    assert first.shape == (8, 12 if section is MAE else 8)
    assert torch.equal(first[4:], masked(first=4)[:4])
    others = [masked(first=8), masked(seed=1)]
    assert not any(torch.equal(first, other) for other in others)
    many = masked(count=1600)
    often = torch.bincount(many.flatten(), minlength=16) / 1600
    assert (often - many.shape[1] / 16).abs().max() < 0.063


@MASKING
def test_costs_are_those_of_the_module(section: dict[str, Any]) -> None:
    objective, engine = opened(section)
    arch: Any = ViTSettings(**MODEL).resolved(num_classes=0)
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    assert objective.num_parameters(arch) == sum(p.numel() for p in trained)
    plain = Supervised(SupervisedSettings(), seed=0)
    kept, model = (
        each.activation_bytes_per_image(arch, precision="bf16", activation_checkpointing=False)
        for each in (objective, plain)
    )
    flops = objective.train_flops_per_image(arch) - plain.train_flops_per_image(arch)
    if section is MASKED:  # a head on 8 of the 16 patches
        assert flops == 6 * 8 * 16 * 512
        assert kept - model == 8 * (2 * (16 + 512) + 8 * 512)
    else:
        assert kept == 5 * (18 * 16 + 4 * 24) + 17 * (18 * 8 + 4 * 32)


@pytest.mark.parametrize(
    "preset, encoder, decoder, ratio",
    [
        ("B/16", 85_647_360, 26_008_320, 0.557),
        ("L/16", 303_099_904, 26_139_392, 0.337),
        ("H/14", 630_435_840, 26_178_124, 0.290),
    ],
)
def test_costs_are_those_of_the_published_models(
    preset: str, encoder: int, decoder: int, ratio: float
) -> None:
    run = PretrainRun.model_validate(
        RUN
        | {"model": {"preset": preset, "positions": "sincos2d_mae"}, "objective": {"name": "mae"}}
    )
    mae, plain = run.make_objective(), Supervised(SupervisedSettings(), seed=0)
    arch = run.model.resolved(num_classes=0)
    assert plain.num_parameters(arch) == encoder
    assert mae.num_parameters(arch) == encoder + decoder
    found = mae.train_flops_per_image(arch) / plain.train_flops_per_image(arch)
    assert found == pytest.approx(ratio, abs=6e-4)
    # Rounded down: 1 - 0.8 is below 0.2.
    fifth = MaeSettings(mask_ratio=0.8)
    assert (mae.settings.num_kept(196), fifth.num_kept(100)) == (49, 19)
    masked = PretrainRun.model_validate(RUN | {"objective": MASKED}).make_objective()
    arch = ViTSettings(preset="B/16").resolved(num_classes=0)
    # Without its head, the mask embedding and 768 x 512 + 512.
    assert masked.num_parameters(arch) == 86_567_656 - 769_000 + 768 + 393_728


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (MAE, {"model": {"pool": "gap"}}, "model.pool"),
    (MAE, {"model": {"num_registers": 2}}, "model.num_registers"),
    (MAE, {"model": {"pool": "gap", "class_token": True, "pool_norm": True}}, "model.pool_norm"),
    (MAE, {"data": {"mixing": {"mixup_alpha": 0.2}}}, "data.mixing"),
    (MAE, {"objective": {"mask_ratio": 0.95}}, "objective.mask_ratio"),
    (MAE, {"objective": {"decoder_heads": 3}}, "objective.decoder_heads"),
    (MAE, {"objective": {"decoder_width": 6}}, "objective.decoder_width"),
    (MAE, {"model": {"representation_layer": True}}, "model.representation_layer"),
    (MAE, {"model": {"num_classes": 3}}, "model.num_classes: mae trains no classifier"),
    (MAE, {"evaluate": [{"name": "classification"}]}, "evaluate: classification needs a"),
    (MASKED, {"data": {"mixing": {"mixup_alpha": 0.2}}}, "data.mixing: .* set data.mixing=null"),
    (MASKED, {"objective": {"mask_share": 0.95}}, "mask_share: 0.95 and swap_share 0.1 exceed"),
    (MASKED, {"objective": {"corrupted_share": 0.02}}, "corrupted_share: 0.02 of 16 patches is no"),
    (
        MASKED,
        {"model": {"patch_size": 16}, "objective": {"corrupted_share": 1.0}},
        "objective.swap_share: an image of one patch has no other",
    ),
    (MASKED, {"model": {"patch_size": 25}}, "model.image_size"),
]


@pytest.mark.parametrize("section, changes, pattern", CONFLICTS, ids=lambda value: str(value)[-40:])
def test_conflicts_are_named_before_the_start(
    section: dict[str, Any], changes: dict[str, Any], pattern: str
) -> None:
    values = RUN | {"objective": section}
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    found = [": ".join(problem) for problem in PretrainRun.model_validate(values).problems()]
    assert len(found) == 1 and re.search(pattern, found[0]), found


# ---- the interface ----------------------------------------------------------------------------


class Contrastive(Objective):
    Settings = SupervisedSettings
    needs_labels, num_views = False, 2

    def extend_model(self, model: Any, arch: Any) -> None:
        model.objective = torch.nn.Linear(arch.width, 3)


CONTRASTIVE = Contrastive(SupervisedSettings(), seed=0)


def test_shards_that_do_not_serve_the_objective_are_refused() -> None:
    supervised = Supervised(SupervisedSettings(), seed=0)
    run = PretrainRun.model_validate(RUN | {"objective": MASKED, "evaluate": [{"name": "knn"}]})
    with pytest.raises(UserError, match="supervised needs labels, but the shards of s have none"):
        check_objective(supervised, run, num_classes=0)
    with pytest.raises(UserError, match="data.views: supervised needs 2 views of each sample"):
        check_objective(CONTRASTIVE, run, num_classes=3)
    with pytest.raises(UserError, match="evaluate: knn needs labels, but the shards of s have"):
        check_objective(run.make_objective(), run, num_classes=0)
    check_objective(run.make_objective(), run, num_classes=1)
    four = run.data.model_copy(update={"views": 4, "val_split": None})
    for changes in ({"evaluate": ()}, {"data": four}):
        changed = run.model_copy(update=changes)
        check_objective(changed.make_objective(), changed, num_classes=0)
    check_objective(CONTRASTIVE, changed, num_classes=0)


def test_what_an_objective_adds_depends_on_the_seed_alone() -> None:
    weights = []
    for seed, draws in ((0, 0), (0, 5), (1, 0)):
        run = PretrainRun.model_validate(RUN | {"seed": seed})
        torch.rand(draws)
        model: Any = build_model(run, CONTRASTIVE, run.model.resolved(num_classes=2))
        weights.append(model.objective.weight.tolist())
    assert weights[0] == weights[1] != weights[2]
