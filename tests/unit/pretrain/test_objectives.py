"""The registry of objectives, and what a run checks of its data for them."""

from __future__ import annotations

import pytest

from pretrain.objectives.registry import OBJECTIVES
from vitscale.config.errors import UserError
from vitscale.training.objective import Objective, check_objective
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
