"""Prepare a validated run, and submit it to SLURM.

Owns: the run types that can be launched, checks that need the job's size, the job folder (private,
because tasks execute the pickles in it), and one job per run.
Leaves out: the dry run (`planning`) and the call of sbatch (`submission`).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from finetune.run import FinetuneRun
from finetune.settings import EmbedRun, EvaluateRun
from launch.jobs.queue import (
    NoAnswerError,
    depending_on,
    jobs_of,
    submitted_ids,
    user_jobs,
)
from launch.jobs.snapshot import kept_code
from launch.jobs.submission import StageJob, Submission, submit_to_slurm
from pretrain.run import PretrainRun, TargetsRun
from vitscale.config.errors import UserError, UserErrors, not_written, print_note
from vitscale.config.loader import run_to_yaml, shown_path
from vitscale.config.packaged import PROJECT_ROOT
from vitscale.distributed.atomic_files import write_text
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.launching import LaunchSettings
from vitscale.runs.training import TrainingRun

LaunchableRun = PretrainRun | FinetuneRun | EvaluateRun | EmbedRun | DataPrepRun
RUN_TYPES: dict[str, type[LaunchableRun]] = {
    "pretrain": PretrainRun,
    "targets": TargetsRun,
    "finetune": FinetuneRun,
    "evaluate": EvaluateRun,
    "embed": EmbedRun,
    "data_prep": DataPrepRun,
}
SCRIPTS = {
    "pretrain": "pretrain/main.py",
    "targets": "pretrain/prepare_targets.py",
    "finetune": "finetune/main.py",
    "evaluate": "finetune/evaluate_model.py",
    "embed": "finetune/embed.py",
}
# What a submission adds to the job folder before its job is accepted.
SUBMITTED_FILES = ("config-*.yaml", "code-*", "*.pkl", ".submission_file_*")


def run_name(run: LaunchableRun) -> str:
    """Name of the job. Data preparation is named after its output folder, and the path of it."""
    if not isinstance(run, DataPrepRun):
        return run.name
    # Jobs are in a folder of this name below the current one, so paths in it can be relative.
    output = Path(shown_path(os.path.abspath(run.output)))

    name = f"data_prep-{output.name}"
    # Folders of the same name may be in different places.
    if len(output.parts) > 1:
        name += f"-{hashlib.sha256(os.fsencode(output)).hexdigest()[:8]}"
    return name


def job_folder(run: LaunchableRun, *, cluster: str) -> Path:
    """Folder of the logs, pickles and configurations of this run's jobs."""
    if isinstance(run, DataPrepRun):
        base = Path("runs") / run_name(run)
    else:
        base = Path(run.folder)
    return (base / cluster).absolute()


def with_num_workers(run: LaunchableRun) -> LaunchableRun:
    """Set `num_workers`, if unset, to the cores of one task: others belong to other jobs."""
    if isinstance(run, DataPrepRun) and run.num_workers is None:
        return run.model_copy(update={"num_workers": run.launch.cpus_per_task})
    return run


def usable_nodes(run: LaunchableRun) -> list[int]:
    """Numbers of nodes in `launch.nodes` that divide the global batch, largest first."""
    counts = list(reversed(run.launch.node_counts))
    if not isinstance(run, TrainingRun):
        return counts

    unit = run.launch.tasks_per_node
    if run.data.mixing is not None:
        # Images are mixed in pairs.
        unit *= 2
    return [nodes for nodes in counts if run.data.global_batch % (nodes * unit) == 0]


def resources(run: LaunchableRun) -> LaunchSettings:
    """The launch section, with shell lines that use the largest usable number of nodes."""
    usable = usable_nodes(run)
    if len(usable) == len(run.launch.node_counts):
        return run.launch

    # The batch may not divide over as many nodes as the job gets; the others stay idle.
    lines = (
        f"for nodes in {' '.join(map(str, usable))}; do",
        '    [ "$nodes" -gt "$SLURM_JOB_NUM_NODES" ] || break',
        "done",
        '[ "$nodes" = "$SLURM_JOB_NUM_NODES" ] ||',
        '    echo "using $nodes of $SLURM_JOB_NUM_NODES nodes, over which the batch divides"',
        "export SLURM_JOB_NUM_NODES=$nodes",
    )
    return run.launch.model_copy(update={"setup": (*run.launch.setup, *lines)})


def check_job(
    run: LaunchableRun, *, cluster: str, num_tasks: int | None = None
) -> None:
    """Validate what depends on the job's size and cluster. Raises UserErrors with all problems.

    num_tasks: None: on the most and on the fewest nodes that `launch.nodes` allows.
    """
    problems = []
    launch = run.launch
    batch = 0
    if isinstance(run, TrainingRun):
        batch = run.data.global_batch

    # What divides over the most nodes need not divide over the fewest.
    if num_tasks is None:
        num_tasks = launch.node_counts[0] * launch.tasks_per_node
        if batch % num_tasks == 0:
            num_tasks = launch.num_ranks

    # Any number of tasks can share other work.
    if batch % num_tasks:
        below = batch - batch % num_tasks
        above = below + num_tasks
        sizes = " or ".join(str(size) for size in (below, above) if size)
        indivisible = UserError(
            f"{batch} images are not divisible by {num_tasks} tasks",
            where="data.global_batch",
            allowed=f"multiples of {num_tasks}: {sizes}",
            next_step="change data.global_batch or the number of tasks",
        )
        problems.append(indivisible)

    # Without SLURM, ranks see the GPUs of their machine without a request.
    if isinstance(run, TrainingRun) and cluster == "slurm" and not launch.gpus_per_node:
        for key, value in (("device", "cuda"), ("precision", "bf16")):
            if getattr(run.engine, key) == value:
                no_gpus = UserError(
                    f"engine.{key}={value} needs GPUs, but the job requests none",
                    where="launch.gpus_per_node",
                    next_step="set launch.gpus_per_node; if GPUs come with the partition, also set "
                    "launch.gpu_request=none",
                )
                problems.append(no_gpus)

    # SLURM expands %-patterns in log file names, and not one after a backslash; a newline would end
    # an option line, and ':' separates the entries of PYTHONPATH.
    folder = str(job_folder(run, cluster=cluster))
    if set(folder) & set("%:\\") or not folder.isprintable():
        bad_path = UserError(
            rf"the job folder's path {folder!r} contains '%', ':', '\' or a control character",
            where="output",
            next_step="choose another output, or run from another folder",
        )
        problems.append(bad_path)

    if problems:
        raise UserErrors(problems)


