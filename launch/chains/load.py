"""Load a chain: every run of every stage validated, in the order in which they can run.

A sweep on the command line is a chain of one stage. Leaves out running them (`executors`).
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from finetune.run import FinetuneRun
from launch.chains.settings import ChainRun, ChainStage
from launch.jobs.preparation import RUN_TYPES, LaunchableRun, check_job
from pretrain.run import PretrainRun
from vitscale.config.command_line import Command, load_command
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import (
    COMMAND_LINE,
    load_run,
    read_values,
    read_yaml,
    yaml_flow,
)
from vitscale.config.section import Run, groups_of, is_list, settings_of
from vitscale.runs.data_prep import DataPrepRun

TRAINABLE: dict[str, type[PretrainRun | FinetuneRun]] = {
    "pretrain": PretrainRun,
    "finetune": FinetuneRun,
}
# Key -> kinds of stages that it can be the folder of.
SOURCES = {"data.path": ("data_prep",), "init": tuple(TRAINABLE)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainStep:
    name: str
    """STAGE, or STAGE/RUN if the stage has several runs."""
    kind: str
    """data_prep, pretrain, finetune or evaluate."""
    run: LaunchableRun
    needs: tuple[str, ...]
    """Names of the steps that must be done before."""
    labels: dict[str, str]
    """STAGE.KEY -> value of each sweep and variant that led to this run."""

    @property
    def stage(self) -> str:
        return self.name.partition("/")[0]

    @property
    def folder(self) -> Path:
        """The run folder; of a data preparation, that of the shards."""
        return Path(
            self.run.output if isinstance(self.run, DataPrepRun) else self.run.folder
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """All runs, each after those that it needs."""

    name: str
    folder: Path
    steps: tuple[ChainStep, ...]


def load_chain(
    settings: ChainRun, *, cluster: str, num_tasks: int | None = None
) -> Chain:
    """Load and validate every run.

    num_tasks: processes of each run; None: as its `launch` section says.
    Raises UserErrors that name stages and runs.
    """
    if problems := [UserError(text, where=key) for key, text in settings.problems()]:
        raise UserErrors(problems)
    stages = {stage.name: stage for stage in settings.stages}
    found: dict[str, list[ChainStep]] = {}
    kinds: set[str] = set()
    # Error -> where it is.
    errors: dict[str, list[str]] = {}

    def note(error: UserError, name: str) -> None:
        for each in error.errors if isinstance(error, UserErrors) else (error,):
            text = each.text().replace(f"{COMMAND_LINE}: ", "override ", 1)
            errors.setdefault(text, []).append(name)

    for name in TopologicalSorter(
        {s.name: s.needs for s in settings.stages}
    ).static_order():
        stage = stages[name]
        if not found.keys() >= set(stage.needs):
            continue  # its errors are reported
        try:
            kind = _kind_of(stage.config)
            kinds.add(kind)
            _check_stage(stage, kind, found)
        except UserError as error:
            note(error, f"stage {name}")
            continue
        steps = []
        for step_name, words, needs, labels in _wanted(settings, stage, kind, found):
            try:
                run = load_run(RUN_TYPES, stage.config, overrides=words).run
                check_job(run, num_tasks=num_tasks, cluster=cluster)
            except UserError as error:
                note(error, step_name)
                continue
            steps.append(
                ChainStep(
                    name=step_name, kind=kind, run=run, needs=needs, labels=labels
                )
            )
        if steps:
            found[name] = steps
    every = [step for steps in found.values() for step in steps]
    problems = []
    for text, names in errors.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        problems.append(UserError(f"{text}\n  in: {names[0]}{more}"))
    for text in settings.overrides:
        if kinds and not any(_has_key(kind, text) for kind in kinds):
            problems.append(
                UserError(f"{text}: no stage has this key", where="overrides")
            )
    folders = [step.folder.absolute() for step in every]
    # Two data preparations may name the same shards, and two values the same run.
    if shared := next(
        (step for step in every if folders.count(step.folder.absolute()) > 1), None
    ):
        what = f"{shared.name} and another run both write {shared.folder}"
        step = "rename one value, or set output"
        problems.append(UserError(what, where="stages", next_step=step))
    if problems:
        raise UserErrors(problems)
    return Chain(name=settings.name, folder=Path(settings.folder), steps=tuple(every))


def _kind_of(file: str) -> str:
    """The `stage` of a run file. Raises UserErrors for a file that cannot be launched."""
    stage = read_values(file).get("stage")
    if stage not in RUN_TYPES:
        what = (
            "stage is missing"
            if stage is None
            else f"stage {stage!r} cannot be launched"
        )
        raise UserError(what, where=file, allowed=", ".join(RUN_TYPES))
    return str(stage)


def _check_stage(
    stage: ChainStage, kind: str, found: dict[str, list[ChainStep]]
) -> None:
    """Raise UserError for what the kind of a stage, or of its inputs, does not allow."""
    if kind == "data_prep" and (stage.sweep or stage.variants):
        raise UserError("data_prep has no sweep and no variants", where="stages")
    if kind != "data_prep" and "output" in {
        text.partition("=")[0] for text in stage.overrides
    }:
        what = "the chain sets output itself, from the names of chain and stage"
        raise UserError(what, where="output", next_step="set output of the chain")
    for key, name in stage.inputs.items():
        source = found[name][0].kind
        if source not in SOURCES.get(key, (source,)):
            what = f"{key}: stage {name} is {source}"
            raise UserError(what, where="inputs", allowed=" or ".join(SOURCES[key]))


def _has_key(kind: str, override: str) -> bool:
    return (
        override.partition("=")[0].split(".")[0].strip() in RUN_TYPES[kind].model_fields
    )


def _wanted(
    chain: ChainRun, stage: ChainStage, kind: str, found: dict[str, list[ChainStep]]
) -> Iterator[tuple[str, list[str], tuple[str, ...], dict[str, str]]]:
    """(name, overrides, needs, labels) of each combination of the runs of the inputs with the
    stage's own variants and sweep."""
    after = [step.name for each in stage.after for step in found[each]]
    general = [text for text in chain.overrides if _has_key(kind, text)]
    for sources in itertools.product(*(found[name] for name in stage.inputs.values())):
        inherited: dict[str, str] = {}
        for source in sources:
            inherited |= source.labels
        # Two inputs may come from one stage: from the same run of it.
        if any(inherited[key] != s.labels[key] for s in sources for key in s.labels):
            continue
        inputs = [
            f"{key}={yaml_flow(str(source.folder))}"
            for key, source in zip(stage.inputs, sources, strict=True)
        ]
        for own, words in _choices(stage, inherited):
            labels = inherited | own
            name = _name(stage, sources, own)
            words = [*general, *stage.overrides, *inputs, *words]
            seeds = [value for key, value in inherited.items() if key.endswith(".seed")]
            if (
                seeds
                and kind in TRAINABLE
                and not any(w.startswith("seed=") for w in words)
            ):
                words.append(f"seed={seeds[-1]}")
            if kind != "data_prep":
                tags = {"chain": chain.name, "chain.stage": stage.name}
                tags |= {f"chain.{key}": value for key, value in labels.items()}
                words += [
                    f"name={yaml_flow(f'{chain.name}-{name}'.replace('/', '-'))}",
                    f"output={yaml_flow(f'{chain.folder}/{name}')}",
                    f"tracking.tags={yaml_flow(tags)}",
                ]
            needs = (*(source.name for source in sources), *after)
            yield name, words, needs, labels


