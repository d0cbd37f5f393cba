"""Describe a run before it is submitted, and check what it needs.

Owns: the settings and the plan with the source of each value, cost, batch script; checks of shards,
loader, room for checkpoints and a place in SLURM. Each check is a row: of the table of a dry run,
or a warning or an error before a submission.
Leaves out: the arithmetic (`vitscale.models.costs`, `training_plan`) and submitting.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from finetune.run import FinetuneRun
from finetune.settings import EvaluateRun
from launch.jobs.preparation import (
    LaunchableRun,
    job_folder,
    resources,
    run_name,
    usable_nodes,
)
from launch.jobs.queue import NoAnswerError, ask_slurm, fields_of
from launch.jobs.snapshot import folder_name, read_code
from launch.jobs.status_text import format_size
from launch.jobs.submission import sbatch_text, submission_environment
from pretrain.run import PretrainRun
from vitscale.checkpoint.folders import step_folders
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import yaml_flow
from vitscale.config.redaction import redact
from vitscale.data.index import MANIFEST_NAME, read_split
from vitscale.data.order import check_mixed
from vitscale.data.remote import location_of
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set, open_val_split
from vitscale.data.webdataset import check_shares, tars_of_split
from vitscale.engine.settings import BUCKET_ELEMENTS
from vitscale.models.costs import memory_estimate
from vitscale.models.registry import MODELS
from vitscale.objectives.objective import check_objective
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan

Rows = Iterator[tuple[str, str]]
GIB = 2**30
# Settings of `data` that choose no samples: how batches are made of them.
OF_PIXELS = (
    *(
        "views",
        "num_workers",
        "decoder",
        "max_unreadable_fraction",
        "augment",
        "mixing",
        "horizontal_flip",
    ),
    *("crop", "crop_area", "crop_aspect", "crop_share", "interpolation", "antialias"),
    *(
        "eval_resize",
        "eval_interpolation",
        "eval_antialias",
        "eval_crop_fraction",
        "mean",
        "std",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """Size of the training set (the whole split, or what `data` takes of it), and its source."""

    num_samples: int | None
    source: str
    num_classes: int | None = None
    num_dev: int = 0
    """Samples that `data.dev_percent` holds out of the training set."""
    num_shards: int | None = None
    """None if this machine does not see the shards."""
    num_val: int | None = None
    """Samples of `data.val_split`; None where it is not evaluated."""


KnownFacts = dict[DataSettings, DataFacts]
"""What was counted before, for runs that take the same samples: an index may have a billion."""


def data_facts(
    run: TrainingRun, *, check_files: bool = False, known: KnownFacts | None = None
) -> DataFacts:
    """Counted as the training does if this machine sees the shards, else by
    `data.planned_num_samples`. Raises UserError for damaged shards."""
    known = {} if known is None else known
    defaults = {key: DataSettings.model_fields[key].default for key in OF_PIXELS}
    samples = run.data.model_copy(update=defaults | {"global_batch": 1})
    if samples not in known:
        known[samples] = _count(samples, check_files=check_files)
    return known[samples]


def _count(data: DataSettings, *, check_files: bool) -> DataFacts:
    if data.is_streamed:
        return DataFacts(
            num_samples=data.webdataset.num_samples,
            num_classes=data.webdataset.num_classes or 0,
            source="data.webdataset; tars without an index, no exact resume",
        )
    share = (
        ""
        if data.first_percent == 100
        else f"data.first_percent={data.first_percent:g} of "
    )
    planned, missing = data.planned_num_samples, _missing_part(data)
    if missing is None:
        location = location_of(data.path)
        try:
            opened = open_training_set(data, seed=0, check_files=check_files)
            notes = "".join(f"; {part.note}" for part in opened.parts if part.note)
            evaluated = None
            if check_files:
                for part in opened.parts:
                    check_mixed(
                        part.label, shard_lengths=part.shard_lengths, where="data.path"
                    )
                if not data.dev_percent:
                    evaluated = open_val_split(data, parts=opened.parts)
            return DataFacts(
                num_samples=opened.num_samples,
                num_classes=len(opened.classes),
                source=f"{share}{location / MANIFEST_NAME}"
                + " and data.mixture" * bool(data.mixture)
                + notes,
                num_dev=0 if opened.dev is None else opened.dev.num_samples,
                num_shards=sum(len(part.shard_lengths) for part in opened.parts),
                num_val=None if evaluated is None else evaluated.num_samples,
            )
        except UserError:
            # Only the nodes may see a URL.
            if planned is None or isinstance(location, Path):
                raise
    _, path = missing or ("", data.path)
    if planned is None:
        source = (
            f"no {MANIFEST_NAME} in {path}, and data.planned_num_samples is not set"
        )
        return DataFacts(num_samples=None, source=source)
    # Classes left out are not known before there is an index.
    num_taken = data.num_first(planned)
    num_dev = data.num_dev(num_taken)
    return DataFacts(
        num_samples=num_taken - num_dev,
        source=f"{share}data.planned_num_samples (no {MANIFEST_NAME} in {path} yet)",
        num_dev=num_dev,
    )


def _missing_part(data: DataSettings) -> tuple[str, str] | None:
    """(key, path) of the first folder without shards here."""
    parts = {"data.path": data.path}
    parts |= {
        f"data.mixture[{i}].path": part.path for i, part in enumerate(data.mixture)
    }
    for key, path in parts.items():
        folder = location_of(path)
        if isinstance(folder, Path) and not (folder / MANIFEST_NAME).exists():
            return key, path
    return None


def check_data(run: PretrainRun | FinetuneRun, facts: DataFacts) -> None:
    """Raise UserError for a job whose training images are unknown or lack what it needs."""
    if facts.num_samples is None:
        where, path = _missing_part(run.data) or ("data.path", run.data.path)
        raise UserError(
            f"no shards in {path}",
            where=where,
            next_step="make them with vitscale prepare shards, correct the path, or set "
            "data.planned_num_samples if only the nodes see the folder",
        )
    if facts.num_classes is not None:
        check_objective(run.make_objective(), run, num_classes=facts.num_classes)
    # Raises if the warm-up is longer than the run.
    for nodes in {run.launch.node_counts[-1], run.launch.node_counts[0]}:
        known_plan(run, facts, nodes=nodes)


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
        resources(run),
        name=run_name(run),
        folder=folder,
        code=folder / folder_name(read_code()) if run.launch.snapshot else None,
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
    yield "tasks", size


def plan_rows(run: PretrainRun | FinetuneRun) -> Rows:
    """(name, value) of every derived quantity. Unknown ones name the missing setting."""
    facts = data_facts(run)
    count = (
        "unknown number of" if facts.num_samples is None else f"{facts.num_samples:,}"
    )
    unlabelled = " without labels" if facts.num_classes == 0 else ""
    held_out = f" without {facts.num_dev:,} held out" if facts.num_dev else ""
    yield "data", f"{count} training images{unlabelled}{held_out}, from {facts.source}"
    yield "objective", "; ".join([run.objective.name, *run.make_objective().notes()])
    yield "evaluation", _evaluation_text(run, facts)
    counts, usable = run.launch.node_counts, usable_nodes(run)
    plan = known_plan(run, facts, nodes=counts[-1])
    if len(counts) > 1:
        how = f"{counts[0]} to {counts[-1]}, as many as are free at each start"
        if len(usable) < len(counts):
            used = ", ".join(map(str, usable))
            how += f"; used: {used} (the global batch divides over these)"
        yield "nodes", how
    if plan is None:
        yield (
            "schedule",
            "unknown: epochs need a number of images (data.planned_num_samples)",
        )
    else:
        yield from _schedule_rows(run, facts, plan)
    num_classes = planned_classes(run, facts)
    if num_classes is None:
        yield "model", "unknown: make the shards, or set model.num_classes"
    else:
        # On the fewest nodes a process needs the most memory.
        fewest = known_plan(run, facts, nodes=counts[0])
        yield from _cost_rows(run, fewest, num_classes=num_classes)


def planned_classes(run: PretrainRun | FinetuneRun, facts: DataFacts) -> int | None:
    """Classes of the head, 0 without one; None while neither the run nor the data says."""
    if not run.make_objective().trains_classifier:
        return 0
    return run.model.num_classes or facts.num_classes


def known_plan(
    run: TrainingRun, facts: DataFacts, *, nodes: int
) -> TrainingPlan | None:
    """The plan on this many nodes; None while the number of steps is unknown."""
    if facts.num_samples is None and run.schedule.steps is None:
        return None
    world_size = nodes * run.launch.tasks_per_node
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
        rate += (
            f" until step {plan.total_steps - plan.cooldown_steps:,}, then cooled down"
        )
    if run.schedule.decay not in ("constant", "drops") or plan.cooldown_steps:
        rate += f" to {run.schedule.final_lr:g} at step {plan.total_steps:,}"
    yield "learning rate", rate


def _cost_rows(
    run: PretrainRun | FinetuneRun, plan: TrainingPlan | None, *, num_classes: int
) -> Rows:
    objective, arch = run.make_objective(), run.model.resolved(num_classes=num_classes)
    classes = f"{num_classes:,} classes" if num_classes else "no classes"
    if MODELS[arch.name].costs is None:
        yield (
            "model",
            f"{arch.summary}, {classes}; its costs are known when it is built",
        )
        return
    yield (
        "model",
        f"{objective.num_parameters(arch):,} parameters, {arch.summary}, {classes}",
    )
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
        world_size=plan.world_size,
        precision=precision,
        micro_batch=plan.micro_batch,
        bucket_elements=BUCKET_ELEMENTS,
        activation_checkpointing=run.engine.activation_checkpointing,
        optimizer_bytes=run.optim.state_bytes_per_parameter,
        costs=objective,
    )
    sizes = asdict(memory).items()
    parts = " + ".join(f"{size / GIB:.2f} GiB {name}" for name, size in sizes)
    kind = "GPU" if run.launch.gpus_per_node else "process"
    yield f"memory per {kind}", f"{memory.total / GIB:.2f} GiB = {parts}"
    on = (
        f"on {run.launch.node_counts[0]} nodes, "
        if len(run.launch.node_counts) > 1
        else ""
    )
    yield "", f"({on}ZeRO {run.engine.zero_stage}, {precision}; estimate without slack)"


# ---- checks -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    result: Literal["ok", "warning", "error"]
    detail: str
    next_step: str = ""
    error: UserError | None = None
    """Error that a submission raises; only set for errors."""


def caught(name: str, check: Iterable[Check]) -> list[Check]:
    """The rows of a check, and one for each error that it raises."""
    rows: list[Check] = []
    try:
        rows.extend(check)
    except UserError as error:
        for each in error.errors if isinstance(error, UserErrors) else (error,):
            detail = f"{each.where}: {each.what}" if each.where else each.what
            if each.allowed:
                detail += f"; allowed: {each.allowed}"
            step = each.next_step or ""
            rows.append(Check(name, "error", detail, step, each))
    return rows


def refuse_or_warn(checks: Sequence[Check], *, leave_out: Container[str] = ()) -> None:
    """Print the warnings. Raise UserErrors with all errors, if any.

    leave_out: checks whose warnings are not printed.
    """
    if errors := [check.error for check in checks if check.error is not None]:
        raise UserErrors(errors)
    for check in checks:
        if check.result == "warning" and check.name not in leave_out:
            text = f"warning: {check.name}: {check.detail}\n  next: {check.next_step}"
            print(text, file=sys.stderr, flush=True)


def as_table(checks: Sequence[Check]) -> str:
    """Check, result and detail in columns; what to do in the line below."""
    rows = [("check", "result", "detail")]
    previous = ""
    for check in checks:
        name = "" if check.name == previous else check.name
        rows.append((name, check.result, " ".join(check.detail.split())))
        if check.next_step:
            rows.append(("", "", f"next: {check.next_step}"))
        previous = check.name
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(
        f"{row[0]:<{first}}  {row[1]:<{second}}  {row[2]}".rstrip() for row in rows
    )


def slurm_check(script: str) -> list[Check]:
    """Ask SLURM whether it could start a job with this batch script; not on other machines."""
    if shutil.which("sbatch") is None:
        return []
    try:
        with submission_environment(script):
            ask_slurm("sbatch", "--test-only", stdin=script)
    except NoAnswerError as error:
        next_step = "compare the launch section with what sinfo shows"
        return [
            Check(
                "SLURM", "warning", f"sbatch --test-only: {error}", next_step=next_step
            )
        ]
    accepted = Check("SLURM", "ok", "sbatch --test-only accepts the job")
    return [_time_check(script) or accepted]


def _time_check(script: str) -> Check | None:
    """Warn of a time limit above that of every partition that the job may start in.

    SLURM accepts such a job, unless EnforcePartLimits is set, and never starts it.
    """
    (asked,) = re.findall(r"^#SBATCH --time=(\d+)$", script, re.MULTILINE)
    names = re.findall(r"^#SBATCH --partition=(.+)$", script, re.MULTILINE)
    chosen = (names or [os.environ.get("SBATCH_PARTITION", "")])[0].split(",")
    try:
        lines = ask_slurm("scontrol", "--oneliner", "show", "partition").splitlines()
    except NoAnswerError:
        return None

    limits = {}
    for line in lines:
        fields = fields_of(line)
        is_default = chosen == [""] and fields.get("Default") == "YES"
        if is_default or fields.get("PartitionName") in chosen:
            limits[fields["PartitionName"]] = fields["MaxTime"]
    allowed = max(map(minutes_of, limits.values()), default=math.inf)
    if int(asked) <= allowed:
        return None

    shown = ", ".join(f"{name} has MaxTime={limit}" for name, limit in limits.items())
    return Check(
        "SLURM",
        "warning",
        f"the job would never start: launch.timeout_min={asked} is more than its partition "
        f"allows ({shown})",
        f"launch.timeout_min={allowed:.0f}, at which the job requeues itself and resumes, or "
        "another launch.partition",
    )


def minutes_of(limit: str) -> float:
    """Whole minutes in a limit of SLURM's, such as 2-12:30:00; infinite for UNLIMITED."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):\d+", limit)
    if found is None:
        return math.inf
    days, hours, minutes = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes


