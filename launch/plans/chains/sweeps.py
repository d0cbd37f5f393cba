"""Make a study of one run file and several values of its keys.

    python launch/local.py --config configs/demo/finetune.yaml optim.lr=[0.003,0.03] seed=[0,1]

Owns: which overrides of a command line are sweeps, and the study that they stand for.
Leaves out: the grid and its states (`launch.studies`).
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from finetune.run import FinetuneRun
from launch.jobs.preparation import RUN_TYPES
from launch.plans.command import SWITCHES, PlanCommand, parse_counts
from launch.plans.stages import load_study
from launch.studies.grid import RUN_TYPES as TRAINING_TYPES
from launch.studies.settings import Axis, AxisValue, StageChange, StudyRun
from pretrain.run import PretrainRun
from vitscale.config.command_line import load_command
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.inheritance import merge, read_layers
from vitscale.config.loader import load_run, yaml_flow
from vitscale.config.schema import locate
from vitscale.config.section import Run
from vitscale.config.yaml_source import parse_value, plain_value

Values = Mapping[str, Sequence[Any]]
"""Key -> its values."""
# Overrides that become settings of the study.
STUDY_KEYS = ("name", "output", "seed", "init", "tracking.experiment")


def names_a_sweep(argv: Sequence[str]) -> bool:
    """Whether an override of a training gives a scalar key a list of values."""
    return bool(_split(argv)[0])


def sweep_command(argv: Sequence[str], *, script: str, counts: Sequence[str]) -> PlanCommand:
    values, others = _split(argv)
    numbers, others = parse_counts(others, counts)
    # Checks everything but the values that are swept.
    command = load_command(
        TRAINING_TYPES,
        script=script,
        description="Train a grid of runs.",
        argv=[*others, *_first(values)],
        switches=SWITCHES,
    )
    assert command.config_path is not None
    assert isinstance(command.run, PretrainRun | FinetuneRun)
    overrides = [word for word in others if "=" in word and not word.startswith("-")]
    study = sweep_study(
        command.config_path, overrides, values, name=command.run.name, output=command.run.folder
    )
    is_dry_run = "--dry-run" in command.switches
    return PlanCommand(load=partial(load_study, study), is_dry_run=is_dry_run, **numbers)


def _split(argv: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """(key -> values of the sweeps, the other words)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", const="", default="")
    file = parser.parse_known_args(argv)[0].config
    known = _content(file, argv) if file and any("=[" in word for word in argv) else {}
    run_type = TRAINING_TYPES.get(str(known.get("stage")))
    if run_type is None:
        return {}, list(argv)
    values: dict[str, list[Any]] = {}
    others = []
    for word in argv:
        key, _, text = word.partition("=")
        found = None if word.startswith("-") else _sweep(run_type, key.strip(), text, known)
        if found:
            values[key.strip()] = found
        else:
            others.append(word)
    return values, others


def _sweep(run_type: type[Run], key: str, text: str, known: Any) -> list[Any] | None:
    """The values of a sweep; None where the text is one value of the key."""
    if not text.strip().startswith("["):
        return None
    errors: list[UserError] = []
    value = plain_value(parse_value(text, place="", where=key, errors=errors))
    info = locate(run_type, tuple(key.split(".")), known).info
    if errors or info is None or not isinstance(value, list):
        return None
    if _is_scalar(info.annotation):
        return value
    # A list for each value of a key that takes a list.
    is_nested = bool(value) and all(isinstance(item, list) for item in value)
    return value if is_nested and _is_flat_list(info.annotation) else None


