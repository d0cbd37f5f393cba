"""Check what a run needs: shards, loader, room for its checkpoints, and a place in SLURM.

The results are rows: shown as a table, or warnings and errors before a run is submitted.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune.run import FinetuneRun
from finetune.settings import EvaluateRun
from launch.jobs.preparation import LaunchableRun
from launch.jobs.queue import NoAnswerError, ask_slurm
from launch.jobs.submission import outside_any_job
from launch.planning.dry_run import GIB, DataFacts, check_data, data_facts, planned_classes
from pretrain.run import PretrainRun
from vitscale.checkpoint.folders import step_folders
from vitscale.config.errors import UserError, UserErrors
from vitscale.data.index import MANIFEST_NAME, read_split
from vitscale.data.order import check_mixed
from vitscale.data.storage import location_of
from vitscale.data.training_set import TrainingSet, open_val_split
from vitscale.data.webdataset import tars_of_split
from vitscale.models.registry import MODELS
from vitscale.runs.data_prep import DataPrepRun


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    name: str
    result: Literal["ok", "warning", "error"]
    detail: str
    next_step: str = ""
    error: UserError | None = None
    """What is raised if the run is submitted; only of errors."""


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
        rows.append((name, check.result, check.detail.replace("\n", " ")))
        if check.next_step:
            rows.append(("", "", f"next: {check.next_step}"))
        previous = check.name
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{row[0]:<{first}}  {row[1]:<{second}}  {row[2]}".rstrip() for row in rows)


# ---- the checks -------------------------------------------------------------------------------


def slurm_check(script: str) -> list[Check]:
    """Ask SLURM whether it could start a job with this batch script; not on other machines."""
    if shutil.which("sbatch") is None:
        return []
    try:
        with outside_any_job():
            ask_slurm("sbatch", "--test-only", stdin=script)
    except NoAnswerError as error:
        next_step = "compare the launch section with what sinfo shows"
        return [Check("SLURM", "warning", f"sbatch --test-only: {error}", next_step=next_step)]
    return [Check("SLURM", "ok", "the job can start on the nodes as they are")]


def run_checks(run: LaunchableRun) -> list[Check]:
    """Rows about the data, weights, loader and files of a valid run, none of them heavy."""
    launch = run.launch
    if isinstance(run, DataPrepRun):
        return [Check("configuration", "ok", f"{run.stage}, {launch.num_tasks} task(s)")]
    num_tasks = launch.nodes * launch.tasks_per_node
    rows = [Check("configuration", "ok", f"{run.stage}, {num_tasks} task(s)")]
    if isinstance(run, EvaluateRun):
        return rows + caught("data", _evaluation_data(run))
    if isinstance(run, FinetuneRun) and run.init is not None:
        rows.append(_weights(run.init))
    return rows + caught("data", _training_checks(run))


def _is_local(path: str) -> bool:
    """Whether sizes of files are compared: of thousands of remote ones it would take minutes."""
    return isinstance(location_of(path), Path)


def _evaluation_data(run: EvaluateRun) -> Iterator[Check]:
    data = run.data
    index = read_split(
        data.path,
        split=data.val_split,
        remote_settings=data.remote,
        check_files=_is_local(data.path),
    )
    yield Check("data", "ok", f"{data.val_split}: {index.num_samples:,} samples")


def _training_checks(run: PretrainRun | FinetuneRun) -> Iterator[Check]:
    facts = data_facts(run, check_files=_is_local(run.data.path))
    check_data(run, facts)
    yield _training_data(run, facts)
    yield from _loader(run, facts)
    yield from caught("disk", _disk(run, facts))


def _training_data(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Check:
    """Counts of the samples and shards. Raises UserError for what is missing or damaged."""
    data = run.data
    if data.is_streamed:
        tars = tars_of_split(Path(data.path), data.train_split, where="data.train_split")
        found = f"{data.train_split}: {len(tars):,} tars; no index: inexact resume"
        return Check("data", "ok", found)
    if facts.opened is None:
        found = f"no {MANIFEST_NAME} in {data.path} here; assumed: {facts.num_samples:,} samples"
        next_step = "none if only the nodes see the folder: the job checks it"
        return Check("data", "warning", found, next_step)
    for part in facts.opened.parts:
        check_mixed(part.label, shard_lengths=part.shard_lengths, where="data.path")
    num_shards = _num_shards(facts.opened)
    found = f"{data.train_split}: {facts.num_samples:,} samples in {num_shards:,} shards"
    check_files = _is_local(data.path)
    evaluated = None if data.dev_percent else open_val_split(data, check_files=check_files)
    if evaluated is not None:
        found += f"; {data.val_split}: {evaluated.num_samples:,} samples"
    return Check("data", "ok", f"{found}; as in the manifest")


def _num_shards(opened: TrainingSet) -> int:
    return sum(len(part.shard_lengths) for part in opened.parts)


def _weights(init: str) -> Check:
    if Path(init).exists():
        return Check("weights", "ok", init)
    next_step = "correct init=, unless another job writes it before this one starts"
    return Check("weights", "warning", f"{init} does not exist here", next_step)


def _loader(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Shards and samples of each loader process, and cores for all processes."""
    workers, samples = run.data.num_workers, facts.num_samples or 0
    num_ranks = run.launch.nodes * run.launch.tasks_per_node
    processes = num_ranks * max(1, workers)
    each = f"{num_ranks} rank(s) x {max(1, workers)} loader process(es)"
    num_shards = None if facts.opened is None else _num_shards(facts.opened)
    if samples < run.data.global_batch:
        text = f"{samples:,} samples are less than one batch of {run.data.global_batch:,}"
        next_step = "lower data.global_batch, or use more samples"
        yield Check("loader", "warning", text, next_step)
    elif num_shards is not None and num_shards < processes:
        text = f"{num_shards:,} shards for {each}: several processes read one file at a time"
        next_step = "make more shards (shards.min_shards) if the storage is slow at this"
        yield Check("loader", "warning", text, next_step)
    else:
        shards = "" if num_shards is None else f"{num_shards / processes:,.1f} shards and "
        text = f"{shards}{samples / processes:,.0f} samples for each of {each}"
        yield Check("loader", "ok", text)
    needed, cpus = 1 + workers, run.launch.cpus_per_task
    text = f"for 1 training and {workers} loader process(es)"
    if cpus < needed:
        next_step = f"launch.cpus_per_task={needed}, or fewer data.num_workers"
        yield Check("cores", "warning", f"{cpus} core(s) per task {text}", next_step)
    else:
        yield Check("cores", "ok", f"{cpus} per task {text}")


def _disk(run: PretrainRun | FinetuneRun, facts: DataFacts) -> Iterator[Check]:
    """Room for two checkpoints: a new one is complete before an old one is removed."""
    num_classes = planned_classes(run, facts)
    if num_classes is None or MODELS[run.model.name].costs is None:
        return
    folder = Path(run.folder).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write to {there}", where="output", next_step="choose another output"
        )
    # Weights in fp32, optimiser states, and the average of the weights.
    each = 4 + run.optim.state_bytes_per_parameter + (4 if run.optim.ema else 0)
    arch = run.model.resolved(num_classes=num_classes)
    checkpoint = run.make_objective().num_parameters(arch) * each
    num_there = min(1, len(step_folders(folder / "checkpoints")))
    free, needed = shutil.disk_usage(there).free, (2 - num_there) * checkpoint
    text = f"a checkpoint has {checkpoint / GIB:.3g} GiB; {free / GIB:,.1f} GiB free in {there}"
    if free < needed:
        raise UserError(
            f"{text}; {needed / GIB:.3g} GiB needed",
            where="output",
            next_step="free some space, or choose another output",
        )
    yield Check("disk", "ok", text)
