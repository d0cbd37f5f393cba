"""Load the stages of a chain: every run validated, in the order in which they can run.

Owns: names and folders of the runs, what they take from earlier stages, and one report of errors.
Leaves out: what is done, running and submitting (`launch.plans`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from finetune.run import FinetuneRun
from launch.jobs.preparation import RUN_TYPES, LaunchableRun, check_job, launchable
from launch.plans.chains.settings import ChainRun, ChainStage
from launch.plans.chains.sweeps import axis_value, stage_of, study_of
from launch.plans.stages import Plan, Stage, Step
from launch.studies.grid import Grid, StudyTraining, expand, with_costs
from launch.studies.settings import Axis
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import load_run, yaml_flow

TRAININGS = ("pretrain", "finetune")
# Key -> kinds of stages that it can be the folder of.
SOURCES = {"data.path": ("data_prep",), "init": TRAININGS}


def load_chain(settings: ChainRun, cluster: str, num_tasks: int | None = None) -> Plan:
    """Load and validate every run.

    num_tasks: processes of each run; None: as its `launch` section says.
    Raises UserErrors that name the stages.
    """
    loading = _Loading(settings, cluster=cluster, num_tasks=num_tasks)
    by_name = {stage.name: stage for stage in settings.stages}
    order = TopologicalSorter({name: stage.needs for name, stage in by_name.items()})
    found: dict[str, Stage] = {}
    errors: list[UserError] = []
    for name in order.static_order():
        if set(by_name[name].needs) <= found.keys():
            try:
                found[name] = loading.stage(by_name[name], found)
            except UserError as error:
                each = error.errors if isinstance(error, UserErrors) else (error,)
                errors += [UserError(f"{e.text()}\n  in: stage {name}") for e in each]
    errors += _unused_overrides(settings, [stage.kind for stage in found.values()])
    errors += _shared_folders(list(found.values()))
    if errors:
        raise UserErrors(errors)
    return Plan(
        name=settings.name,
        kind="chain",
        folder=Path(settings.folder),
        stages=tuple(found.values()),
    )


def _unused_overrides(settings: ChainRun, kinds: Sequence[str]) -> Iterator[UserError]:
    for text in settings.overrides:
        if kinds and not any(_has_key(kind, text) for kind in kinds):
            yield UserError(f"{text}: no stage has this key", where="overrides")


def _shared_folders(stages: Sequence[Stage]) -> Iterator[UserError]:
    """Two data preparations may name the same shards."""
    names: dict[Path, str] = {}
    for stage in stages:
        for step in stage.steps:
            other = names.setdefault(step.folder.absolute(), stage.name)
            if other != stage.name:
                what = f"stages {other} and {stage.name} both write {step.folder}"
                yield UserError(what, where="stages", next_step="set output of one of them")


def _has_key(kind: str, override: str) -> bool:
    return override.partition("=")[0].split(".")[0].strip() in RUN_TYPES[kind].model_fields


@dataclass(frozen=True, slots=True)
class _Loading:
    chain: ChainRun
    cluster: str
    num_tasks: int | None

    def stage(self, stage: ChainStage, before: dict[str, Stage]) -> Stage:
        folder = Path(self.chain.folder) / stage.name
        kind = stage_of(stage.config)
        given = {text.partition("=")[0].strip() for text in stage.overrides}
        if "output" in given and kind != "data_prep":
            what = "the chain sets output itself, from the names of chain and stage"
            raise UserError(what, where="output", next_step="set output of the chain")
        for key, name in stage.inputs.items():
            source = before[name].kind
            if source not in SOURCES.get(key, (source,)):
                what = f"{key}: stage {name} is {source}"
                raise UserError(what, where="inputs", allowed=" or ".join(SOURCES[key]))
        several = {
            key: before[name] for key, name in stage.inputs.items() if len(before[name].steps) > 1
        }
        grid: Grid | None = None
        steps: tuple[Step, ...]
        if kind in TRAININGS and (stage.sweep or several):
            grid = self._grid(stage, before, several)
            steps = tuple(
                self._step(stage.name, each.run, name=f"{stage.name}/{name}", training=each)
                for name, each in grid.trainings.items()
            )
        else:
            steps = tuple(self._runs(stage, kind, before, several))
        return Stage(
            name=stage.name, kind=kind, needs=stage.needs, folder=folder, steps=steps, grid=grid
        )

    def _step(
        self,
        stage: str,
        run: LaunchableRun,
        *,
        name: str | None = None,
        training: StudyTraining | None = None,
    ) -> Step:
        """name: default: the stage's name. training: only for runs of a grid."""
        launch = run.launch
        num_tasks = self.num_tasks or launch.nodes * launch.tasks_per_node
        check_job(run, num_tasks=num_tasks, cluster=self.cluster)
        name = name or stage
        if training is None and isinstance(run, PretrainRun | FinetuneRun):
            bare = StudyTraining(name=name, run=run, labels={}, kind=run.stage)
            training = with_costs(bare, num_tasks=num_tasks)
        return Step(
            name=name,
            run=run,
            num_tasks=num_tasks,
            array=f"{self.chain.name}-{stage}",
            training=training,
        )

    def _overrides(self, stage: ChainStage, kind: str) -> list[str]:
        return [*(each for each in self.chain.overrides if _has_key(kind, each)), *stage.overrides]

    def _inputs(self, stage: ChainStage, before: dict[str, Stage]) -> list[str]:
        """Overrides for the inputs that are one run."""
        return [
            f"{key}={_path(before[name].steps[0])}"
            for key, name in stage.inputs.items()
            if len(before[name].steps) == 1
        ]

    def _grid(self, stage: ChainStage, before: dict[str, Stage], several: dict[str, Stage]) -> Grid:
        axes = [
            Axis(
                name=key,
                values=tuple(
                    axis_value(key, str(step.folder), label=step.short_name)
                    for step in source.steps
                ),
            )
            for key, source in several.items()
        ]
        for key, values in stage.sweep.items():
            if key != "seed":
                values_of = tuple(axis_value(key, value) for value in values)
                axes.append(Axis(name=key, values=values_of))
        study = study_of(
            stage.config,
            [*self._overrides(stage, stage_of(stage.config)), *self._inputs(stage, before)],
            axes,
            seeds=stage.sweep.get("seed"),
            name=f"{self.chain.name}-{stage.name}",
            output=f"{self.chain.folder}/{stage.name}",
        )
        return expand(study, cluster=self.cluster, num_tasks=self.num_tasks)

    def _runs(
        self, stage: ChainStage, kind: str, before: dict[str, Stage], several: dict[str, Stage]
    ) -> Iterator[Step]:
        """One run, or one for each run of the stage that it takes an input from."""
        if stage.sweep:
            what = f"{kind} has no sweep"
            raise UserError(what, where="sweep", allowed="pre-training and fine-tuning")
        if len(several) > 1:
            what = f"{' and '.join(several)} come from stages with several runs"
            raise UserError(what, where="inputs", allowed="one such stage")
        overrides = [*self._overrides(stage, kind), *self._inputs(stage, before)]
        if not several:
            yield self._run(stage.config, stage.name, stage.name, kind, overrides)
            return
        ((key, source),) = several.items()
        for step in source.steps:
            name = f"{stage.name}/{step.short_name}"
            added = [*overrides, f"{key}={_path(step)}"]
            yield self._run(stage.config, stage.name, name, kind, added)

    def _run(self, file: str, stage: str, name: str, kind: str, overrides: Sequence[str]) -> Step:
        own = []
        if kind != "data_prep":
            own = [
                f"name={yaml_flow(f'{self.chain.name}-{name}'.replace('/', '-'))}",
                f"output={yaml_flow(f'{self.chain.folder}/{name}')}",
            ]
        run = load_run(RUN_TYPES, file, overrides=[*overrides, *own]).run
        return self._step(stage, launchable(run), name=name)


def _path(step: Step) -> str:
    """The folder of a step, written as the value of an override."""
    return yaml_flow(str(step.folder))