def _choices(
    stage: ChainStage, inherited: dict[str, str]
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """(labels, overrides) of each combination of the stage's own variants and sweep.

    A run that starts from a variant of one of these names has the variant of that name.
    """
    before = {value for key, value in inherited.items() if key.endswith(".variant")}
    axes: list[list[tuple[str, str, list[str]]]] = []
    if stage.variants:
        names = before & stage.variants.keys() or stage.variants.keys()
        variants = stage.variants.items()
        axes.append(
            [
                ("variant", name, list(words))
                for name, words in variants
                if name in names
            ]
        )
    for key, values in stage.sweep.items():
        axes.append(
            [(key, _shown(value), [f"{key}={yaml_flow(value)}"]) for value in values]
        )
    for choice in itertools.product(*axes):
        labels = {f"{stage.name}.{key}": text for key, text, _ in choice}
        yield labels, [word for _, _, words in choice for word in words]


def _shown(value: object) -> str:
    return value if isinstance(value, str) else yaml_flow(value)


def _name(stage: ChainStage, sources: Sequence[ChainStep], own: dict[str, str]) -> str:
    """STAGE, or STAGE/PARTS: the names of the inputs' runs, variants, and KEY-VALUE of a sweep."""
    parts = [part for source in sources if (part := source.name.partition("/")[2])]
    earlier = {value for source in sources for value in source.labels.values()}
    for key, value in own.items():
        last = key.rpartition(".")[2]
        if last != "variant":
            value = f"{last}-{value}"
        elif value in earlier:
            continue
        parts.append(re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-."))
    return "/".join(filter(None, [stage.name, "_".join(parts)]))


# ---- from the command line --------------------------------------------------------------------


def launch_command(
    argv: Sequence[str], **more: Any
) -> Command[LaunchableRun | ChainRun]:
    """Parse the command line into a run, or into the chain that a file or a sweep describes.

    A sweep is a list for a key that takes one value: optim.lr=[0.003,0.03] seed=[0,1].
    more: the other arguments of `load_command`.
    Raises UserErrors for all but the values that are swept, which `load_chain` validates.
    """
    values = _sweeps(argv)
    others = [word for word in argv if word.partition("=")[0].strip() not in values]
    if not values:
        types: dict[str, type[LaunchableRun | ChainRun]] = {
            **RUN_TYPES,
            "chain": ChainRun,
        }
        return load_command(types, argv=others, **more)
    first = [f"{key}={yaml_flow(each[0])}" for key, each in values.items()]
    command = load_command(TRAINABLE, argv=[*others, *first], **more)
    assert command.config_path is not None
    run, overrides = (
        command.run,
        [w for w in others if "=" in w and not w.startswith("-")],
    )
    stage = ChainStage(
        name=run.stage,
        config=command.config_path,
        overrides=tuple(
            w for w in overrides if w.partition("=")[0] not in ("name", "output")
        ),
        sweep={key: tuple(each) for key, each in values.items()},
    )
    # Beside the run of the file alone.
    name = (
        run.name
        if any(w.startswith("name=") for w in overrides)
        else f"{run.name}-sweep"
    )
    chain = ChainRun(name=name, output=run.output, stages=(stage,))
    return Command(
        run=chain, switches=command.switches, config_path=command.config_path
    )


def _sweeps(argv: Sequence[str]) -> dict[str, list[Any]]:
    """Return key -> values for each list that is not a valid value of its key."""
    lists = [word for word in argv if "=[" in word and not word.startswith("-")]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    file = parser.parse_known_args(argv)[0].config
    values: dict[str, list[Any]] = {}
    if not lists or not file:
        return values
    try:
        run_type = TRAINABLE.get(str(read_values(file).get("stage")))
        for word in lists:
            key, _, text = word.partition("=")
            value = read_yaml(text, name=key).values
            if run_type and value and _is_sweep(run_type, key, value):
                values[key] = value
    except UserError:
        return {}  # `load_command` reports them
    return values


def _is_sweep(run_type: type[Run], key: str, value: Any) -> bool:
    """Return True if the key exists and a list is not a valid value for it."""
    settings = settings_of(run_type).values()
    nodes = [each.node for each in settings if each.key == key]
    # A group of free keys stands for each of them.
    above = [each.node for each in settings if key.startswith(f"{each.key}.")]
    nodes += [
        node for node in above if node.get("type") == "object" and not groups_of(node)
    ]
    if (
        not isinstance(value, list)
        or not nodes
        or any(groups_of(node) for node in nodes)
    ):
        return False
    return not any(map(is_list, nodes)) or all(isinstance(each, list) for each in value)
