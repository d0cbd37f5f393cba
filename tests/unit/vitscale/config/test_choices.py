"""Settings groups chosen by name, alone and in lists."""

from __future__ import annotations

from collections.abc import Iterator
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


class Masking(Section):
    ratio: float = 0.75
    block: int = 1


class Mae(Section):
    name: Literal["mae"] = "mae"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    mask_ratio: float = Field(default=0.75, gt=0)
    masking: Masking = Masking()


class Knn(Section):
    name: Literal["knn"] = "knn"
    every_steps: int = Field(gt=0)
    k: int = 20


class Probe(Section):
    name: Literal["probe"] = "probe"
    every_steps: int = Field(gt=0)
    lr: float = 0.1


class Nested(Section):
    objective: Annotated[Supervised | Mae, Field(discriminator="name")] = Supervised()


class SomeRun(Run):
    stage: Literal["some"] = "some"
    seed: int = 0
    objective: Annotated[Supervised | Mae, Field(discriminator="name")] = Supervised()
    nested: Nested = Nested()
    teacher: Annotated[Supervised | Mae, Field(discriminator="name")] | None = None
    evaluate: tuple[Annotated[Knn | Probe, Field(discriminator="name")], ...] = Field(
        default=(), strict=False
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.seed == 13:
            yield ("seed", "13 is unlucky")


class RequiredRun(SomeRun):
    objective: Annotated[Supervised | Mae, Field(discriminator="name")]


class OneMemberRun(Run):
    stage: Literal["some"] = "some"
    objective: Annotated[Supervised, Field(discriminator="name")] = Supervised()
    evaluate: tuple[Annotated[Knn, Field(discriminator="name")], ...] = Field(
        default=(), strict=False
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)


def load(*overrides: str, run_type: type[Any] = SomeRun, **files: str) -> Loaded[Any]:
    write(**{"a": "stage: some\n", **files})
    return load_run(run_type, "a.yaml", overrides=overrides)


def errors(*overrides: str, run_type: type[Any] = SomeRun, **files: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        load(*overrides, run_type=run_type, **files)
    return [error.text() for error in caught.value.errors]


def test_missing_name_takes_the_default_member() -> None:
    for run_type in (SomeRun, OneMemberRun):
        run = load("objective.label_smoothing=0.1", run_type=run_type).run
        assert run.objective == Supervised(label_smoothing=0.1)
        given = run_type.model_validate({"objective": {"label_smoothing": 0.1}})
        assert given.objective == run.objective


def test_name_chooses_the_member() -> None:
    found = load("objective.name=mae", "objective.mask_ratio=0.5", "evaluate=[]")
    assert found.run.objective == Mae(mask_ratio=0.5)
    assert found.sources["objective.name"] == "command line"
    assert found.sources["objective.masking.ratio"] == "default"
    assert load("objective={name: mae, mask_ratio: 0.5}").run.objective == Mae(mask_ratio=0.5)
    text = "objective:\n  masking: {ratio: 0.5}\n  name: mae\n"
    found = load(a=text)
    assert found.run.objective == Mae(masking=Masking(ratio=0.5))
    assert found.sources["objective.name"] == "a.yaml:3"
    assert load("teacher={name: mae}").run.teacher == Mae()


def test_items_with_errors_are_still_counted() -> None:
    class NeedsOne(SomeRun):
        evaluate: tuple[Knn, ...] = Field(min_length=1, strict=False)

    with pytest.raises(UserErrors) as caught:
        load("seed=1", "evaluate=[{every_steps: 1, seed: 2}]", run_type=NeedsOne)
    (error,) = caught.value.errors
    # The run's own seed is set.
    assert error.what == "unknown key evaluate.0.seed" and error.next_step != "did you mean seed?"
    with pytest.raises(UserErrors, match="is a list of 0"):
        load("evaluate=[]", run_type=NeedsOne)


def test_items_of_a_list_are_chosen_by_name() -> None:
    text = "evaluate:\n  - {name: knn, every_steps: 100}\n  - name: probe\n    every_steps: 5\n"
    found = load(a=text)
    assert found.run.evaluate == (Knn(every_steps=100), Probe(every_steps=5))
    assert found.sources["evaluate"] == "a.yaml:1"
    item = "evaluate=[{name: knn, every_steps: 100}]"
    for run_type in (SomeRun, OneMemberRun):
        assert load(item, run_type=run_type).run.evaluate == (Knn(every_steps=100),)


@pytest.mark.parametrize("run_type", [SomeRun, OneMemberRun])
def test_resolved_choices_are_read_back(run_type: type[Any]) -> None:
    overrides = ["objective.loss=sigmoid", "evaluate=[{name: knn, every_steps: 100}]"]
    run = load(*overrides, run_type=run_type).run
    write(resolved=run_to_yaml(run))
    assert "name: supervised" in run_to_yaml(run)
    assert load_run_file(run_type, "resolved.yaml") == run


# (files and overrides, the whole message)
MESSAGES = [
    (
        "objective.label_smooting=1",
        "command line: objective.label_smooting: unknown key objective.label_smooting\n"
        "  allowed: name, loss, label_smoothing\n"
        "  next: did you mean objective.label_smoothing?",
    ),
    (
        "objective.mask_ratio=0.5",
        "command line: objective.mask_ratio: unknown key objective.mask_ratio\n"
        "  allowed: name, loss, label_smoothing\n"
        "  next: remove it; it belongs to objective.name=mae",
    ),
    (
        "objective={name: mae, maskratio: 1}",
        "command line: objective.maskratio: unknown key objective.maskratio\n"
        "  allowed: name, loss, mask_ratio, masking\n  next: did you mean objective.mask_ratio?",
    ),
    (
        "objective={name: mae, masking: {rate: 1}}",
        "command line: objective.masking.rate: unknown key objective.masking.rate\n"
        "  allowed: ratio, block\n  next: did you mean objective.masking.ratio?",
    ),
    (
        "objective.name=maee",
        "command line: objective.name: 'maee' is not allowed\n"
        "  allowed: supervised, mae\n  next: did you mean mae?",
    ),
    (
        "objective.name=3",
        "command line: objective.name: 3 is not allowed\n  allowed: supervised, mae",
    ),
    (
        "objective=3",
        "command line: objective: 3 was read as a whole number\n"
        "  allowed: a group with the key name: supervised, mae",
    ),
    (
        "teacher=mae",
        "command line: teacher: 'mae' was read as text\n"
        "  allowed: a group with the key name: supervised, mae, or null",
    ),
    (
        "teacher.loss=softmax",
        "command line: teacher.name: teacher.name is missing\n  allowed: supervised, mae",
    ),
    (
        "objective={name: mae, mask_ratio: 0}",
        "command line: objective.mask_ratio: 0 is not allowed\n  allowed: a number above 0",
    ),
    (
        "evaluate=[{every_steps: 1}]",
        "command line: evaluate.0.name: evaluate.0.name is missing\n  allowed: knn, probe",
    ),
    (
        "evaluate=[{name: probe}]",
        "command line: evaluate.0.every_steps: evaluate.0.every_steps is missing\n"
        "  allowed: a whole number above 0",
    ),
    (
        "evaluate=[{name: knn, every_steps: 1}, {name: prob}]",
        "command line: evaluate.1.name: 'prob' is not allowed\n"
        "  allowed: knn, probe\n  next: did you mean probe?",
    ),
    (
        "evaluate=[{name: knn, every_step: 1, every_steps: 0}]",
        "command line: evaluate.0.every_steps: 0 is not allowed\n  allowed: a whole number above 0",
    ),
    (
        "evaluate=[{name: knn, every_steps: 1, every_step: 1}]",
        "command line: evaluate.0.every_step: unknown key evaluate.0.every_step\n"
        "  allowed: name, every_steps, k\n  next: did you mean evaluate.0.every_steps?",
    ),
    (
        "evaluate={name: knn}",
        "command line: evaluate: {'name': 'knn'} was read as a group of keys\n"
        "  allowed: a list, each item a group with the key name: knn, probe",
    ),
]


@pytest.mark.parametrize(("override", "message"), MESSAGES, ids=[row[0] for row in MESSAGES])
def test_message(override: str, message: str) -> None:
    assert message in errors(override)


def test_choice_of_one_member_reports_like_one_of_several() -> None:
    for override, message in MESSAGES:
        if any(word in override + message for word in ("mae", "prob", "mask")):
            continue
        assert message in errors(override, run_type=OneMemberRun)
    (found,) = errors("objective.name=mae", run_type=OneMemberRun)
    assert found.startswith("command line: objective.name: 'mae' is not allowed\n  allowed: super")


def test_errors_name_the_line_in_the_file() -> None:
    text = "seed: 13\nobjective:\n  name: maee\nteacher:\n  name: mae\n  ratio: 1\n"
    text += "evaluate:\n  - name: knn\n    every_steps: x\n  - name: knn\n    every_steps: 3\n"
    found = [error.splitlines()[0] for error in errors(a=text)]
    assert found == [
        "a.yaml:1: seed: 13 is unlucky",
        "a.yaml:3: objective.name: 'maee' is not allowed",
        "a.yaml:6: teacher.ratio: unknown key teacher.ratio",
        "a.yaml:9: evaluate.0.every_steps: 'x' was read as text",
    ]


BASE = "stage: some\nobjective:\n  loss: sigmoid\n  label_smoothing: 0.1\n"


def test_child_of_another_name_drops_inherited_keys() -> None:
    child = "base: b.yaml\nobjective: {name: mae, mask_ratio: 0.5}\n"
    found = load(a=child, b=BASE)
    assert found.run.objective == Mae(loss="sigmoid", mask_ratio=0.5)
    assert found.sources["objective.loss"] == "b.yaml:3"
    # Also two files up, also back to the first name: what was dropped stays dropped.
    grandchild = "base: c.yaml\nobjective: {name: supervised}\n"
    assert load(a=grandchild, c=child, b=BASE).run.objective == Supervised(loss="sigmoid")
    assert load("objective.name=mae", a="base: b.yaml\n", b=BASE).run.objective == Mae(
        loss="sigmoid"
    )


def test_child_of_the_same_name_inherits_all_keys() -> None:
    child = "base: b.yaml\nobjective: {name: supervised, loss: softmax}\n"
    assert load(a=child, b=BASE).run.objective == Supervised(label_smoothing=0.1)


def test_child_without_a_name_inherits_it() -> None:
    base = "stage: some\nobjective: {name: mae, mask_ratio: 0.5}\n"
    child = "base: b.yaml\nobjective: {loss: sigmoid}\n"
    assert load(a=child, b=base).run.objective == Mae(loss="sigmoid", mask_ratio=0.5)


def test_choice_inside_a_group_drops_inherited_keys() -> None:
    base = "stage: some\nnested: {objective: {label_smoothing: 0.1}}\n"
    child = "base: b.yaml\nnested: {objective: {name: mae}}\n"
    assert load(a=child, b=base).run.nested.objective == Mae()


def test_conflicts_are_found_beside_a_missing_choice() -> None:
    assert errors("seed=13", run_type=RequiredRun) == [
        "a.yaml: objective: objective is missing\n"
        "  allowed: a group with the key name: supervised, mae",
        "command line: seed: 13 is unlucky",
    ]


def test_keys_of_another_member_in_the_file_itself_are_reported() -> None:
    (found,) = errors("objective.name=mae", a=BASE)
    assert found == (
        "a.yaml:4: objective.label_smoothing: unknown key objective.label_smoothing\n"
        "  allowed: name, loss, mask_ratio, masking\n"
        "  next: remove it; it belongs to objective.name=supervised"
    )
    child = "base: b.yaml\nobjective: {name: mae, label_smoothing: 0.2}\n"
    (found,) = errors(a=child, b=BASE)
    assert found.startswith("a.yaml:2: objective.label_smoothing: unknown key")


def test_keys_that_no_member_knows_are_reported_from_a_base() -> None:
    (found,) = errors("objective.name=mae", a="base: b.yaml\n", b=BASE + "  smoothing: 0.1\n")
    assert found.startswith("b.yaml:5: objective.smoothing: unknown key objective.smoothing")
