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
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from finetune.run import FinetuneRun
from finetune.settings import EmbedData, EmbedRun, EvaluateRun, EvaluationData
from launch.jobs.preparation import (
    LaunchableRun,
    job_folder,
    resources,
    run_name,
    usable_nodes,
)
from launch.jobs.queue import NoAnswerError, ask_slurm, fields_of
from launch.jobs.snapshot import folder_name, read_code
from launch.jobs.status_text import aligned, format_size
from launch.jobs.submission import sbatch_text, submission_environment
from pretrain.run import PretrainRun, TargetsRun
from vitscale.checkpoint.folders import place_of, resolve_weights, step_folders
from vitscale.config.errors import UserError, UserErrors, print_note
from vitscale.config.loader import yaml_flow
from vitscale.config.redaction import redact
from vitscale.data.index import MANIFEST_NAME, read_manifest, read_split
from vitscale.data.order import check_mixed, some_shards
from vitscale.data.remote import location_of
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set, open_val_split
from vitscale.data.webdataset import check_shares, tars_of_split
from vitscale.distributed.processes import num_cores, num_gpus
from vitscale.engine.settings import BUCKET_ELEMENTS
from vitscale.evaluation.registry import EVALUATIONS
from vitscale.models.costs import memory_estimate
from vitscale.models.registry import MODELS
from vitscale.objectives.objective import check_objective
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan

Rows = Iterator[tuple[str, str]]
GIB = 2**30
# Settings of `data` that choose no samples: how batches are made of them.
OF_PIXELS = (
    "repeats views num_workers decoder max_unreadable_fraction augment mixing horizontal_flip "
    "crop crop_area crop_aspect crop_share interpolation antialias "
    "eval_resize eval_interpolation eval_antialias eval_crop_fraction mean std"
).split()


class DataFacts(NamedTuple):
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


KnownFacts = dict[tuple[DataSettings, bool], DataFacts]
"""What was counted before, for runs that take the same samples: an index may have a billion."""


def data_facts(
    run: TrainingRun, *, check_files: bool = False, known: KnownFacts | None = None
) -> DataFacts:
    """Counted as the training does if this machine sees the shards, else by
    `data.planned_num_samples`. Raises UserError for damaged shards."""
    if known is None:
        known = {}

    # Runs that differ in these settings, or in the size of the batch, take the same samples.
    defaults = {key: DataSettings.model_fields[key].default for key in OF_PIXELS}
    samples = run.data.model_copy(update=defaults | {"global_batch": 1})
    needs_labels = run.make_objective().needs_labels
    if (samples, needs_labels) not in known:
        known[samples, needs_labels] = _count(
            samples, check_files=check_files, needs_labels=needs_labels
        )
    return known[samples, needs_labels]


def _count(data: DataSettings, **options: bool) -> DataFacts:
    # Without an index, only reading all tars would count their samples.
    if data.is_streamed:
        return DataFacts(
            num_samples=data.webdataset.num_samples,
            num_classes=data.webdataset.num_classes or 0,
            source="data.webdataset; tars without an index, no exact resume",
        )

    missing = _missing_part(data)
    planned = data.planned_num_samples
    if missing is None:
        try:
            return _count_files(data, **options)
        except UserError:
            # Only the nodes may see a URL.
            if planned is None or isinstance(location_of(data.path), Path):
                raise
        path = data.path
    else:
        _, path = missing

    # The plan then names the setting that it lacks.
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
        source=f"{_share(data)}data.planned_num_samples (no {MANIFEST_NAME} in {path} yet)",
        num_dev=num_dev,
    )


