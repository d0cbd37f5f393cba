"""Read a sweep from the command line: a list for a key that takes one value.

    python launch/local.py --config configs/demo/finetune.yaml optim.lr=[0.003,0.03] seed=[0,1]

Owns: which overrides are sweeps, and the chain of one stage that they stand for.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from finetune.run import FinetuneRun
from launch.chains.settings import ChainRun, ChainStage
from pretrain.run import PretrainRun
from vitscale.config.command_line import Command, load_command
from vitscale.config.errors import UserErrors
from vitscale.config.fields import locate
from vitscale.config.loader import read_values
from vitscale.config.section import Run
from vitscale.config.source import read_yaml, yaml_flow

TRAININGS: dict[str, type[Run]] = {"pretrain": PretrainRun, "finetune": FinetuneRun}


def sweep_command(
    argv: Sequence[str], *, script: str, switches: Mapping[str, str]
) -> Command[Run] | None:
    """The command with a chain as its run; None if no override is a sweep.

    Raises UserErrors for all but the values that are swept, which `load_chain` validates.
    """
    values, others = _split(argv)
    if not values:
        return None
    first = [f"{key}={yaml_flow(each[0])}" for key, each in values.items()]
    command = load_command(
        TRAININGS,
        script=script,
        description="Train a grid of runs.",
        argv=[*others, *first],
        switches=switches,
    )
    run = command.run
    assert isinstance(run, PretrainRun | FinetuneRun) and command.config_path is not None
    overrides = [word for word in others if "=" in word and not word.startswith("-")]
    stage = ChainStage(
        name=run.stage,
        config=command.config_path,
        overrides=tuple(w for w in overrides if w.partition("=")[0] not in ("name", "output")),
        sweep={key: tuple(each) for key, each in values.items()},
    )
    chain = ChainRun(name=run.name, output=run.folder, stages=(stage,))
    return replace(command, run=chain)


def _split(argv: Sequence[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """(key -> values of the sweeps, the other words)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", const="", default="")
    file = parser.parse_known_args(argv)[0].config
    known = _content(file, argv) if file and any("=[" in word for word in argv) else {}
    run_type = TRAININGS.get(str(known.get("stage")))
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
    try:
        value = read_yaml(text, name=key)
    except UserErrors:
        return None
    info = locate(run_type, tuple(key.split(".")), known)[1]
    if info is None or not isinstance(value, list):
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
    try:
        content = read_values(file)
    except UserErrors:
        return {}
    for word in words:
        # A name chooses a group, and thereby the keys that there are.
        key, _, value = word.partition("=")
        group, _, last = key.partition(".")
        if last == "name" and not value.startswith("["):
            content[group] = {**(content.get(group) or {}), "name": value}
    return content
