"""Load a chain: every run of every stage validated, in the order in which they can run.

A sweep on the command line is a chain of one stage. Leaves out running them (`executors`).
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from finetune.run import FinetuneRun
from launch.chains.settings import ChainRun, ChainStage, key_of, stage_of
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


class ChainStep(NamedTuple):
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
        if isinstance(self.run, DataPrepRun):
            return Path(self.run.output)
        return Path(self.run.folder)


class Chain(NamedTuple):
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
    steps_of: dict[str, list[ChainStep]] = {}
    kinds: set[str] = set()
    # Error -> where it is: all runs of a sweep may have the same.
    errors: dict[str, list[str]] = {}

    def note(error: UserError, name: str) -> None:
        # One error may stand for several.
        for problem in getattr(error, "errors", [error]):
            text = problem.text().replace(f"{COMMAND_LINE}: ", "override ", 1)
            errors.setdefault(text, []).append(name)

    # Each stage comes after those whose runs it takes.
    needs_of = {stage.name: stage.needs for stage in settings.stages}
    for name in TopologicalSorter(needs_of).static_order():
        stage = stages[name]
        # The errors of what it needs are reported already.
        if not steps_of.keys() >= set(stage.needs):
            continue

        try:
            kind = _kind_of(stage.config)
            kinds.add(kind)
            _check_stage(stage, kind, steps_of)
        except UserError as error:
            note(error, f"stage {name}")
            continue

        steps = []
        for step_name, overrides, needs, labels in _combinations(
            settings, stage, kind, steps_of
        ):
            # One value of a sweep may be wrong, and the others right.
            try:
                run = load_run(RUN_TYPES, stage.config, overrides=overrides).run
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
            steps_of[name] = steps

    problems = []
    for text, names in errors.items():
        text += f"\n  in: {names[0]}"
        if len(names) > 1:
            text += f" and {len(names) - 1} more"
        problems.append(UserError(text))

    # A setting of the chain is left out of the runs that do not have it, but not of all.
    for text in settings.overrides:
        if kinds and not any(_has_key(kind, text) for kind in kinds):
            problems.append(
                UserError(f"{text}: no stage has this key", where="overrides")
            )

    # Two data preparations may name the same shards, and two values the same run.
    all_steps = tuple(step for steps in steps_of.values() for step in steps)
    folders = [step.folder.absolute() for step in all_steps]
    for step in all_steps:
        if folders.count(step.folder.absolute()) > 1:
            what = f"{step.name} and another run both write {step.folder}"
            next_step = "rename one value, or set output"
            problems.append(UserError(what, where="stages", next_step=next_step))
            break

    if problems:
        raise UserErrors(problems)
    return Chain(name=settings.name, folder=Path(settings.folder), steps=all_steps)


def _kind_of(file: str) -> str:
    """Return the `stage` of a run file. Raises UserError if such a stage cannot be launched."""
    stage = read_values(file).get("stage")
    if stage not in RUN_TYPES:
        what = f"stage {stage!r} cannot be launched"
        if stage is None:
            what = "stage is missing"
        raise UserError(what, where=file, allowed=", ".join(RUN_TYPES))
    # Its output is a file, and what it made is not compared.
    if stage == "embed":
        raise UserError(
            "embed is not part of chains",
            where=file,
            next_step="run it after the chain",
        )
    return str(stage)


def _check_stage(
    stage: ChainStage, kind: str, steps_of: dict[str, list[ChainStep]]
) -> None:
    """Raise UserError for what the kind of a stage, or of its inputs, does not allow."""
    keys = [key_of(text) for text in stage.overrides]
    if kind == "data_prep":
        if stage.sweep or stage.variants:
            raise UserError("data_prep has no sweep and no variants", where="stages")
    elif "output" in keys:
        what = "the chain sets output itself, from the names of chain and stage"
        raise UserError(what, where="output", next_step="set output of the chain")

    for key, name in stage.inputs.items():
        # All steps of a stage are of one kind. Other keys take any folder.
        source = steps_of[stage_of(name)][0].kind
        if source not in SOURCES.get(key, (source,)):
            what = f"{key}: stage {name} is {source}"
            raise UserError(what, where="inputs", allowed=" or ".join(SOURCES[key]))


def _has_key(kind: str, override: str) -> bool:
    section = key_of(override).partition(".")[0]
    return section in RUN_TYPES[kind].model_fields


def _combinations(
    chain: ChainRun, stage: ChainStage, kind: str, steps_of: dict[str, list[ChainStep]]
) -> Iterator[tuple[str, list[str], tuple[str, ...], dict[str, str]]]:
    """Yield (name, overrides, needs, labels) of each combination of the runs of the inputs with
    the stage's own variants and sweep."""
    needs_after = [step.name for name in stage.after for step in steps_of[name]]
    of_chain = [text for text in chain.overrides if _has_key(kind, text)]
    steps_of_inputs = [steps_of[stage_of(name)] for name in stage.inputs.values()]

    for sources in itertools.product(*steps_of_inputs):
        inherited: dict[str, str] = {}
        for source in sources:
            inherited |= source.labels
        # Two inputs may come from one stage: from the same run of it.
        if any(inherited[key] != s.labels[key] for s in sources for key in s.labels):
            continue

        inputs = [
            f"{key}={yaml_flow(str(source.folder) + name.removeprefix(source.stage))}"
            for (key, name), source in zip(stage.inputs.items(), sources, strict=True)
        ]
        needs = (*(source.name for source in sources), *needs_after)
        # The seed of what it starts from, so that one seed names a whole branch of the chain.
        seeds = [value for key, value in inherited.items() if key.endswith(".seed")]

        for chosen, of_choice in _choices(stage, inherited):
            labels = inherited | chosen
            name = _name(stage, sources, chosen)
            # Later ones outrank earlier ones.
            overrides = [*of_chain, *stage.overrides, *inputs, *of_choice]

            has_seed = any(text.startswith("seed=") for text in overrides)
            if seeds and kind in TRAINABLE and not has_seed:
                overrides.append(f"seed={seeds[-1]}")

            # Shards are not of one chain alone: their folder is that of their file.
            if kind != "data_prep":
                tags = {"chain": chain.name, "chain.stage": stage.name}
                tags |= {f"chain.{key}": value for key, value in labels.items()}
                overrides += [
                    f"name={yaml_flow(f'{chain.name}-{name}'.replace('/', '-'))}",
                    f"output={yaml_flow(f'{chain.folder}/{name}')}",
                    f"tracking.tags={yaml_flow(tags)}",
                ]
            yield name, overrides, needs, labels