def _members(annotation: Any) -> Iterator[Any]:
    """The types that a value can have, without null."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif annotation is not types.NoneType:
        yield annotation


def _is_scalar(annotation: Any) -> bool:
    return all(
        member in (int, float, str, bool) or get_origin(member) is Literal
        for member in _members(annotation)
    )


def _is_flat_list(annotation: Any) -> bool:
    members = list(_members(annotation))
    items = [
        item
        for member in members
        if get_origin(member) is tuple
        for item in get_args(member)
        if item is not Ellipsis
    ]
    groups = [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]
    return bool(items) and not groups and all(map(_is_scalar, items))


def _content(file: str, words: Sequence[str]) -> dict[str, Any]:
    """The values of a run file with its bases and overrides; empty where it cannot be read."""
    layers = read_layers(file, chain=(), errors=[])
    if not layers:
        return {}
    content: dict[str, Any] = plain_value(reduce(merge, layers))
    for word in words:
        # A name chooses a group, and thereby the keys that there are.
        key, _, value = word.partition("=")
        group, _, last = key.partition(".")
        if last == "name" and not value.startswith("["):
            content[group] = {**(content.get(group) or {}), "name": value}
    return content


def stage_of(file: str) -> str:
    """The `stage` of a run file. Raises UserErrors for a file that cannot be launched."""
    errors: list[UserError] = []
    layers = read_layers(file, chain=(), errors=errors)
    if errors or not layers:
        raise UserErrors(errors)
    stage = plain_value(reduce(merge, layers)).get("stage")
    if stage not in RUN_TYPES:
        what = "stage is missing" if stage is None else f"stage {stage!r} cannot be launched"
        raise UserError(what, where=file, allowed=", ".join(RUN_TYPES))
    return str(stage)


# ---- the study --------------------------------------------------------------------------------


def sweep_study(
    file: str, overrides: Sequence[str], values: Values, *, name: str, output: str
) -> StudyRun:
    """The study whose axes are the keys of `values`. Raises UserErrors.

    `seed` becomes the seeds of the study; labels of the values are such as `lr=0.003`.
    """
    axes = [
        Axis(name=key, values=tuple(axis_value(key, value) for value in each))
        for key, each in values.items()
        if key != "seed"
    ]
    return study_of(file, overrides, axes, seeds=values.get("seed"), name=name, output=output)


def axis_value(key: str, value: Any, *, label: str | None = None) -> AxisValue:
    shown = value if isinstance(value, str) else yaml_flow(value)
    label = label or f"{key.rpartition('.')[2]}={shown}"
    if key == "init" and value is not None:
        return AxisValue(label=label, init=str(value))
    return AxisValue(label=label, overrides=(f"{key}={yaml_flow(value)}",))


def study_of(
    file: str,
    overrides: Sequence[str],
    axes: Sequence[Axis],
    *,
    seeds: Sequence[Any] | None,
    name: str,
    output: str,
) -> StudyRun:
    """A study of one stage."""
    first = [*(_overrides_of(axis.values[0]) for axis in axes)]
    given = [*overrides, *(text for texts in first for text in texts)]
    run = load_run(TRAINING_TYPES, file, overrides=given).run
    assert isinstance(run, PretrainRun | FinetuneRun)
    init = getattr(run, "init", None)
    if run.stage == "finetune" and init is None:
        # Otherwise a study pre-trains what its transfers start from.
        axes = [_from_scratch(axis) for axis in axes] or [_from_scratch(NO_AXIS)]
    kept = tuple(text for text in overrides if text.partition("=")[0].strip() not in STUDY_KEYS)
    change = StageChange(file=file, overrides=kept)
    is_pretraining = run.stage == "pretrain"
    study = StudyRun(
        name=name,
        output=output,
        experiment=run.tracking.experiment,
        pretrain=change if is_pretraining else StageChange(),
        finetune=None if is_pretraining else change,
        init=init,
        axes=tuple(axes) or (NO_AXIS,),
        seeds=tuple(seeds) if seeds is not None else (run.seed,),
    )
    problems = [UserError(text, where=key) for key, text in study.problems()]
    if problems:
        raise UserErrors(problems)
    return study


# A study has an axis, even if its runs differ in their seeds alone.
NO_AXIS = Axis(name="run", values=(AxisValue(label="run"),))


def _overrides_of(value: AxisValue) -> tuple[str, ...]:
    return value.overrides if value.init is None else (f"init={yaml_flow(value.init)}",)


def _from_scratch(axis: Axis) -> Axis:
    values = tuple(value.model_copy(update={"from_scratch": True}) for value in axis.values)
    return axis.model_copy(update={"values": values})


def _first(values: Values) -> list[str]:
    return [f"{key}={yaml_flow(each[0])}" for key, each in values.items()]