def _count_files(
    data: DataSettings, *, check_files: bool, needs_labels: bool
) -> DataFacts:
    """Count what the index says. check_files: also look at the shards, and at the val split."""
    training_set = open_training_set(
        data, seed=0, check_files=check_files, needs_labels=needs_labels
    )
    parts = training_set.parts

    # A description of the plan needs none of this, which takes time with many shards.
    num_val = None
    if check_files:
        for part in parts:
            shards = some_shards(len(part.ends))
            labels = [part.records(each, each + 1)["label"] for each in shards.tolist()]
            check_mixed(
                np.concatenate(labels),
                shard_lengths=part.shard_lengths[shards],
                where="data.path",
            )
        # With `dev_percent`, the samples held out are those that are evaluated.
        if not data.dev_percent:
            val_split = open_val_split(data, parts=parts)
            if val_split is not None:
                num_val = val_split.num_samples

    num_dev = 0
    if training_set.dev is not None:
        num_dev = training_set.dev.num_samples

    # A reader sees where the numbers come from, and what is left out or repeated.
    source = f"{_share(data)}{location_of(data.path) / MANIFEST_NAME}"
    if data.mixture:
        source += " and data.mixture"
    for part in parts:
        if part.note:
            source += f"; {part.note}"

    return DataFacts(
        num_samples=training_set.num_samples,
        num_classes=len(training_set.classes),
        source=source,
        num_dev=num_dev,
        num_shards=sum(len(part.ends) for part in parts),
        num_val=num_val,
    )


def _share(data: DataSettings) -> str:
    if data.first_percent == 100:
        return ""
    return f"data.first_percent={data.first_percent:g} of "


def _missing_part(data: DataSettings) -> tuple[str, str] | None:
    """Return (key, path) of the first folder without shards here, or None."""
    paths = {"data.path": data.path}
    for number, part in enumerate(data.mixture):
        paths[f"data.mixture[{number}].path"] = part.path

    for key, path in paths.items():
        folder = location_of(path)
        # Whether a URL has shards shows when it is opened.
        if isinstance(folder, Path) and not (folder / MANIFEST_NAME).exists():
            return key, path
    return None


def check_data(run: PretrainRun | FinetuneRun, facts: DataFacts) -> None:
    """Raise UserError for a job whose training images are unknown or lack what it needs."""
    # Neither an index nor the settings say how many there are.
    if facts.num_samples is None:
        where, path = _missing_part(run.data) or ("data.path", run.data.path)
        raise UserError(
            f"no shards in {path}",
            where=where,
            next_step="make them with vitscale prepare shards, correct the path, or set "
            "data.planned_num_samples if only the nodes see the folder",
        )

    # Here the shards are known, and with them the labels that the objective may need.
    if facts.num_classes is not None:
        check_objective(run.make_objective(), run, num_classes=facts.num_classes)

    # Raises if the warm-up is longer than the run.
    for nodes in {run.launch.node_counts[-1], run.launch.node_counts[0]}:
        known_plan(run, facts, nodes=nodes)


def describe(run: LaunchableRun) -> str:
    """The settings that are not the defaults, and the plan."""
    # Links may have passwords in them.
    values = run.model_dump(mode="json", exclude_defaults=True)
    settings = [f"{key}: {redact(yaml_flow(value))}" for key, value in values.items()]

    plan = aligned(list(_known_rows(run)))
    return "\n".join(["# Run", f"stage: {run.stage}", *settings, "", "# Plan", *plan])


def batch_script(run: LaunchableRun) -> str:
    """The batch script of the run's job. Writes nothing and needs no SLURM."""
    folder = job_folder(run, cluster="slurm")

    # Its name follows from the code, so it is known before it is written.
    code = None
    if run.launch.snapshot:
        code = folder / folder_name(read_code())

    # Each task of a data preparation has a record of its own.
    run_folder = None
    if not isinstance(run, DataPrepRun):
        run_folder = str(folder.parent)

    return sbatch_text(
        resources(run),
        name=run_name(run),
        folder=folder,
        code=code,
        run_folder=run_folder,
    )


def _known_rows(run: LaunchableRun) -> Rows:
    """The rows of a plan up to the first error, which ends it; the checks find the others."""
    try:
        if isinstance(run, DataPrepRun):
            yield from _data_prep_rows(run)
        elif isinstance(run, EvaluateRun):
            yield from _evaluation_rows(run)
        elif isinstance(run, EmbedRun):
            yield "data", f"split {run.data.split!r} of {run.data.path}"
        elif isinstance(run, TargetsRun):
            yield (
                "targets",
                f"{run.views} views of each image, {run.precision}, in {run.output}",
            )
        else:
            yield from plan_rows(run)
    except UserError as error:
        yield "error", f"{error.where}: {error.what}"


