"""Expand a study into its cells and their runs, all of them validated.

Owns: which runs a cell needs, their names, folders and tags, and one report of all invalid cells.
Leaves out: what is already trained (`states`) and training (`running`, `arrays`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTraining:
    """One run of a study, trained once, however many cells need it."""

    name: str
    run: PretrainRun | FinetuneRun
    labels: dict[str, str]
    """Axis -> label, of the axes that change this run."""
    needs: str | None = None
    """Name of the pre-training that this transfer starts from."""
    images: int | None = None
    """Size of the training set; None while the shards are unknown, as for all below."""
    steps: int | None = None
    parameters: int | None = None
    flops: int | None = None
    """Of the whole run, forward and backward."""

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One combination of the axes' values with one seed."""

    values: dict[str, AxisValue]
    seed: int
    pretrain: str | None
    """Name of the training; None: from scratch."""
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


Choice = Sequence[tuple[Axis, AxisValue]]


def expand(study: StudyRun, *, cluster: str, num_tasks: int | None = None) -> Grid:
    """Load and validate the runs of every cell.

    num_tasks: processes of each run; None: as its `launch` section says.
    Raises UserErrors that name every invalid run, equal errors once.
    """
    cells: list[Cell] = []
    trainings: dict[str, StudyTraining] = {}
    found: dict[str, list[str]] = {}
    axes = [[(axis, value) for value in axis.values] for axis in study.axes]
    for seed, choice in itertools.product(study.seeds, itertools.product(*axes)):
        names: dict[str, str | None] = {"pretrain": None, "finetune": None}
        for stage in _stages(study, choice):
            name = names[stage] = _run_name(study, choice, stage=stage, seed=seed)
            if name in trainings:
                continue
            before = names["pretrain"] if stage == "finetune" else None
            source = trainings.get(before) if before is not None else None
            if before is not None and source is None:
                continue  # its pre-training is invalid
            try:
                overrides = _overrides(study, choice, stage=stage, seed=seed, name=name)
                file = _file(study, choice, stage=stage)
                run = _load(stage, file, [*overrides, *_init(source)])
                check_job(run, num_tasks=num_tasks or _num_tasks(run), cluster=cluster)
                training = StudyTraining(
                    name=name, run=run, labels=_labels(study, choice, stage=stage), needs=before
                )
                trainings[name] = _with_costs(training, num_tasks=num_tasks or _num_tasks(run))
            except UserError as error:
                errors = error.errors if isinstance(error, UserErrors) else (error,)
                for each in errors:
                    text = each.text().replace(f"{COMMAND_LINE}: ", "override ", 1)
                    found.setdefault(text, []).append(name)
        cells.append(Cell(values={a.name: v for a, v in choice}, seed=seed, **names))
    if found:
        raise UserErrors([_in_runs(text, names) for text, names in found.items()])
    return Grid(study=study, cells=tuple(cells), trainings=trainings)


def _num_tasks(run: PretrainRun | FinetuneRun) -> int:
    return run.launch.nodes * run.launch.tasks_per_node


def _in_runs(text: str, names: Sequence[str]) -> UserError:
    names = list(dict.fromkeys(names))
    shown = ", ".join(names[:MAX_EXAMPLES])
    more = f" and {len(names) - MAX_EXAMPLES} more" if len(names) > MAX_EXAMPLES else ""
    return UserError(f"{text}\n  in: {shown}{more}")


def _stages(study: StudyRun, choice: Choice) -> Iterator[str]:
    if not any(value.from_scratch for _, value in choice):
        yield "pretrain"
    if study.finetune is not None:
        yield "finetune"


def _changes_of(value: AxisValue, stage: str) -> StageChange:
    return value.pretrain if stage == "pretrain" else value.finetune


def _concerns(axis: Axis, stage: str) -> bool:
    """Whether any value of the axis changes the runs of this stage itself."""
    return any(
        value.overrides or _changes_of(value, stage) != StageChange() for value in axis.values
    )


def _named_by(study: StudyRun, choice: Choice, *, stage: str) -> Iterator[tuple[Axis, AxisValue]]:
    """The axes that distinguish this run: a transfer differs with its pre-training too.

    From scratch, what concerns the pre-training alone makes no difference.
    """
    stages = set(_stages(study, choice)) & {"pretrain", stage}
    for axis, value in choice:
        if value.from_scratch or any(_concerns(axis, each) for each in stages):
            yield axis, value


def _labels(study: StudyRun, choice: Choice, *, stage: str) -> dict[str, str]:
    return {axis.name: value.label for axis, value in _named_by(study, choice, stage=stage)}


def _run_name(study: StudyRun, choice: Choice, *, stage: str, seed: int) -> str:
    parts = [slug(value.label) for _, value in _named_by(study, choice, stage=stage)]
    return "_".join([stage, *parts, f"seed{seed}"])


def _file(study: StudyRun, choice: Choice, *, stage: str) -> str:
    """The run file: the last one that a value names, else the study's."""
    whole = study.pretrain if stage == "pretrain" else study.finetune
    changes = [whole, *(_changes_of(value, stage) for _, value in choice)]
    files = [change.file for change in changes if change is not None and change.file is not None]
    if not files:
        raise UserError(
            f"no run file for {stage}",
            where=f"{stage}.file",
            next_step=f"set {stage}.file in the study, or in each value of an axis",
        )
    return files[-1]


def _overrides(
    study: StudyRun, choice: Choice, *, stage: str, seed: int, name: str
) -> Iterator[str]:
    yield from study.overrides
    whole = study.pretrain if stage == "pretrain" else study.finetune
    yield from whole.overrides if whole is not None else ()
    for _, value in choice:
        yield from value.overrides
        yield from _changes_of(value, stage).overrides
    labels = _labels(study, choice, stage=stage)
    tags = {"study": study.name} | {f"study.{axis}": label for axis, label in labels.items()}
    yield f"name={yaml_flow(name)}"
    yield f"output={yaml_flow(str(Path(study.folder) / name))}"
    yield f"seed={seed}"
    yield f"tracking.experiment={yaml_flow(study.name)}"
    yield f"tracking.tags={yaml_flow(tags)}"


def _init(source: StudyTraining | None) -> Iterator[str]:
    """The last checkpoint of the pre-training, so that an unfinished one is never used."""
    if source is not None:
        folder = source.folder
        if source.steps is not None:
            folder = step_folder(folder / "checkpoints", source.steps)
        yield f"init={yaml_flow(str(folder))}"


def _load(stage: str, file: str, overrides: Sequence[str]) -> PretrainRun | FinetuneRun:
    run = load_run({stage: RUN_TYPES[stage]}, file, overrides=overrides).run
    assert isinstance(run, PretrainRun | FinetuneRun)
    return run


def _with_costs(training: StudyTraining, *, num_tasks: int) -> StudyTraining:
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