def _choices(
    stage: ChainStage, inherited: dict[str, str]
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """(labels, overrides) of each combination of the stage's own variants and sweep.

    A run that starts from a variant of one of these names has the variant of that name.
    """
    axes: list[list[tuple[str, str, list[str]]]] = []

    if stage.variants:
        variants_before = {
            value for key, value in inherited.items() if key.endswith(".variant")
        }
        names = variants_before & stage.variants.keys() or stage.variants.keys()
        axes.append(
            [
                ("variant", name, list(overrides))
                for name, overrides in stage.variants.items()
                if name in names
            ]
        )
    for key, values in stage.sweep.items():
        axes.append(
            [(key, _shown(value), [f"{key}={yaml_flow(value)}"]) for value in values]
        )

    # Without any axis, this is one combination without labels.
    for choice in itertools.product(*axes):
        labels = {f"{stage.name}.{key}": text for key, text, _ in choice}
        yield labels, [text for _, _, overrides in choice for text in overrides]


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    return yaml_flow(value)


def _name(
    stage: ChainStage, sources: Sequence[ChainStep], chosen: dict[str, str]
) -> str:
    """STAGE, or STAGE/PARTS: the names of the inputs' runs, variants, and KEY-VALUE of a sweep."""
    parts = [part for source in sources if (part := source.name.partition("/")[2])]

    earlier = {value for source in sources for value in source.labels.values()}
    for key, value in chosen.items():
        last_key = key.rpartition(".")[2]
        if last_key != "variant":
            value = f"{last_key}-{value}"
        elif value in earlier:
            # The inputs' names have it already.
            continue
        parts.append(re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-."))

    run = "_".join(parts)
    if not run:
        return stage.name
    return f"{stage.name}/{run}"


# ---- from the command line --------------------------------------------------------------------


def launch_command(
    argv: Sequence[str], **more: Any
) -> Command[LaunchableRun | ChainRun]:
    """Parse the command line into a run, or into the chain that a file or a sweep describes.

    A sweep is a list for a key that takes one value: optim.lr=[0.003,0.03] seed=[0,1].
    more: the other arguments of `load_command`.
    Raises UserErrors for all but the values that are swept, which `load_chain` validates.
    """
    sweep = _sweeps(argv)
    others = [word for word in argv if key_of(word) not in sweep]
    if not sweep:
        types: dict[str, type[LaunchableRun | ChainRun]] = {
            **RUN_TYPES,
            "chain": ChainRun,
        }
        return load_command(types, argv=others, **more)

    # The rest of the command line is read with the first value of each key.
    first = [f"{key}={yaml_flow(values[0])}" for key, values in sweep.items()]
    command = load_command(TRAINABLE, argv=[*others, *first], **more)
    assert command.config_path is not None
    run = command.run

    # Beside the run of the file alone.
    name = f"{run.name}-sweep"
    overrides = []
    for word in others:
        if "=" not in word or word.startswith("-"):
            continue
        key = key_of(word)
        if key == "name":
            name = run.name
        # The chain sets both for each of its runs.
        if key not in ("name", "output"):
            overrides.append(word)

    stage = ChainStage(
        name=run.stage,
        config=command.config_path,
        overrides=tuple(overrides),
        sweep={key: tuple(values) for key, values in sweep.items()},
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
    config = parser.parse_known_args(argv)[0].config
    sweep: dict[str, list[Any]] = {}
    if not lists or not config:
        return sweep

    try:
        # Only the type of the run says whether its key takes a list.
        run_type = TRAINABLE.get(str(read_values(config).get("stage")))
        for word in lists:
            key, _, text = word.partition("=")
            value = read_yaml(text, name=key).values
            if run_type and value and _is_sweep(run_type, key, value):
                sweep[key] = value
    except UserError:
        # `load_command` reports it.
        return {}
    return sweep


def _is_sweep(run_type: type[Run], key: str, value: Any) -> bool:
    """Return True if the key exists and a list is not a valid value for it."""
    nodes = []
    for setting in settings_of(run_type).values():
        node = setting.node
        # A group of free keys stands for each of them.
        is_free = node.get("type") == "object" and not groups_of(node)
        is_inside = is_free and key.startswith(f"{setting.key}.")
        if setting.key == key or is_inside:
            nodes.append(node)

    if not isinstance(value, list) or not nodes:
        return False
    if any(groups_of(node) for node in nodes):
        return False
    # A key that takes a list is swept by a list of lists.
    if any(map(is_list, nodes)):
        return all(isinstance(entry, list) for entry in value)
    return True