def _evaluation_rows(run: EvaluateRun) -> Rows:
    yield "model", run.init
    yield "data", f"split {run.data.val_split!r} of {run.data.path}"
    yield "evaluation", ", ".join(evaluation.name for evaluation in run.evaluate)


def _data_prep_rows(run: DataPrepRun) -> Rows:
    yield "images", run.source.path
    output = "index"
    if run.script == "make_shards":
        output = "shards"
    yield output, run.output

    launch = run.launch
    cores = launch.num_tasks * launch.cpus_per_task
    size = f"{launch.num_tasks:,} task(s) x {launch.cpus_per_task} core(s) = {cores:,} core(s)"
    if launch.num_tasks > 1:
        size += ", as a SLURM array"
    yield "tasks", size


def plan_rows(run: PretrainRun | FinetuneRun) -> Rows:
    """(name, value) of every derived quantity. Unknown ones name the missing setting."""
    facts = data_facts(run)
    data = "unknown number of training images"
    if facts.num_samples is not None:
        data = f"{facts.num_samples:,} training images"
    if facts.num_classes == 0:
        data += " without labels"
    if facts.num_dev:
        data += f" without {facts.num_dev:,} held out"
    yield "data", f"{data}, from {facts.source}"
    yield "objective", "; ".join([run.objective.name, *run.make_objective().notes()])
    yield "evaluation", _evaluation_text(run, facts)

    # SLURM decides at each start; the ranks then use as many nodes as the batch divides over.
    node_counts = run.launch.node_counts
    usable = usable_nodes(run)
    if len(node_counts) > 1:
        nodes = (
            f"{node_counts[0]} to {node_counts[-1]}, as many as are free at each start"
        )
        if len(usable) < len(node_counts):
            used = ", ".join(map(str, usable))
            nodes += f"; used: {used} (the global batch divides over these)"
        yield "nodes", nodes

    # Of these rows, only the equation of the batch depends on the number of nodes.
    plan = known_plan(run, facts, nodes=node_counts[-1])
    if plan is None:
        schedule = "unknown: epochs need a number of images (data.planned_num_samples)"
        yield "schedule", schedule
    else:
        yield from _schedule_rows(run, facts, plan)

    num_classes = planned_classes(run, facts)
    if num_classes is None:
        yield "model", "unknown: make the shards, or set model.num_classes"
    else:
        # On the fewest nodes a process needs the most memory.
        fewest = known_plan(run, facts, nodes=node_counts[0])
        yield from _cost_rows(run, fewest, num_classes=num_classes)


def planned_classes(run: PretrainRun | FinetuneRun, facts: DataFacts) -> int | None:
    """Classes of the head, 0 without one; None while neither the run nor the data says."""
    # Classes of the data do not matter to an objective without labels.
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

    # Each evaluation has an interval of its own.
    names = []
    for evaluation in evaluations:
        name = evaluation.name
        if evaluation.every_steps:
            name += f" every {evaluation.every_steps:,} steps"
        names.append(name)
    text = f"{', '.join(names)}; all after the last step, on {run.data.evaluated}"
    if facts.num_dev:
        text += f" ({facts.num_dev:,} images)"
    return text