def run_checks(run: LaunchableRun, *, known: KnownFacts | None = None) -> list[Check]:
    """Rows about the data, weights, loader and files of a valid run, none of them heavy.

    known: what the checks of other runs have counted, and this one adds to.
    """
    launch = run.launch
    if isinstance(run, DataPrepRun):
        rows = [
            Check("configuration", "ok", f"{run.stage}, {launch.num_tasks} task(s)")
        ]
        images = location_of(run.source.path)
        if isinstance(images, Path) and not images.exists():
            next_step = "correct source.path, unless only the nodes see it"
            rows.append(
                Check("images", "warning", f"{images} does not exist here", next_step)
            )
        return rows
    rows = [Check("configuration", "ok", f"{run.stage}, {launch.num_ranks} task(s)")]
    if isinstance(run, EvaluateRun):
        return rows + caught("data", _evaluation_data(run))
    files = {"init": getattr(run, "init", None)}
    if teacher := getattr(run.objective, "teacher", None):
        files["objective.teacher.weights"] = teacher.weights
    rows += [_weights(key, file) for key, file in files.items() if file]
    return rows + caught("data", _training_checks(run, known))


def _evaluation_data(run: EvaluateRun) -> Iterator[Check]:
    data = run.data
    # The part of `dev_percent` is cut from the training split.
    split = data.val_split or data.train_split
    index = read_split(data.path, split=split, remote_settings=data.remote)
    yield Check("data", "ok", f"{split}: {index.num_samples:,} samples")


