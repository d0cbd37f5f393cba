"""The registry of objectives, and what a run checks of its data for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretrain.objectives.registry import OBJECTIVES
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.models.settings import architecture
from vitscale.training.objective import Objective, check_objective
from vitscale.training.session import _build_model
from vitscale.training.supervised import Supervised, SupervisedSettings


class Contrastive(Objective):
    Settings = SupervisedSettings
    needs_labels, num_views = False, 2


def test_every_objective_is_named_by_its_settings() -> None:
    for name, objective in OBJECTIVES.items():
        assert objective.Settings.model_fields["name"].default == name


def test_an_objective_that_needs_labels_refuses_shards_without() -> None:
    with pytest.raises(UserError, match="supervised needs labels, but the shards of /s have none"):
        check_objective(Supervised(SupervisedSettings()), num_classes=0, views=1, path="/s")
    check_objective(Contrastive(SupervisedSettings()), num_classes=0, views=2, path="/s")


def test_an_objective_gets_as_many_views_as_it_needs() -> None:
    with pytest.raises(UserError, match="data.views: supervised needs 2 views of each sample"):
        check_objective(Contrastive(SupervisedSettings()), num_classes=3, views=3, path="/s")
    check_objective(Contrastive(SupervisedSettings()), num_classes=3, views=4, path="/s")


class Decoder(Objective):
    """Adds a layer with random weights."""

    Settings = SupervisedSettings

    def extend_model(self, model: Any, arch: Any) -> None:
        model.decoder = torch.nn.Linear(arch.width, 3)


def test_what_an_objective_adds_depends_on_the_seed_alone() -> None:
    weights = []
    for seed, draws in ((0, 0), (0, 5), (1, 0)):
        values = {
            "name": "x",
            "seed": seed,
            "data": {"path": "s", "global_batch": 8},
            "model": {"width": 16, "depth": 1, "num_heads": 2, "mlp_width": 16, "patch_size": 8}
            | {"image_size": 16},
            "optim": {"lr": 1e-3},
            "schedule": {"steps": 10},
        }
        run = PretrainRun.model_validate(values)
        torch.rand(draws)
        arch = architecture(run.model, num_classes=2)
        model: Any = _build_model(run, Decoder(SupervisedSettings()), arch)
        weights.append(model.decoder.weight.tolist())
    assert weights[0] == weights[1] != weights[2]
