"""Describe a run before it is submitted: settings, plan, cost, batch script.

Owns: the derived values to check before spending GPU hours, and the source of each.
Leaves out: their arithmetic (`vitscale.models.costs`, `training_plan`) and submitting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from finetune.run import FinetuneRun
from finetune.settings import EvaluateRun
from launch.jobs.preparation import LaunchableRun, job_folder, run_name
from launch.jobs.snapshot import planned_folder
from launch.jobs.submission import sbatch_text
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.config.redaction import redact
from vitscale.config.source import yaml_flow
from vitscale.data.index import MANIFEST_NAME
from vitscale.data.storage import location_of
from vitscale.data.training_set import TrainingSet, open_training_set
from vitscale.engine.settings import BUCKET_ELEMENTS
from vitscale.models.costs import memory_estimate
from vitscale.models.registry import MODELS
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan
from vitscale.training.objective import check_objective

Rows = Iterator[tuple[str, str]]
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Size of the training set (the whole split, or what `data` takes of it), and its source."""

    num_samples: int | None
    source: str
    num_classes: int | None = None
    num_dev: int = 0
    """Samples that `data.dev_percent` holds out of the training set."""
    opened: TrainingSet | None = None
    """None if this machine does not see the shards."""


def data_facts(run: TrainingRun, *, check_files: bool = False) -> DataFacts:
    """Counted as the training does if this machine sees the shards, else by
    `data.planned_num_samples`. Raises UserError for damaged shards."""
    data = run.data
    if data.is_streamed:
        return DataFacts(
            num_samples=data.webdataset.num_samples,
            num_classes=data.webdataset.num_classes or 0,
            source="data.webdataset; tars without an index, no exact resume",
        )
    share = "" if data.first_percent == 100 else f"data.first_percent={data.first_percent:g} of "
    planned, missing = data.planned_num_samples, _missing_part(run)
    if missing is None:
        location = location_of(data.path)
        try:
            opened = open_training_set(data, seed=0, check_files=check_files)
            return DataFacts(
                num_samples=opened.num_samples,
                num_classes=len(opened.classes),
                source=f"{share}{location / MANIFEST_NAME}"
                + " and data.mixture" * bool(data.mixture),
                num_dev=0 if opened.dev is None else opened.dev.num_samples,
                opened=opened,
            )
        except UserError:
            # Only the nodes may see a URL.
            if planned is None or isinstance(location, Path):
                raise
    _, path = missing or ("", data.path)
    if planned is None:
        source = f"no {MANIFEST_NAME} in {path}, and data.planned_num_samples is not set"
        return DataFacts(num_samples=None, source=source)
    # Classes left out are not known before there is an index.
    num_taken = data.num_first(planned)
    num_dev = data.num_dev(num_taken)
    return DataFacts(
        num_samples=num_taken - num_dev,
        source=f"{share}data.planned_num_samples (no {MANIFEST_NAME} in {path} yet)",
        num_dev=num_dev,
    )


def _missing_part(run: TrainingRun) -> tuple[str, str] | None:
    """(key, path) of the first folder without shards here."""
    parts = {"data.path": run.data.path}
    parts |= {f"data.mixture[{i}].path": part.path for i, part in enumerate(run.data.mixture)}
    for key, path in parts.items():
        folder = location_of(path)
        if isinstance(folder, Path) and not (folder / MANIFEST_NAME).exists():
            return key, path
    return None


def check_data(run: PretrainRun | FinetuneRun, facts: DataFacts) -> None:
    """Raise UserError for a job whose training images are unknown or lack what it needs."""
    if facts.num_samples is None:
        where, path = _missing_part(run) or ("data.path", run.data.path)
        raise UserError(
            f"no shards in {path}",
            where=where,
            next_step="make them with data_prep/make_shards.py, correct the path, or set "
            "data.planned_num_samples if only the nodes see the folder",
        )
    if facts.num_classes is not None:
        check_objective(run.make_objective(), run, num_classes=facts.num_classes)
    # Raises if the warm-up is longer than the run.
    known_plan(run, facts)


def describe(run: LaunchableRun) -> str:
    """The settings that are not the defaults, and the plan."""
    values = run.model_dump(mode="json", exclude_defaults=True)
    settings = [f"{key}: {redact(yaml_flow(value))}" for key, value in values.items()]
    rows = list(_rows(run))
    width = max(len(name) for name, _ in rows)
    plan = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join(["# Run", f"stage: {run.stage}", *settings, "", "# Plan", *plan])


def batch_script(run: LaunchableRun) -> str:
    """The batch script of the run's job. Writes nothing and needs no SLURM."""
    folder = job_folder(run, cluster="slurm")
    return sbatch_text(
        run.launch,
        name=run_name(run),
        folder=folder,
        code=planned_folder(run.launch, folder),
        run_folder=None if isinstance(run, DataPrepRun) else str(folder.parent),
    )


def _rows(run: LaunchableRun) -> Rows:
    if isinstance(run, DataPrepRun):
        return _data_prep_rows(run)
    return _evaluation_rows(run) if isinstance(run, EvaluateRun) else plan_rows(run)


def _evaluation_rows(run: EvaluateRun) -> Rows:
    yield "model", run.init
    yield "data", f"split {run.data.val_split!r} of {run.data.path}"
    yield "evaluation", ", ".join(each.name for each in run.evaluate)


def _data_prep_rows(run: DataPrepRun) -> Rows:
    launch = run.launch
    yield "images", run.source.path
    yield "shards" if run.script == "make_shards" else "index", run.output
    cores = launch.num_tasks * launch.cpus_per_task
    size = f"{launch.num_tasks:,} task(s) x {launch.cpus_per_task} core(s) = {cores:,} core(s)"
    if launch.num_tasks > 1:
        size += ", as a SLURM array"
    if launch.max_running_tasks is not None:
        size += f", at most {launch.max_running_tasks:,} task(s) at a time"
    yield "tasks", size