def _schedule_rows(run: TrainingRun, facts: DataFacts, plan: TrainingPlan) -> Rows:
    yield "batch", plan.equation

    images = plan.total_steps * plan.global_batch
    steps = f"{plan.total_steps:,} steps, {images:,} images"
    if facts.num_samples:
        steps += f" = {images / facts.num_samples:.4g} epochs"
    yield "steps", steps

    # The rate in the order in which it changes: warm-up, decay, and what ends it.
    schedule = run.schedule
    rate = f"0 to {run.optim.lr:g} over {plan.warmup_steps:,} warm-up steps, then "
    rate += schedule.decay
    if schedule.drops_at:
        drops = [math.ceil(share * plan.total_steps) for share in schedule.drops_at]
        rate += f" to a tenth at steps {', '.join(f'{step:,}' for step in drops)}"
    elif plan.cooldown_steps:
        cooldown_start = plan.total_steps - plan.cooldown_steps
        rate += f" until step {cooldown_start:,}, then cooled down"
    if schedule.decay not in ("constant", "drops") or plan.cooldown_steps:
        rate += f" to {schedule.final_lr:g} at step {plan.total_steps:,}"
    yield "learning rate", rate
    if schedule.is_staged:
        yield (
            "backbone",
            f"frozen for {schedule.freeze_backbone_steps:,} steps, then its rate rises to its own "
            f"over {schedule.backbone_ramp_steps:,}",
        )


def _cost_rows(
    run: PretrainRun | FinetuneRun, plan: TrainingPlan | None, *, num_classes: int
) -> Rows:
    objective = run.make_objective()
    arch = run.model.resolved(num_classes=num_classes)
    summary = f"{arch.summary}, no classes"
    if num_classes:
        summary = f"{arch.summary}, {num_classes:,} classes"

    # A model of timm is counted when it is built, which needs torch.
    if MODELS[arch.name].costs is None:
        yield "model", f"{summary}; its costs are known when it is built"
        return
    yield "model", f"{objective.num_parameters(arch):,} parameters, {summary}"

    flops = objective.train_flops_per_image(arch)
    compute = f"{flops / 1e9:,.1f} GFLOPs per training image"
    if plan is None:
        yield "compute", compute
        yield "memory", "unknown without a plan"
        return
    total_flops = flops * plan.global_batch * plan.total_steps
    yield "compute", f"{compute}, {total_flops:.3g} FLOPs for the whole run"

    # The login node may have no GPU, so what the job asks for decides.
    device = "process"
    auto_precision = "fp32"
    if run.launch.gpus_per_node:
        device = "GPU"
        auto_precision = "bf16"
    precision: str = run.engine.precision
    if precision == "auto":
        precision = auto_precision
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
    yield f"memory per {device}", f"{memory.total / GIB:.2f} GiB = {parts}"

    conditions = f"ZeRO {run.engine.zero_stage}, {precision}; estimate without slack"
    if len(run.launch.node_counts) > 1:
        conditions = f"on {run.launch.node_counts[0]} nodes, {conditions}"
    yield "", f"({conditions})"


# ---- checks -----------------------------------------------------------------------------------


class Check(NamedTuple):
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
        # Rows that came before an error are kept.
        rows.extend(check)
    except UserError as error:
        # One error may stand for several.
        for problem in getattr(error, "errors", [error]):
            detail = problem.what
            if problem.where:
                detail = f"{problem.where}: {detail}"
            if problem.allowed:
                detail += f"; allowed: {problem.allowed}"
            next_step = problem.next_step or ""
            rows.append(Check(name, "error", detail, next_step, problem))
    return rows


def refuse_or_warn(checks: Sequence[Check], *, leave_out: Container[str] = ()) -> None:
    """Print the warnings. Raise UserErrors with all errors, if any.

    leave_out: checks whose warnings are not printed.
    """
    errors = [check.error for check in checks if check.error is not None]
    if errors:
        raise UserErrors(errors)

    for check in checks:
        if check.result == "warning" and check.name not in leave_out:
            text = f"warning: {check.name}: {check.detail}\n  next: {check.next_step}"
            print_note(text)


def as_table(checks: Sequence[Check]) -> str:
    """Check, result and detail in columns; what to do in the line below."""
    rows = [("check", "result", "detail")]
    previous = ""
    for check in checks:
        # The name stands at the first of its rows alone.
        name = check.name
        if name == previous:
            name = ""
        previous = check.name
        rows.append((name, check.result, " ".join(check.detail.split())))
        if check.next_step:
            rows.append(("", "", f"next: {check.next_step}"))

    return "\n".join(aligned(rows))


