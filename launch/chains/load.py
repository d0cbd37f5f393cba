"""Load a chain: every run of every stage validated, in the order in which they can run.

Owns: which runs a stage has, their names, folders and tags, what they take from earlier stages, and
one report of errors.
Leaves out: what is done (`states`), running and submitting (`executors`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path

from launch.chains.settings import ChainRun, ChainStage
from launch.jobs.preparation import RUN_TYPES, LaunchableRun, check_job, launchable
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import load_run, read_values
from vitscale.config.source import COMMAND_LINE, yaml_flow
from vitscale.runs.data_prep import DataPrepRun

TRAININGS = ("pretrain", "finetune")
# Key -> kinds of stages that it can be the folder of.
SOURCES = {"data.path": ("data_prep",), "init": TRAININGS}
MAX_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainStep:
    """One run of a chain."""

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
        return Path(self.run.output if isinstance(self.run, DataPrepRun) else self.run.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """All runs, each after those that it needs."""

    name: str
    folder: Path
    steps: tuple[ChainStep, ...]

    def sources(self, step: ChainStep) -> list[ChainStep]:
        return [each for each in self.steps if each.name in step.needs]


def load_chain(settings: ChainRun, *, cluster: str, num_tasks: int | None = None) -> Chain:
    """Load and validate every run.

    num_tasks: processes of each run; None: as its `launch` section says.
    Raises UserErrors that name stages and runs.
    """
    if problems := [UserError(text, where=key) for key, text in settings.problems()]:
        raise UserErrors(problems)
    loading = _Loading(chain=settings, cluster=cluster, num_tasks=num_tasks)
    by_name = {stage.name: stage for stage in settings.stages}
    for name in TopologicalSorter({s.name: s.needs for s in settings.stages}).static_order():
        stage = by_name[name]
        if set(stage.needs) <= loading.found.keys():
            try:
                loading.add(stage)
            except UserError as error:
                loading.note(error, f"stage {name}")
    steps = [step for stage in loading.found.values() for step in stage]
    errors = [_in_runs(text, names) for text, names in loading.errors.items()]
    errors += _unused_overrides(settings, loading.kinds)
    errors += _shared_folders(steps)
    if errors:
        raise UserErrors(errors)
    return Chain(name=settings.name, folder=Path(settings.folder), steps=tuple(steps))


def _in_runs(text: str, names: Sequence[str]) -> UserError:
    """An error that several runs have, with the first of their names."""
    shown = ", ".join(names[:MAX_EXAMPLES])
    more = f" and {len(names) - MAX_EXAMPLES} more" if len(names) > MAX_EXAMPLES else ""
    return UserError(f"{text}\n  in: {shown}{more}")


def _unused_overrides(settings: ChainRun, kinds: set[str]) -> Iterator[UserError]:
    for text in settings.overrides:
        if kinds and not any(_has_key(kind, text) for kind in kinds):
            yield UserError(f"{text}: no stage has this key", where="overrides")


def _shared_folders(steps: Sequence[ChainStep]) -> Iterator[UserError]:
    """Two data preparations may name the same shards, and two values the same run."""
    names: dict[Path, str] = {}
    for step in steps:
        other = names.setdefault(step.folder.absolute(), step.name)
        if other != step.name or [s.name for s in steps].count(other) > 1:
            what = f"{other} and another run both write {step.folder}"
            yield UserError(what, where="stages", next_step="rename one value, or set output")
            return


def _has_key(kind: str, override: str) -> bool:
    return override.partition("=")[0].split(".")[0].strip() in RUN_TYPES[kind].model_fields


@dataclass(kw_only=True, slots=True)
class _Loading:
    chain: ChainRun
    cluster: str
    num_tasks: int | None
    found: dict[str, list[ChainStep]] = field(default_factory=dict)
    """Stage -> its runs."""
    kinds: set[str] = field(default_factory=set)
    errors: dict[str, list[str]] = field(default_factory=dict)
    """Error -> where it is."""

    def note(self, error: UserError, name: str) -> None:
        for each in error.errors if isinstance(error, UserErrors) else (error,):
            text = each.text().replace(f"{COMMAND_LINE}: ", "override ", 1)
            self.errors.setdefault(text, []).append(name)

    def add(self, stage: ChainStage) -> None:
        """Load the runs of a stage. Raises UserErrors for what all of them share."""
        kind = _kind_of(stage.config)
        self.kinds.add(kind)
        self._check(stage, kind)
        steps = []
        for sources in itertools.product(*(self.found[name] for name in stage.inputs.values())):
            inherited = _merged(sources)
            if inherited is None:
                continue
            for labels, overrides in _choices(stage, inherited):
                step = self._step(stage, kind, sources, {**inherited, **labels}, overrides)
                if step is not None:
                    steps.append(step)
        if steps:
            self.found[stage.name] = steps

    def _check(self, stage: ChainStage, kind: str) -> None:
        if kind == "data_prep" and (stage.sweep or stage.variants):
            raise UserError("data_prep has no sweep and no variants", where="stages")
        if kind != "data_prep" and "output" in {text.partition("=")[0] for text in stage.overrides}:
            what = "the chain sets output itself, from the names of chain and stage"
            raise UserError(what, where="output", next_step="set output of the chain")
        for key, name in stage.inputs.items():
            source = self.found[name][0].kind
            if source not in SOURCES.get(key, (source,)):
                what = f"{key}: stage {name} is {source}"
                raise UserError(what, where="inputs", allowed=" or ".join(SOURCES[key]))

    def _step(
        self,
        stage: ChainStage,
        kind: str,
        sources: Sequence[ChainStep],
        labels: dict[str, str],
        overrides: Sequence[str],
    ) -> ChainStep | None:
        """None if the run is invalid."""
        from_sources = [name for source in sources if (name := source.name.partition("/")[2])]
        earlier = [value for source in sources for value in source.labels.values()]
        own = [
            _slug(key, value)
            for key, value in labels.items()
            if key.partition(".")[0] == stage.name
            and not (key.endswith(".variant") and value in earlier)
        ]
        name = "/".join(filter(None, [stage.name, "_".join([*from_sources, *own])]))
        words = [text for text in self.chain.overrides if _has_key(kind, text)]
        words += stage.overrides
        words += [
            f"{key}={yaml_flow(str(source.folder))}"
            for key, source in zip(stage.inputs, sources, strict=True)
        ]
        seeds = [value for key, value in labels.items() if key.endswith(".seed")]
        if seeds and kind in TRAININGS and not any(w.startswith("seed=") for w in words):
            words.append(f"seed={seeds[-1]}")
        words += overrides
        if kind != "data_prep":
            tags = {"chain": self.chain.name, "chain.stage": stage.name}
            tags |= {f"chain.{key}": value for key, value in labels.items()}
            words += [
                f"name={yaml_flow(f'{self.chain.name}-{name}'.replace('/', '-'))}",
                f"output={yaml_flow(f'{self.chain.folder}/{name}')}",
                f"tracking.tags={yaml_flow(tags)}",
            ]
        try:
            run = launchable(load_run(RUN_TYPES, stage.config, overrides=words).run)
            num_tasks = self.num_tasks or run.launch.nodes * run.launch.tasks_per_node
            check_job(run, num_tasks=num_tasks, cluster=self.cluster)
        except UserError as error:
            self.note(error, name)
            return None
        after = [step.name for each in stage.after for step in self.found[each]]
        needs = (*(source.name for source in sources), *after)
        return ChainStep(name=name, kind=kind, run=run, needs=needs, labels=labels)


def _merged(sources: Sequence[ChainStep]) -> dict[str, str] | None:
    """The labels of all sources; None if two of them come from different runs of one stage."""
    merged: dict[str, str] = {}
    for source in sources:
        if any(merged.get(key, value) != value for key, value in source.labels.items()):
            return None
        merged |= source.labels
    return merged


def _choices(
    stage: ChainStage, inherited: dict[str, str]
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """(labels, overrides) of each combination of the stage's own variants and sweep.

    A run that starts from a variant of one of these names has the variant of that name.
    """
    axes = [
        [(f"{stage.name}.{key}", _shown(value), [f"{key}={yaml_flow(value)}"]) for value in values]
        for key, values in stage.sweep.items()
    ]
    if stage.variants:
        before = {value for key, value in inherited.items() if key.endswith(".variant")}
        names = before & stage.variants.keys() or stage.variants.keys()
        axes.insert(
            0,
            [
                (f"{stage.name}.variant", name, list(words))
                for name, words in stage.variants.items()
                if name in names
            ],
        )
    for choice in itertools.product(*axes):
        labels = {key: label for key, label, _ in choice}
        yield labels, [word for _, _, words in choice for word in words]


def _shown(value: object) -> str:
    return value if isinstance(value, str) else yaml_flow(value)


def _slug(key: str, value: str) -> str:
    """A part of a run's name: lr-0.003, or the name of a variant."""
    last = key.rpartition(".")[2]
    text = value if last == "variant" else f"{last}-{value}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")


def _kind_of(file: str) -> str:
    """The `stage` of a run file. Raises UserErrors for a file that cannot be launched."""
    stage = read_values(file).get("stage")
    if stage not in RUN_TYPES:
        what = "stage is missing" if stage is None else f"stage {stage!r} cannot be launched"
        raise UserError(what, where=file, allowed=", ".join(RUN_TYPES))
    return str(stage)