def plan_rows(run: PretrainRun | FinetuneRun) -> Rows:
    """(name, value) of every derived quantity. Unknown ones name the missing setting."""
    facts, data = data_facts(run), run.data
    count = "unknown number of" if facts.num_samples is None else f"{facts.num_samples:,}"
    unlabelled = " without labels" if facts.num_classes == 0 else ""
    held_out = f" without {facts.num_dev:,} held out" if facts.num_dev else ""
    yield "data", f"{count} training images{unlabelled}{held_out}, from {facts.source}"
    if facts.opened is not None and facts.opened.keys_text is not None:
        yield "keys", f"{facts.opened.keys_text}, {data.only_keys}"
    yield "objective", "; ".join([run.objective.name, *run.make_objective().notes()])
    yield "evaluation", _evaluation_text(run, facts)
    plan = known_plan(run, facts)
    if plan is None:
        yield "schedule", "unknown: epochs need a number of images (data.planned_num_samples)"
    else:
        yield from _schedule_rows(run, facts, plan)
    num_classes = planned_classes(run, facts)
    if num_classes is None:
        yield "model", "unknown: make the shards, or set model.num_classes"
    else:
        yield from _cost_rows(run, plan, num_classes=num_classes)


def planned_classes(run: PretrainRun | FinetuneRun, facts: DataFacts) -> int | None:
    """Classes of the head, 0 without one; None while neither the run nor the data says."""
    if not run.make_objective().trains_classifier:
        return 0
    return run.model.num_classes or facts.num_classes


def known_plan(run: TrainingRun, facts: DataFacts) -> TrainingPlan | None:
    """None while the number of steps is unknown."""
    if facts.num_samples is None and run.schedule.steps is None:
        return None
    world_size = run.launch.nodes * run.launch.tasks_per_node
    return training_plan(run, world_size=world_size, num_samples=facts.num_samples or 0)


def _evaluation_text(run: PretrainRun | FinetuneRun, facts: DataFacts) -> str:
    evaluations = run.make_objective().evaluations(run)
    if not evaluations:
        return "none"
    if run.data.evaluated is None:
        return "none, because data.val_split is null"
    each = [
        f"{evaluation.name} every {evaluation.every_steps:,} steps"
        if evaluation.every_steps
        else evaluation.name
        for evaluation in evaluations
    ]
    count = f" ({facts.num_dev:,} images)" if facts.num_dev else ""
    return f"{', '.join(each)}; all after the last step, on {run.data.evaluated}{count}"


def _schedule_rows(run: TrainingRun, facts: DataFacts, plan: TrainingPlan) -> Rows:
    yield "batch", plan.equation
    images = plan.total_steps * plan.global_batch
    epochs = f" = {images / facts.num_samples:.4g} epochs" if facts.num_samples else ""
    yield "steps", f"{plan.total_steps:,} steps, {images:,} images{epochs}"
    rate = f"0 to {run.optim.lr:g} over {plan.warmup_steps:,} warm-up steps, then "
    rate += run.schedule.decay
    if run.schedule.drops_at:
        steps = (math.ceil(share * plan.total_steps) for share in run.schedule.drops_at)
        rate += f" to a tenth at steps {', '.join(f'{step:,}' for step in steps)}"
    elif plan.cooldown_steps:
        rate += f" until step {plan.total_steps - plan.cooldown_steps:,}, then cooled down"
    if run.schedule.decay not in ("constant", "drops") or plan.cooldown_steps:
        rate += f" to {run.schedule.final_lr:g} at step {plan.total_steps:,}"
    yield "learning rate", rate


def _cost_rows(
    run: PretrainRun | FinetuneRun, plan: TrainingPlan | None, *, num_classes: int
) -> Rows:
    objective, arch = run.make_objective(), run.model.resolved(num_classes=num_classes)
    classes = f"{num_classes:,} classes" if num_classes else "no classes"
    if MODELS[arch.name].costs is None:
        yield "model", f"{arch.summary}, {classes}; its costs are known when it is built"
        return
    yield "model", f"{objective.num_parameters(arch):,} parameters, {arch.summary}, {classes}"
    flops = objective.train_flops_per_image(arch)
    each = f"{flops / 1e9:,.1f} GFLOPs per training image"
    if plan is None:
        yield "compute", each
        yield "memory", "unknown without a plan"
        return
    spent = flops * plan.global_batch * plan.total_steps
    yield "compute", f"{each}, {spent:.3g} FLOPs for the whole run"
    precision: str = run.engine.precision
    if precision == "auto":
        precision = "bf16" if run.launch.gpus_per_node else "fp32"
    memory = memory_estimate(
        arch,
        zero_stage=run.engine.zero_stage,
        world_size=run.launch.nodes * run.launch.tasks_per_node,
        precision=precision,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        bucket_elements=BUCKET_ELEMENTS,
        activation_checkpointing=run.engine.activation_checkpointing,
        optimizer_bytes=run.optim.state_bytes_per_parameter,
        costs=objective,
    )
    sizes = asdict(memory).items()
    parts = " + ".join(f"{size / GIB:.2f} GiB {name}" for name, size in sizes)
    kind = "GPU" if run.launch.gpus_per_node else "process"
    yield f"memory per {kind}", f"{memory.total / GIB:.2f} GiB = {parts}"
    yield "", f"(ZeRO {run.engine.zero_stage}, {precision}; estimate without slack)"