def slurm_check(script: str) -> list[Check]:
    """Ask SLURM whether it could start a job with this batch script; not on other machines."""
    if shutil.which("sbatch") is None:
        return []

    # As a submission does, without the variables that would outrank the script.
    try:
        with submission_environment(script):
            ask_slurm("sbatch", "--test-only", stdin=script)
    except NoAnswerError as error:
        detail = f"sbatch --test-only: {error}"
        next_step = "compare the launch section with what sinfo shows"
        return [Check("SLURM", "warning", detail, next_step)]

    # The test accepts a job that its partition never starts.
    warning = _time_check(script)
    if warning is not None:
        return [warning]
    return [Check("SLURM", "ok", "sbatch --test-only accepts the job")]


def _time_check(script: str) -> Check | None:
    """Warn of a time limit above that of every partition that the job may start in.

    SLURM accepts such a job, unless EnforcePartLimits is set, and never starts it.
    """
    (asked,) = re.findall(r"^#SBATCH --time=(\d+)$", script, re.MULTILINE)
    chosen = os.environ.get("SBATCH_PARTITION", "")
    # The script outranks the site's variable, which is left out then.
    if named := re.search(r"^#SBATCH --partition=(.+)$", script, re.MULTILINE):
        chosen = named[1]
    try:
        lines = ask_slurm("scontrol", "--oneliner", "show", "partition").splitlines()
    except NoAnswerError:
        return None

    # Without a choice, the job goes to the default partition.
    limits = {}
    for line in lines:
        fields = fields_of(line)
        is_chosen = fields.get("PartitionName") in chosen.split(",")
        if not chosen:
            is_chosen = fields.get("Default") == "YES"
        if is_chosen:
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
    parts = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):\d+", limit)
    if parts is None:
        return math.inf
    # SLURM leaves the days out where there are none.
    days, hours, minutes = (int(part or 0) for part in parts.groups())
    return (days * 24 + hours) * 60 + minutes


def run_checks(run: LaunchableRun, *, known: KnownFacts | None = None) -> list[Check]:
    """Rows about the data, weights, loader and files of a valid run, none of them heavy.

    known: what the checks of other runs have counted, and this one adds to.
    """
    # Only a data preparation has several tasks, and only other stages have several ranks.
    num_tasks = run.launch.num_tasks * run.launch.num_ranks
    rows = [Check("configuration", "ok", f"{run.stage}, {num_tasks} task(s)")]
    if isinstance(run, DataPrepRun):
        return rows + list(_source(run))
    if isinstance(run, EvaluateRun):
        splits = _evaluated_splits(run)
        return rows + caught("data", _splits(run.data, splits))
    if isinstance(run, EmbedRun):
        return rows + caught("data", _splits(run.data, [run.data.split]))

    rows += [_weights(key, file) for key, file in _files(run).items()]
    return rows + caught("data", _training_checks(run, known))


def _files(run: LaunchableRun) -> dict[str, str]:
    """Weights that a first start reads, by their setting."""
    files = {"init": getattr(run, "init", None)}
    objective = getattr(run, "objective", None)
    if teacher := getattr(objective, "teacher", None):
        files["objective.teacher.weights"] = teacher.weights
    for number, teacher in enumerate(getattr(objective, "teachers", ())):
        files[f"objective.teachers[{number}].weights"] = teacher.weights
    return {key: file for key, file in files.items() if file}


def check_here(run: LaunchableRun, *, num_procs: int) -> None:
    """Print warnings, and raise UserErrors for what this machine lacks to start the run now."""
    check_device(run)
    if isinstance(run, TrainingRun) and not run.data.is_streamed:
        read_manifest(run.data.path)
    _fetch_weights(run)
    rows = run_checks(on_this_machine(run, num_procs))
    refuse_or_warn(rows, leave_out={"cores", "micro-batch", "weights"})


