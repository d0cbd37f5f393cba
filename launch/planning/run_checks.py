"""Check what a run needs: shards, loader, room for its checkpoints, and a place in SLURM."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from finetune.run import FinetuneRun
from launch.jobs.preparation import LaunchableRun, check_job
from launch.jobs.queue import NoAnswerError
from launch.jobs.submission import try_start
from launch.planning.checks import Check, caught, ok, warning
from launch.planning.dry_run import (
    DataFacts,
    check_data,
    data_facts,
    known_plan,
    planned_classes,
)
from pretrain.run import PretrainRun
from vitscale.checkpoint.folders import step_folders
from vitscale.config.errors import UserError
from vitscale.data.index import MANIFEST_NAME, read_manifest, read_split
from vitscale.data.order import check_mixed
from vitscale.data.storage import location_of
from vitscale.data.webdataset import tars_of_split
from vitscale.models.registry import MODELS
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.training import TrainingRun

GIB = 2**30


def run_checks(run: LaunchableRun) -> list[Check]:
    """Rows about the configuration, data, loader and files of a run, none of them heavy."""
    num_tasks = run.launch.nodes * run.launch.tasks_per_node

    def configuration() -> Iterator[Check]:
        check_job(run, num_tasks=num_tasks, cluster="slurm")
        if isinstance(run, PretrainRun | FinetuneRun) and _knows_data(run):
            check_data(run)
        tasks = run.launch.num_tasks if isinstance(run, DataPrepRun) else num_tasks
        yield ok("configuration", f"{run.stage}, {tasks} task(s)")

    rows = caught("configuration", configuration)
    rows += caught("data", lambda: _data(run))
    if isinstance(run, FinetuneRun):
        rows += caught("weights", lambda: _weights(run))
    if isinstance(run, PretrainRun | FinetuneRun):
        rows += _training_checks(run, num_tasks=num_tasks)
    return rows


def slurm_check(script: str) -> list[Check]:
    """Ask SLURM whether it could start a job with this batch script; not on other machines."""
    if shutil.which("sbatch") is None:
        return []
    try:
        try_start(script)
    except NoAnswerError as error:
        next_step = "compare the launch section with what sinfo shows"
        return [warning("SLURM", f"sbatch --test-only: {error}", next_step=next_step)]
    return [ok("SLURM", "the job can start on the nodes as they are")]


def _training_checks(run: PretrainRun | FinetuneRun, *, num_tasks: int) -> Iterator[Check]:
    """Rows that follow from the size of the data; none where that is unknown."""
    try:
        facts = data_facts(run)
        plan = known_plan(run, facts, world_size=num_tasks)
        num_classes = planned_classes(run, facts)
    except UserError:
        return  # reported with the data
    if facts.num_samples is None:
        return
    yield from caught("loader", lambda: _loader(run, facts, num_tasks=num_tasks))
    if num_classes is None or plan is None or MODELS[run.model.name].costs is None:
        return
    checkpoint = checkpoint_bytes(run, num_classes=num_classes)
    yield from caught("disk", lambda: [_disk(run, checkpoint)])


def _knows_data(run: TrainingRun) -> bool:
    """Whether there are shards, here or at a URL, or a planned number of samples."""
    if run.data.is_streamed:
        return True
    folder = location_of(run.data.path)
    here = not isinstance(folder, Path) or (folder / MANIFEST_NAME).exists()
    return here or run.data.planned_num_samples is not None


def _data(run: LaunchableRun) -> Iterator[Check]:
    """What the run needs of its data; names, sizes and counts of the files of its splits."""
    if isinstance(run, DataPrepRun):
        return
    if isinstance(run, PretrainRun | FinetuneRun) and run.data.is_streamed:
        what = f"{run.data.train_split}: {_num_tars(run):,} tars"
        yield ok("data", f"{what}; no index: a resume is not exact")
        return
    wanted = {(run.data.path, run.data.val_split)}
    planned = None
    if isinstance(run, PretrainRun | FinetuneRun):
        if not _knows_data(run):
            check_data(run)
        planned = run.data.planned_num_samples
        wanted.add((run.data.path, run.data.train_split))
        wanted |= {(part.path, run.data.train_split) for part in run.data.mixture}
        if run.data.dev_percent:
            wanted.discard((run.data.path, run.data.val_split))
    found = []
    for path, split in sorted((path, split) for path, split in wanted if split is not None):
        folder = location_of(path)
        if not isinstance(folder, Path):
            # Sizes of thousands of remote files would take minutes; the job asks for them.
            manifest = read_manifest(folder)
            num_shards = len(manifest.splits[split].shards) if split in manifest.splits else 0
            found.append(f"{split}: {num_shards:,} shards by the manifest at {path}")
            continue
        if planned is not None and not (folder / MANIFEST_NAME).exists():
            yield warning(
                "data",
                f"no {MANIFEST_NAME} in {path} here; assumed: {planned:,} samples",
                next_step="none if only the nodes see the folder: the job checks it",
            )
            return
        index = read_split(folder, split=split, remote_settings=run.data.remote)
        if isinstance(run, PretrainRun | FinetuneRun) and split == run.data.train_split:
            check_mixed(index.label, shard_lengths=index.shard_lengths, where="data.path")
        num_shards = len(index.shard_lengths)
        found.append(f"{split}: {index.num_samples:,} samples in {num_shards:,} shards")
    yield ok("data", "; ".join(found) + "; as in the manifest")


def _num_tars(run: TrainingRun) -> int:
    """Tars of `data.reader=webdataset`. Raises UserError if they are not visible here."""
    return len(tars_of_split(Path(run.data.path), run.data.train_split, where="data.train_split"))


def _weights(run: FinetuneRun) -> Iterator[Check]:
    if run.init is None:
        return
    if Path(run.init).exists():
        yield ok("weights", run.init)
    else:
        yield warning(
            "weights",
            f"{run.init} does not exist here",
            next_step="correct init=, unless another job writes it before this one starts",
        )


def _loader(run: TrainingRun, facts: DataFacts, *, num_tasks: int) -> Iterator[Check]:
    """Shards and samples of each loader process, and cores for all processes."""
    workers = run.data.num_workers
    processes = num_tasks * max(1, workers)
    each = f"{num_tasks} rank(s) x {max(1, workers)} loader process(es)"
    samples = facts.num_samples or 0
    num_shards = _num_shards(run)
    text = f"{samples / processes:,.0f} samples for each of {each}"
    if num_shards is not None:
        text = f"{num_shards / processes:,.1f} shards and {text}"
    if samples < run.data.global_batch:
        yield warning(
            "loader",
            f"{samples:,} samples are less than one batch of {run.data.global_batch:,}",
            next_step="lower data.global_batch, or use more samples",
        )
    elif num_shards is not None and num_shards < processes:
        yield warning(
            "loader",
            f"{num_shards:,} shards for {each}: several processes read one file at a time",
            next_step="make more shards (shards.min_shards) if the storage is slow at this",
        )
    else:
        yield ok("loader", text)
    needed, cpus = 1 + workers, run.launch.cpus_per_task
    if cpus < needed:
        yield warning(
            "cores",
            f"{cpus} core(s) per task for 1 training and {workers} loader process(es)",
            next_step=f"launch.cpus_per_task={needed}, or fewer data.num_workers",
        )
    else:
        yield ok("cores", f"{cpus} per task for 1 training and {workers} loader process(es)")


def _num_shards(run: TrainingRun) -> int | None:
    """Training shards of `data.path`; None if they are not visible here."""
    folder = location_of(run.data.path)
    try:
        if run.data.is_streamed:
            return _num_tars(run)
        manifest = read_manifest(folder)
    except UserError:
        return None
    entry = manifest.splits.get(run.data.train_split)
    return None if entry is None else len(entry.shards)


def checkpoint_bytes(run: PretrainRun | FinetuneRun, *, num_classes: int) -> int:
    """Bytes of one checkpoint: weights in fp32, optimiser states, average of the weights."""
    arch = run.model.resolved(num_classes=num_classes)
    average = 4 if run.optim.ema else 0
    each = 4 + run.optim.state_bytes_per_parameter + average
    return run.make_objective().num_parameters(arch) * each


def _disk(run: PretrainRun | FinetuneRun, checkpoint: int) -> Check:
    """Room for two checkpoints: a new one is complete before an old one is removed."""
    folder = Path(run.folder).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"cannot write to {there}", where="output", next_step="choose another output"
        )
    num_there = min(1, len(step_folders(folder / "checkpoints")))
    free, needed = shutil.disk_usage(there).free, (2 - num_there) * checkpoint
    text = f"a checkpoint has {checkpoint / GIB:.3g} GiB; {free / GIB:,.1f} GiB free in {there}"
    if free < needed:
        raise UserError(
            f"{text}; {needed / GIB:.3g} GiB needed",
            where="output",
            next_step="free some space, or choose another output",
        )
    return ok("disk", text)
