"""Read a sweep from the command line: a list for a key that takes one value.

    python launch/local.py --config configs/demo/finetune.yaml optim.lr=[0.003,0.03] seed=[0,1]

Owns: which overrides are sweeps, and the chain of one stage that they stand for.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from finetune.run import FinetuneRun
from launch.chains.load import TRAININGS
from launch.chains.settings import ChainRun, ChainStage
from launch.jobs.preparation import RUN_TYPES
from pretrain.run import PretrainRun
from vitscale.config.command_line import Command, load_command
from vitscale.config.errors import UserErrors
from vitscale.config.loader import read_values
from vitscale.config.schema import find, groups_of, is_list
from vitscale.config.section import Run
from vitscale.config.source import read_yaml, yaml_flow

TRAINABLE = {name: RUN_TYPES[name] for name in TRAININGS}


def sweep_command(
    argv: Sequence[str], *, script: str, switches: Mapping[str, str]
) -> Command[Run] | None:
    """The command with a chain as its run; None if no override is a sweep.

    Raises UserErrors for all but the values that are swept, which `load_chain` validates.
    """
    values = _sweeps(argv)
    if not values:
        return None
    others = [word for word in argv if word.partition("=")[0].strip() not in values]
    first = [f"{key}={yaml_flow(each[0])}" for key, each in values.items()]
    command = load_command(
        TRAINABLE,
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


def _sweeps(argv: Sequence[str]) -> dict[str, list[Any]]:
    """Key -> values: lists that are no value of their key."""
    lists = [word for word in argv if "=[" in word and not word.startswith("-")]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    file = parser.parse_known_args(argv)[0].config
    if not lists or not file:
        return {}
    values = {}
    try:
        known = read_values(file)
        # A name chooses a group, and thereby the keys that there are.
        for word in argv:
            group, _, name = word.partition(".name=")
            if name and not name.startswith("["):
                known[group] = {**(known.get(group) or {}), "name": name}
        for word in lists:
            key, _, text = word.partition("=")
            value = read_yaml(text, name=key)
            run_type = TRAINABLE.get(str(known.get("stage")))
            if run_type and value and _is_sweep(run_type, key, value, known):
                values[key] = value
    except UserErrors:
        return {}  # `load_command` reports them
    return values


def _is_sweep(run_type: type[Run], key: str, value: Any, known: dict[str, Any]) -> bool:
    """True if there is such a key, and the list is no value of it."""
    path = tuple(key.split("."))
    node, group = find(run_type, path, known)
    if not isinstance(value, list) or "properties" in node or groups_of(node) or group is not None:
        return False
    return not is_list(node) or all(isinstance(each, list) for each in value)
