"""Expand a study into its runs, all of them validated.

Owns: which runs a combination of values needs, their names, folders and tags, and one report of all
invalid runs.
Leaves out: what is already trained (`states`) and training (`running`, `submitting`).
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTraining:
    """One run of a study, trained once, however many combinations of values need it."""

    name: str
    run: PretrainRun | FinetuneRun
    labels: dict[str, str]
    """Axis -> label, of the axes that change this run."""
    kind: str
    """pretrain or finetune."""
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
class Grid:
    """All trainings of a study, each before those that need it."""

    study: StudyRun
    trainings: dict[str, StudyTraining]


Choice = Sequence[tuple[Axis, AxisValue]]


def expand(study: StudyRun, *, cluster: str, num_tasks: int | None = None) -> Grid:
    """Load and validate every run.

    num_tasks: processes of each run; None: as its `launch` section says.
    Raises UserErrors that name every invalid run, equal errors once.
    """
    expansion = _Expansion(study=study, cluster=cluster, num_tasks=num_tasks)
    for seed in study.seeds:
        for choice in itertools.product(*([(axis, v) for v in axis.values] for axis in study.axes)):
            expansion.add(choice, seed)
    if expansion.found:
        raise UserErrors([in_runs(text, names) for text, names in expansion.found.items()])
    return Grid(study=study, trainings=expansion.trainings)


@dataclass(kw_only=True)
class _Expansion:
    """The trainings found so far, and the errors of invalid ones."""

    study: StudyRun
    cluster: str
    num_tasks: int | None
    trainings: dict[str, StudyTraining] = field(default_factory=dict)
    found: dict[str, list[str]] = field(default_factory=dict)
    """Error -> names of the runs that it is in."""

    def add(self, choice: Choice, seed: int) -> None:
        """Add the runs of one combination of values that are not there yet."""
        needs = None
        for stage in _stages(self.study, choice):
            place = _Place(study=self.study, choice=choice, seed=seed, stage=stage, needs=needs)
            needs = place.name
            if place.name not in self.trainings and (training := self._training(place)):
                self.trainings[place.name] = training

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
                name=place.name, run=run, labels=place.labels, kind=place.stage, needs=place.needs
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
    """One run, before its file is read."""

    study: StudyRun
    choice: Choice
    seed: int
    stage: str
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
        labels = (slug(value.label) for _, value in self.named_by())
        return "_".join([self.stage, *labels, f"seed{self.seed}"])

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