def _training_checks(
    run: PretrainRun | FinetuneRun, known: KnownFacts | None
) -> Iterator[Check]:
    facts = data_facts(run, check_files=True, known=known)
    check_data(run, facts)
    yield _training_data(run, facts)
    yield from _loader(run, facts)
    yield from _micro_batches(run, facts)
    yield from caught("disk", _disk(run, facts))


def _training_data(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Check:
    """Counts of the samples and shards. Raises UserError for what is missing or damaged."""
    data = run.data
    if data.is_streamed:
        tars = tars_of_split(
            Path(data.path), data.train_split, where="data.train_split"
        )
        for nodes in usable_nodes(run):
            num_ranks = nodes * run.launch.tasks_per_node
            check_shares(len(tars), num_ranks=num_ranks, num_workers=data.num_workers)
        found = f"{data.train_split}: {len(tars):,} tars; no index: inexact resume"
        return Check("data", "ok", found)
    if facts.num_shards is None:
        found = f"no {MANIFEST_NAME} in {data.path} here; assumed: {facts.num_samples:,} samples"
        next_step = "none if only the nodes see the folder: the job checks it"
        return Check("data", "warning", found, next_step)
    found = f"{data.train_split}: {facts.num_samples:,} samples in {facts.num_shards:,} shards"
    if facts.num_val is not None:
        found += f"; {data.val_split}: {facts.num_val:,} samples"
    return Check("data", "ok", f"{found}; as in the manifest")


def _weights(key: str, file: str) -> Check:
    if file.startswith("hf://") or Path(file).exists():
        return Check("weights", "ok", file)
    next_step = f"correct {key}=, unless another job writes it before this one starts"
    return Check("weights", "warning", f"{file} does not exist here", next_step)


def _loader(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Shards and samples of each loader process, and cores for all processes."""
    workers, samples = run.data.num_workers, facts.num_samples or 0
    num_ranks = run.launch.num_ranks
    processes = num_ranks * max(1, workers)
    each = f"{num_ranks} rank(s) x {max(1, workers)} loader process(es)"
    num_shards = facts.num_shards
    if samples < run.data.global_batch:
        text = (
            f"{samples:,} samples are less than one batch of {run.data.global_batch:,}"
        )
        next_step = "lower data.global_batch, or use more samples"
        yield Check("loader", "warning", text, next_step)
    elif num_shards is not None and num_shards < processes:
        text = f"{num_shards:,} shards for {each}: several processes read one file at a time"
        next_step = (
            "make more shards (shards.min_shards) if the storage is slow at this"
        )
        yield Check("loader", "warning", text, next_step)
    else:
        shards = (
            "" if num_shards is None else f"{num_shards / processes:,.1f} shards and "
        )
        text = f"{shards}{samples / processes:,.0f} samples for each of {each}"
        yield Check("loader", "ok", text)
    needed, cpus = 1 + workers, run.launch.cpus_per_task
    text = f"for 1 training and {workers} loader process(es)"
    if cpus < needed:
        next_step = f"launch.cpus_per_task={needed}, or fewer data.num_workers"
        yield Check("cores", "warning", f"{cpus} core(s) per task {text}", next_step)
    else:
        yield Check("cores", "ok", f"{cpus} per task {text}")


def _micro_batches(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Numbers of nodes on which each rank's share has to be divided into small micro-batches."""
    plans = {nodes: known_plan(run, facts, nodes=nodes) for nodes in usable_nodes(run)}
    advice = {
        nodes: plan.advice for nodes, plan in plans.items() if plan and plan.advice
    }
    if not advice:
        return
    nodes, *others = advice
    more = (
        f" (it is small on {', '.join(map(str, others))} nodes, too)" if others else ""
    )
    next_step = "change data.global_batch, or the number of ranks"
    yield Check("micro-batch", "warning", f"{advice[nodes]}{more}", next_step)


def _disk(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Room for two checkpoints: a new one is complete before an old one is removed."""
    num_classes = planned_classes(run, facts)
    if num_classes is None or MODELS[run.model.name].costs is None:
        return
    folder = Path(run.folder).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write to {there}",
            where="output",
            next_step="choose another output",
        )
    # Weights in fp32, optimiser states, and the average of the weights.
    each = 4 + run.optim.state_bytes_per_parameter + (4 if run.optim.ema else 0)
    arch = run.model.resolved(num_classes=num_classes)
    checkpoint = run.make_objective().num_parameters(arch) * each
    num_there = min(1, len(step_folders(folder / "checkpoints")))
    free, needed = shutil.disk_usage(there).free, (2 - num_there) * checkpoint
    text = f"a checkpoint has {format_size(checkpoint)}; {format_size(free)} free in {there}"
    if free < needed:
        raise UserError(
            f"{text}; {format_size(needed)} needed",
            where="output",
            next_step="free some space, or choose another output",
        )
    yield Check("disk", "ok", text)