def prepare_job(
    run: LaunchableRun, *, cluster: str, code: Path | None = None
) -> StageJob:
    """Create the job folder with the resolved configuration.

    code: the snapshot that contains the stage; None: the code that runs now.
    """
    folder = job_folder(run, cluster=cluster)
    make_private(folder)

    # Named by content, so that earlier jobs keep their own configuration.
    text = run_to_yaml(run)
    config = folder / f"config-{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"
    try:
        write_text(config, text)
    except OSError as error:
        raise not_written(error, f"output={folder.parent}") from None

    if isinstance(run, DataPrepRun):
        script = f"data_prep/{run.script}.py"
        # Tasks that share work do not wait for one another.
        run_folder = None
    else:
        script = SCRIPTS[run.stage]
        run_folder = str(folder.parent)
    return StageJob(
        script=str((code or PROJECT_ROOT) / script),
        config=str(config.resolve()),
        run_folder=run_folder,
    )


def submit_run(
    run: LaunchableRun,
    *,
    after_ok: Sequence[str] = (),
    earlier: Literal["refuse", "wait", "ignore"] = "refuse",
) -> Submission:
    """Submit the run to SLURM.

    after_ok: jobs that must succeed before.
    earlier: what follows if a job of this run has not ended: an error, wait for it, or nothing.
    Raises UserError, and leaves no file, if it is refused.
    """
    folder = job_folder(run, cluster="slurm")
    run = with_num_workers(run)

    with submitting(folder):
        launch = depending_on(resources(run), "afterok", after_ok)
        if earlier != "ignore":
            ids = _earlier_jobs(run, folder.parent, wait=earlier == "wait")
            launch = depending_on(launch, "afterany", ids)

        # The job runs what is here now, whatever is edited before it starts.
        code = kept_code(launch, folder)
        job = prepare_job(run, cluster="slurm", code=code)
        return submit_to_slurm(
            job, launch=launch, name=run_name(run), folder=folder, code=code
        )


def _earlier_jobs(run: LaunchableRun, run_folder: Path, *, wait: bool) -> list[str]:
    """Return the ids of the jobs to wait for. Raises UserError for a second job of a run."""
    try:
        jobs = jobs_of(run_folder, jobs=user_jobs())
    except NoAnswerError as error:
        if wait:
            raise UserError(
                f"cannot look up the earlier job for --after: {error}",
                next_step="try again later, or leave it out",
            ) from None
        text = f"warning: cannot check whether a job of this run is queued: {error}"
        print_note(text)
        return []

    # A job that waits for the earlier one may be queued beside it.
    ids = submitted_ids(jobs)
    if wait:
        return ids
    # Tasks of data preparation share the work, whichever job they belong to.
    if jobs and not isinstance(run, DataPrepRun):
        raise UserError(
            f"job {', '.join(map(str, jobs))} of this run has not ended; a second one would fail "
            "when it starts",
            where=run_folder,
            next_step=f"wait for it, cancel it (scancel {' '.join(ids)}), or add "
            "--after (starts when it has ended)",
        )
    return []


@contextmanager
def submitting(folder: Path) -> Iterator[None]:
    """Make the job folder, for one submission at a time: temporary files have equal names.

    On a UserError in the block, removes what it has added.
    """

    def files() -> set[Path]:
        return {path for pattern in SUBMITTED_FILES for path in folder.glob(pattern)}

    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    make_private(folder)
    lock = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems have no locks.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Another submission that was refused meanwhile has removed the folder.
        make_private(folder)

        before = files()
        try:
            yield
        except UserError:
            for path in files() - before:
                if path.is_file():
                    path.unlink()
                else:
                    shutil.rmtree(path, ignore_errors=True)
            # A folder with other files stays.
            with suppress(OSError):
                for path in missing:
                    path.rmdir()
            raise
    finally:
        os.close(lock)


def make_private(folder: Path) -> None:
    """Create the folder for this user alone. Raises UserError if that is not possible."""
    try:
        # `mode` is that of the last folder alone.
        for path in (folder.parent, folder):
            path.mkdir(parents=True, mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        # Root may change the mode of a folder of anybody.
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(
                errno.EPERM, "another user, who could change the job, owns it"
            )
    except OSError as error:
        raise UserError(
            f"cannot create the private job folder {folder}: {error.strerror}",
            next_step="choose a writable output, on a file system that the nodes share",
        ) from error