def on_this_machine(run: LaunchableRun, num_procs: int) -> LaunchableRun:
    """The run with the launch section of a local start, where shards must be there."""
    sizes = {
        "nodes": 1,
        "tasks_per_node": num_procs,
        "gpus_per_node": num_gpus(),
        "cpus_per_task": max(1, num_cores() // num_procs),
    }
    launch = run.launch.model_copy(update=sizes)
    return run.model_copy(update={"launch": launch})


def has_gpu() -> bool:
    """Whether this machine may have a GPU: NVIDIA's, also in a container and in WSL, or AMD's."""
    devices = ("nvidiactl", "dxg", "kfd")
    return num_gpus() > 0 or any(Path("/dev", name).exists() for name in devices)


def check_device(run: LaunchableRun) -> None:
    """Raise UserError for a GPU that is asked for and not here."""
    group = "engine" if isinstance(run, TrainingRun) else "compute"
    values = getattr(run, group, None)
    for key, value in (("device", "cuda"), ("precision", "fp16")):
        if getattr(values, key, None) == value and not has_gpu():
            raise UserError(
                f"{value} needs a GPU, and this machine has none",
                where=f"{group}.{key}",
                next_step=f"set {group}.{key}=auto, or start it on another machine",
            )


def _fetch_weights(run: LaunchableRun) -> None:
    """Fetch the weights that a first start reads. Raises UserError for those that are missing."""
    # A resume reads its own ones.
    if isinstance(run, TrainingRun) and step_folders(Path(run.folder, "checkpoints")):
        return
    for key, file in _files(run).items():
        if file.startswith("hf://"):
            from vitscale.models.weights.hub import fetch  # half a second

            fetch(file, key=key)
        elif not Path(file).exists():
            # It raises, and names what is there instead.
            resolve_weights(file, key=key)


def _source(run: DataPrepRun) -> Iterator[Check]:
    images = location_of(run.source.path)
    if isinstance(images, Path) and not images.exists():
        next_step = "correct source.path, unless only the nodes see it"
        yield Check("images", "warning", f"{images} does not exist here", next_step)


def _evaluated_splits(run: EvaluateRun) -> list[str | None]:
    data = run.data
    splits = [data.val_split]
    needs = {EVALUATIONS[settings.name].needs for settings in run.evaluate}
    # Probes learn from the training split, and the part of `dev_percent` is cut from it.
    if data.val_split is None or needs != {"logits"}:
        splits.append(data.train_split)
    return splits


def _splits(
    data: EvaluationData | EmbedData, splits: Iterable[str | None]
) -> Iterator[Check]:
    for split in filter(None, splits):
        index = read_split(data.path, split=split, remote_settings=data.remote)
        yield Check("data", "ok", f"{split}: {index.num_samples:,} samples")


def _training_checks(
    run: PretrainRun | FinetuneRun, known: KnownFacts | None
) -> Iterator[Check]:
    facts = data_facts(run, check_files=True, known=known)
    check_data(run, facts)
    yield _training_data(run, facts)
    if isinstance(run, TargetsRun):
        return
    yield from _loader(run, facts)
    yield from _micro_batches(run, facts)
    # The error of the disk has a row of its own beside those of the data.
    yield from caught("disk", _disk(run, facts))


def _training_data(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Check:
    """Counts of the samples and shards. Raises UserError for what is missing or damaged."""
    data = run.data
    split = data.train_split
    if data.is_streamed:
        tars = tars_of_split(Path(data.path), split, where="data.train_split")
        # Every number of nodes that the job may start with has to have tars for its ranks.
        for nodes in usable_nodes(run):
            num_ranks = nodes * run.launch.tasks_per_node
            check_shares(len(tars), num_ranks=num_ranks, num_workers=data.num_workers)
        detail = f"{split}: {len(tars):,} tars; no index: inexact resume"
        return Check("data", "ok", detail)

    # The shards are not here, so the number is that of the settings.
    if facts.num_shards is None:
        detail = f"no {MANIFEST_NAME} in {data.path} here; assumed: {facts.num_samples:,} samples"
        next_step = "none if only the nodes see the folder: the job checks it"
        return Check("data", "warning", detail, next_step)

    detail = f"{split}: {facts.num_samples:,} samples in {facts.num_shards:,} shards"
    if facts.num_val is not None:
        detail += f"; {data.val_split}: {facts.num_val:,} samples"
    return Check("data", "ok", f"{detail}; as in the manifest")


def _weights(key: str, file: str) -> Check:
    # Weights on a hub are fetched when they are needed.
    if file.startswith("hf://") or place_of(file).exists():
        return Check("weights", "ok", file)
    next_step = f"correct {key}=, unless another job writes it before this one starts"
    return Check("weights", "warning", f"{file} does not exist here", next_step)


def _loader(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Check shards and samples of each loader process, and cores for all processes."""
    num_workers = run.data.num_workers
    num_ranks = run.launch.num_ranks
    # Without workers the rank itself loads.
    per_rank = max(1, num_workers)
    processes = num_ranks * per_rank
    readers = f"{num_ranks} rank(s) x {per_rank} loader process(es)"

    num_samples = facts.num_samples or 0
    num_shards = facts.num_shards
    if num_samples < run.data.global_batch:
        detail = f"{num_samples:,} samples are less than one batch of {run.data.global_batch:,}"
        next_step = "lower data.global_batch, or use more samples"
        yield Check("loader", "warning", detail, next_step)
    elif num_shards is not None and num_shards < processes:
        detail = f"{num_shards:,} shards for {readers}: several processes read one file at a time"
        next_step = (
            "make more shards (shards.min_shards) if the storage is slow at this"
        )
        yield Check("loader", "warning", detail, next_step)
    else:
        detail = f"{num_samples / processes:,.0f} samples for each of {readers}"
        if num_shards is not None:
            detail = f"{num_shards / processes:,.1f} shards and {detail}"
        yield Check("loader", "ok", detail)

    # A rank that shares its core with its loader waits for it.
    cores = run.launch.cpus_per_task
    needed = 1 + num_workers
    purpose = f"for 1 training and {num_workers} loader process(es)"
    if cores < needed:
        next_step = f"launch.cpus_per_task={needed}, or fewer data.num_workers"
        detail = f"{cores} core(s) per task {purpose}"
        yield Check("cores", "warning", detail, next_step)
    else:
        yield Check("cores", "ok", f"{cores} per task {purpose}")


def _micro_batches(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Warn of numbers of nodes on which a rank's share falls into small micro-batches."""
    advice = {}
    for nodes in usable_nodes(run):
        plan = known_plan(run, facts, nodes=nodes)
        if plan is not None and plan.advice:
            advice[nodes] = plan.advice
    if not advice:
        return

    # One text is enough: the others differ in numbers alone.
    nodes, *others = advice
    detail = advice[nodes]
    if others:
        detail += f" (it is small on {', '.join(map(str, others))} nodes, too)"
    next_step = "change data.global_batch, or the number of ranks"
    yield Check("micro-batch", "warning", detail, next_step)


def _disk(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Check the room for two checkpoints: a new one is complete before an old one is removed."""
    num_classes = planned_classes(run, facts)
    # The size of the model is not known yet.
    if num_classes is None or MODELS[run.model.name].costs is None:
        return

    # Training makes the folders that are missing, so the first that exists has to take them.
    folder = Path(run.folder).absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write to {parent}",
            where="output",
            next_step="choose another output",
        )

    # Weights in fp32, optimiser states, and the average of the weights.
    bytes_per_parameter = 4 + run.optim.state_bytes_per_parameter
    if run.optim.ema:
        bytes_per_parameter += 4
    arch = run.model.resolved(num_classes=num_classes)
    checkpoint = run.make_objective().num_parameters(arch) * bytes_per_parameter

    # A run that resumes has one already.
    needed = 2 * checkpoint
    if step_folders(folder / "checkpoints"):
        needed = checkpoint
    free = shutil.disk_usage(parent).free
    detail = f"a checkpoint has {format_size(checkpoint)}; {format_size(free)} free in {parent}"
    if free < needed:
        raise UserError(
            f"{detail}; {format_size(needed)} needed",
            where="output",
            next_step="free some space, or choose another output",
        )
    yield Check("disk", "ok", detail)
