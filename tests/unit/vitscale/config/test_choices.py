"""Groups chosen by name, alone and in lists, and what a file inherits of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from vitscale.config.errors import UserErrors
from vitscale.config.loader import Loaded, load_run, load_run_file, run_to_yaml
from vitscale.config.section import Run, Section


class Supervised(Section):
    name: Literal["supervised"] = "supervised"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)


class Mae(Section):
    name: Literal["mae"] = "mae"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    mask_ratio: float = Field(default=0.75, gt=0)


class Knn(Section):
    name: Literal["knn"] = "knn"
    every_steps: int = Field(gt=0)


class Probe(Section):
    name: Literal["probe"] = "probe"
    every_steps: int = Field(gt=0)


class Nested(Section):
    objective: Annotated[Supervised | Mae, Field(discriminator="name")] = Supervised()


class SomeRun(Run):
    stage: Literal["some"] = "some"
    objective: Annotated[Supervised | Mae, Field(discriminator="name")] = Supervised()
    nested: Nested = Nested()
    evaluate: tuple[Annotated[Knn | Probe, Field(discriminator="name")], ...] = Field(
        default=(), strict=False
    )


class OneMemberRun(Run):
    stage: Literal["some"] = "some"
    objective: Annotated[Supervised, Field(discriminator="name")] = Supervised()


def load(*overrides: str, run_type: type[Any] = SomeRun, **files: str) -> Loaded[Any]:
    for name, text in {"a": "stage: some\n", **files}.items():
        Path(f"{name}.yaml").write_text(text)
    return load_run(run_type, "a.yaml", overrides=overrides)


pytestmark = pytest.mark.usefixtures("here")
BASE = "stage: some\nobjective:\n  loss: sigmoid\n  label_smoothing: 0.1\n"


def test_items_of_a_list_are_chosen_by_name() -> None:
    text = "evaluate:\n  - {name: knn, every_steps: 100}\n  - name: probe\n    every_steps: 5\n"
    found = load(a=text)
    assert found.run.evaluate == (Knn(every_steps=100), Probe(every_steps=5))
    assert found.sources["evaluate"] == "a.yaml:1"


@pytest.mark.parametrize("run_type", [SomeRun, OneMemberRun])
def test_missing_name_takes_the_default_and_is_written(run_type: type[Any]) -> None:
    run = load("objective.loss=sigmoid", run_type=run_type).run
    assert run.objective == Supervised(loss="sigmoid")
    Path("resolved.yaml").write_text(run_to_yaml(run))
    assert "name: supervised" in run_to_yaml(run)
    assert load_run_file(run_type, "resolved.yaml") == run
    with pytest.raises(UserErrors, match="'other' is not allowed\n  allowed: supervised"):
        load("objective.name=other", run_type=run_type)


def test_another_name_inherits_only_the_keys_of_the_new_group() -> None:
    child = "base: b.yaml\nobjective: {name: mae, mask_ratio: 0.5}\n"
    found = load(a=child, b=BASE)
    assert found.run.objective == Mae(loss="sigmoid", mask_ratio=0.5)
    assert found.sources["objective.loss"] == "b.yaml:3"
    # Also two files up, also back to the first name: what was dropped stays dropped.
    grandchild = "base: c.yaml\nobjective: {name: supervised}\n"
    assert load(a=grandchild, c=child, b=BASE).run.objective == Supervised(loss="sigmoid")
    assert load("objective.name=mae", a=BASE).run.objective == Mae(loss="sigmoid")
    base = "stage: some\nnested: {objective: {label_smoothing: 0.1}}\n"
    child = "base: b.yaml\nnested: {objective: {name: mae}}\n"
    assert load(a=child, b=base).run.nested.objective == Mae()


def test_the_same_or_no_name_inherits_all_keys() -> None:
    child = "base: b.yaml\nobjective: {name: supervised, loss: softmax}\n"
    assert load(a=child, b=BASE).run.objective == Supervised(label_smoothing=0.1)
    base = "stage: some\nobjective: {name: mae, mask_ratio: 0.5}\n"
    child = "base: b.yaml\nobjective: {loss: sigmoid}\n"
    assert load(a=child, b=base).run.objective == Mae(loss="sigmoid", mask_ratio=0.5)


def test_a_key_missing_in_a_replaced_list_is_placed_in_the_new_list() -> None:
    base = "stage: some\nevaluate:\n  - name: knn\n    every_steps: 1\n"
    with pytest.raises(UserErrors, match=r"^a\.yaml:3: evaluate\.0\.every_steps: "):
        load(a="base: b.yaml\nevaluate:\n  - {name: knn}\n", b=base)
