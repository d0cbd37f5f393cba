"""The registry of objectives, and what a run checks of its data for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretrain.objectives.registry import OBJECTIVES
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.training.build import build_model
from vitscale.training.objective import Objective, check_evaluations, check_objective
from vitscale.training.supervised import Supervised, SupervisedSettings

RUN: dict[str, Any] = {
    "name": "x",
    "data": {"path": "s", "global_batch": 8},
    "model": {"width": 16, "depth": 1, "num_heads": 2, "mlp_width": 16, "patch_size": 8}
    | {"image_size": 16},
    "optim": {"lr": 1e-3},
    "schedule": {"steps": 10},
}


class Contrastive(Objective):
    Settings = SupervisedSettings
    needs_labels, num_views = False, 2


CONTRASTIVE = Contrastive(SupervisedSettings(), seed=0)


def test_every_objective_is_named_by_its_settings() -> None:
    for name, objective in OBJECTIVES.items():
        assert objective.Settings.model_fields["name"].default == name


def test_an_objective_that_needs_labels_refuses_shards_without() -> None:
    with pytest.raises(UserError, match="supervised needs labels, but the shards of /s have none"):
        check_objective(Supervised(SupervisedSettings(), seed=0), num_classes=0, views=1, path="/s")
    check_objective(CONTRASTIVE, num_classes=0, views=2, path="/s")


def test_evaluations_refuse_a_split_without_labels() -> None:
    masked = {"objective": {"name": "masked_patch_prediction"}}
    run = PretrainRun.model_validate({**RUN, **masked, "evaluate": [{"name": "knn"}]})
    with pytest.raises(UserError, match="evaluate: knn needs labels, but the shards of s have"):
        check_evaluations(run.make_objective(), run, num_classes=0)
    check_evaluations(run.make_objective(), run, num_classes=1)
    for changes in ({"evaluate": ()}, {"data": run.data.model_copy(update={"val_split": None})}):
        changed = run.model_copy(update=changes)
        check_evaluations(changed.make_objective(), changed, num_classes=0)


def test_an_objective_gets_as_many_views_as_it_needs() -> None:
    with pytest.raises(UserError, match="data.views: supervised needs 2 views of each sample"):
        check_objective(CONTRASTIVE, num_classes=3, views=3, path="/s")
    check_objective(CONTRASTIVE, num_classes=3, views=4, path="/s")


class Decoder(Objective):
    """Adds a layer with random weights."""

    Settings = SupervisedSettings

    def extend_model(self, model: Any, arch: Any) -> None:
        model.objective = torch.nn.Linear(arch.width, 3)


def test_what_an_objective_adds_depends_on_the_seed_alone() -> None:
    weights = []
    for seed, draws in ((0, 0), (0, 5), (1, 0)):
        values = RUN | {"seed": seed}
        run = PretrainRun.model_validate(values)
        torch.rand(draws)
        arch = run.model.resolved(num_classes=2)
        model: Any = build_model(run, Decoder(SupervisedSettings(), seed=0), arch)
        weights.append(model.objective.weight.tolist())
    assert weights[0] == weights[1] != weights[2]


class Headless(Objective):
    Settings = SupervisedSettings
    trains_classifier = False


def test_an_objective_without_a_classifier_refuses_logits() -> None:
    headless = Headless(SupervisedSettings(), seed=0)
    values = RUN | {"evaluate": [{"name": "classification"}, {"name": "knn"}]}
    values["model"] = RUN["model"] | {"num_classes": 3}
    found = dict(headless.problems(PretrainRun.model_validate(values)))
    assert set(found) == {"model.num_classes", "evaluate"}
    assert "classification needs a classifier" in found["evaluate"]
    plain = PretrainRun.model_validate(RUN)
    assert not list(headless.problems(plain)) and headless.evaluations(plain) == ()
    assert [each.name for each in plain.make_objective().evaluations(plain)] == ["classification"]
