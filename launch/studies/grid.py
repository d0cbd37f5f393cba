"""Expand a study into its cells and their runs, all of them validated.

Owns: which runs a cell needs, their names, folders and tags, and one report of all invalid cells.
Leaves out: what is already trained (`states`) and training (`running`, `arrays`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from finetune.run import FinetuneRun
from launch.jobs.preparation import check_job
from launch.planning.dry_run import data_facts, planned_classes
from launch.studies.settings import Axis, AxisValue, StageChange, StudyRun, slug
from pretrain.run import PretrainRun
from vitscale.checkpoint.folders import step_folder
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import COMMAND_LINE, load_run, yaml_flow
from vitscale.config.section import Run
from vitscale.runs.training import training_plan

RUN_TYPES: dict[str, type[Run]] = {"pretrain": PretrainRun, "finetune": FinetuneRun}
MAX_EXAMPLES = 3
TRIAL, FINAL = "trial", "final"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTraining:
    """One run of a study, trained once, however many cells need it."""

    name: str
    run: PretrainRun | FinetuneRun
    labels: dict[str, str]
    """Axis -> label, of the axes that change this run."""
    kind: str
    """pretrain or finetune; trial or final where a selection measures or uses a value."""
    needs: str | None = None
    """Name of the pre-training that this transfer starts from."""
    candidates: tuple[Candidate, ...] = ()
    """Of a final run whose value is not chosen yet: what it may become. The rest of this training
    is that of the first."""
    images: int | None = None
    """Size of the training set; None while the shards are unknown, as for all below."""
    steps: int | None = None
    parameters: int | None = None
    flops: int | None = None
    """Of the whole run, forward and backward."""

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    @property
    def trials(self) -> tuple[str, ...]:
        """Names of the trainings that its value is chosen by; empty once it is chosen."""
        return tuple(name for each in self.candidates for name in each.trials)

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Names of the trainings that must be done before this one starts."""
        return self.trials if self.needs is None else (self.needs, *self.trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One value of the axis that is chosen from, for one final run."""

    label: str
    trials: tuple[str, ...]
    """Names of the trainings that measure it, one for each seed of the trials."""
    training: StudyTraining
    """The final run with this value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination of the axes' values with one seed."""

    values: dict[str, AxisValue]
    """Without the axis that is chosen from, if this is a cell of final runs."""
    seed: int
    pretrain: str | None
    """Name of the training; None: from scratch, or from weights that the study did not train."""
    finetune: str | None
    """Name of the training; None: the study has no transfer."""

    @property
    def result(self) -> str:
        """Name of the training whose metric is the cell's result."""
        name = self.finetune or self.pretrain
        assert name is not None
        return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """All cells of a study, and the trainings that they need, each before those that need it."""

    study: StudyRun
    cells: tuple[Cell, ...]
    trainings: dict[str, StudyTraining]
    trials: tuple[Cell, ...] = ()
    """Cells of the trials of a selection."""


Choice = Sequence[tuple[Axis, AxisValue]]


def expand(study: StudyRun, *, cluster: str, num_tasks: int | None = None) -> Grid:
    """Load and validate the runs of every cell.

    num_tasks: processes of each run; None: as its `launch` section says.
    Raises UserErrors that name every invalid run, equal errors once.
    """
    expansion = _Expansion(study=study, cluster=cluster, num_tasks=num_tasks)
    choices, select = list(_choices(study)), study.select
    trials: list[Cell] = []
    if select is None:
        cells = [expansion.cell(each, seed) for seed in study.seeds for each in choices]
    else:
        trials = [expansion.cell(each, seed, TRIAL) for seed in select.seeds for each in choices]
        expansion.measured = _measured(study, trials)
        groups = _groups(choices, without=select.axis)
        cells = [expansion.final_cell(each, seed) for seed in study.seeds for each in groups]
    if expansion.found:
        raise UserErrors([in_runs(text, names) for text, names in expansion.found.items()])
    return Grid(
        study=study, cells=tuple(cells), trainings=expansion.trainings, trials=tuple(trials)
    )


def _choices(study: StudyRun) -> Iterator[Choice]:
    """Every combination of values that `only` allows."""
    for choice in itertools.product(*([(axis, v) for v in axis.values] for axis in study.axes)):
        labels = {axis.name: value.label for axis, value in choice}
        limits = [limit for _, value in choice for limit in value.only.items()]
        if all(labels[name] in allowed for name, allowed in limits):
            yield choice


Measured = dict[tuple[tuple[str, ...], str], tuple[str, ...]]


def _measured(study: StudyRun, trials: Sequence[Cell]) -> Measured:
    """(the choice that they are for, the value) -> names of the trials that measure it."""
    assert study.select is not None
    found: Measured = {}
    for cell in trials:
        labels = {name: value.label for name, value in cell.values.items()}
        key = study.select_key(labels), labels[study.select.axis]
        found[key] = (*found.get(key, ()), cell.result)
    return found


def _groups(choices: Sequence[Choice], *, without: str) -> list[list[Choice]]:
    """The choices that differ in one axis alone."""
    groups: dict[tuple[str, ...], list[Choice]] = {}
    for choice in choices:
        others = tuple(value.label for axis, value in choice if axis.name != without)
        groups.setdefault(others, []).append(choice)
    return list(groups.values())


@dataclass(kw_only=True)
class _Expansion:
    """The trainings found so far, and the errors of invalid ones."""

    study: StudyRun
    cluster: str
    num_tasks: int | None
    trainings: dict[str, StudyTraining] = field(default_factory=dict)
    found: dict[str, list[str]] = field(default_factory=dict)
    """Error -> names of the runs that it is in."""
    measured: Measured = field(default_factory=dict)

    def cell(self, choice: Choice, seed: int, kind: str | None = None) -> Cell:
        """kind: of the training that is the cell's result; None: its stage."""
        places = list(_places(self.study, choice, seed=seed, kind=kind))
        for place in places:
            self._add(place, [place])
        return _cell(choice, places)

    def final_cell(self, group: Sequence[Choice], seed: int) -> Cell:
        """The cell of several choices, of which one will be chosen."""
        *before, first = _places(self.study, group[0], seed=seed, kind=FINAL)
        for place in before:
            self._add(place, [place])
        self._add(first, [replace(first, choice=each) for each in group])
        assert self.study.select is not None
        choice = [each for each in group[0] if each[0].name != self.study.select.axis]
        return _cell(choice, [*before, first])

    def _add(self, place: _Place, alternatives: Sequence[_Place]) -> None:
        """Add the training of a place; with several alternatives, as candidates."""
        if place.name in self.trainings:
            return
        found = [(each, self._training(each)) for each in alternatives]
        candidates = [
            Candidate(
                label=each.measured_by[1],
                trials=self.measured[each.measured_by],
                training=training,
            )
            for each, training in found
            if training is not None and place.kind == FINAL
        ]
        first = found[0][1]
        if first is not None:
            self.trainings[place.name] = replace(first, candidates=tuple(candidates))

    def _training(self, place: _Place) -> StudyTraining | None:
        """None if it is invalid."""
        source = self.trainings.get(place.needs) if place.needs is not None else None
        if place.needs is not None and source is None:
            return None  # its pre-training is invalid
        try:
            run = place.load(source)
            num_tasks = self.num_tasks or run.launch.nodes * run.launch.tasks_per_node
            check_job(run, num_tasks=num_tasks, cluster=self.cluster)
            training = StudyTraining(
                name=place.name, run=run, labels=place.labels, kind=place.kind, needs=place.needs
            )
            return with_costs(training, num_tasks=num_tasks)
        except UserError as error:
            errors = error.errors if isinstance(error, UserErrors) else (error,)
            for each in errors:
                text = each.text().replace(f"{COMMAND_LINE}: ", "override ", 1)
                self.found.setdefault(text, []).append(place.name)
            return None


def in_runs(text: str, names: Sequence[str]) -> UserError:
    """An error that several runs have, with the first of their names."""
    names = list(dict.fromkeys(names))
    shown = ", ".join(names[:MAX_EXAMPLES])
    more = f" and {len(names) - MAX_EXAMPLES} more" if len(names) > MAX_EXAMPLES else ""
    return UserError(f"{text}\n  in: {shown}{more}")


def _cell(choice: Choice, places: Sequence[_Place]) -> Cell:
    names = {place.stage: place.name for place in places}
    return Cell(
        values={axis.name: value for axis, value in choice},
        seed=places[0].seed,
        pretrain=names.get("pretrain"),
        finetune=names.get("finetune"),
    )


def _places(study: StudyRun, choice: Choice, *, seed: int, kind: str | None) -> Iterator[_Place]:
    """The runs of a cell, the one whose metric counts last."""
    stages = list(_stages(study, choice))
    needs = None
    for stage in stages:
        is_result = stage == stages[-1] and kind is not None
        place = _Place(
            study=study, choice=choice, seed=seed, stage=stage,
            kind=kind if is_result and kind else stage, needs=needs,
        )  # fmt: skip
        needs = place.name
        yield place


def _stages(study: StudyRun, choice: Choice) -> Iterator[str]:
    if study.init is None and not any(v.from_scratch or v.init for _, v in choice):
        yield "pretrain"
    if study.finetune is not None:
        yield "finetune"


def _changes_of(value: AxisValue, stage: str) -> StageChange:
    return value.pretrain if stage == "pretrain" else value.finetune


def _concerns(axis: Axis, stage: str) -> bool:
    """Whether any value of the axis changes the runs of this stage itself."""
    return any(
        value.overrides
        or _changes_of(value, stage) != StageChange()
        or (stage == "finetune" and value.init is not None)
        for value in axis.values
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """One run of a cell, before its file is read."""

    study: StudyRun
    choice: Choice
    seed: int
    stage: str
    kind: str
    needs: str | None

    def named_by(self) -> Iterator[tuple[Axis, AxisValue]]:
        """The axes that distinguish this run: a transfer differs with its pre-training too.

        From scratch, what concerns the pre-training alone makes no difference.
        """
        stages = set(_stages(self.study, self.choice)) & {"pretrain", self.stage}
        for axis, value in self.choice:
            if value.from_scratch or any(_concerns(axis, each) for each in stages):
                yield axis, value

    @property
    def labels(self) -> dict[str, str]:
        return {axis.name: value.label for axis, value in self.named_by()}

    @property
    def name(self) -> str:
        """The same for every candidate of a final run."""
        hidden = self.study.select.axis if self.study.select and self.kind == FINAL else None
        parts = [slug(value.label) for axis, value in self.named_by() if axis.name != hidden]
        return "_".join([self.kind, *parts, f"seed{self.seed}"])

    @property
    def measured_by(self) -> tuple[tuple[str, ...], str]:
        """Key of its trials in `Measured`."""
        assert self.study.select is not None
        labels = {axis.name: value.label for axis, value in self.choice}
        return self.study.select_key(labels), labels[self.study.select.axis]

    def load(self, source: StudyTraining | None) -> PretrainRun | FinetuneRun:
        overrides = [*self._overrides(), *self._init(source)]
        run = load_run({self.stage: RUN_TYPES[self.stage]}, self._file(), overrides=overrides).run
        assert isinstance(run, PretrainRun | FinetuneRun)
        return run

    def _file(self) -> str:
        """The run file: the last one that a value names, else the study's."""
        study, stage = self.study, self.stage
        whole = study.pretrain if stage == "pretrain" else study.finetune
        changes = [whole, *(_changes_of(value, stage) for _, value in self.choice)]
        files = [each.file for each in changes if each is not None and each.file is not None]
        if not files:
            raise UserError(
                f"no run file for {stage}",
                where=f"{stage}.file",
                next_step=f"set {stage}.file in the study, or in each value of an axis",
            )
        return files[-1]

    def _overrides(self) -> Iterator[str]:
        study, name = self.study, self.name
        yield from study.overrides
        whole = study.pretrain if self.stage == "pretrain" else study.finetune
        yield from whole.overrides if whole is not None else ()
        for _, value in self.choice:
            yield from value.overrides
            yield from _changes_of(value, self.stage).overrides
        tags = {"study": study.name}
        tags |= {f"study.{axis}": label for axis, label in self.labels.items()}
        if study.select is not None and self.kind in (TRIAL, FINAL):
            yield from study.select.trials if self.kind == TRIAL else ("data.dev_percent=0",)
            yield from study.select.finals if self.kind == FINAL else ()
            tags["study.kind"] = self.kind
        yield f"name={yaml_flow(name)}"
        yield f"output={yaml_flow(str(Path(study.folder) / name))}"
        yield f"seed={self.seed}"
        yield f"tracking.experiment={yaml_flow(study.experiment or study.name)}"
        yield f"tracking.tags={yaml_flow(tags)}"

    def _init(self, source: StudyTraining | None) -> Iterator[str]:
        """The last checkpoint of the pre-training, so that an unfinished one is never used."""
        if source is not None:
            folder = source.folder
            if source.steps is not None:
                folder = step_folder(folder / "checkpoints", source.steps)
            yield f"init={yaml_flow(str(folder))}"
        elif self.stage == "finetune" and not any(v.from_scratch for _, v in self.choice):
            given = [self.study.init, *(value.init for _, value in self.choice)]
            yield f"init={yaml_flow([each for each in given if each is not None][-1])}"


def with_costs(training: StudyTraining, *, num_tasks: int) -> StudyTraining:
    """Size, steps, parameters and compute, as far as the data is known."""
    run, facts = training.run, data_facts(training.run)
    steps, parameters, flops = None, None, None
    if facts.num_samples is not None or run.schedule.steps is not None:
        plan = training_plan(run, world_size=num_tasks, num_samples=facts.num_samples or 0)
        steps = plan.total_steps
    num_classes = planned_classes(run, facts)
    if num_classes is not None:
        arch, objective = run.model.architecture(num_classes=num_classes), run.make_objective()
        parameters = objective.num_parameters(arch)
        if steps is not None:
            flops = objective.train_flops_per_image(arch) * steps * run.data.global_batch
    return replace(
        training, images=facts.num_samples, steps=steps, parameters=parameters, flops=flops
    )
