"""Submit jobs through submitit. No other module imports it.

Owns: submitting to SLURM or to this machine, and a running task's environment (rank, addresses,
files).
Leaves out: what the batch script asks for (`batch_script`), what a task runs (`job`), and what is
printed (`slurm.py`, `local.py`).

submitit replays the original pickle after every requeue and node failure. The job is therefore
stateless: the position to resume from is in the run folder, never in the pickle.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import helpers
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from launch.jobs.batch_script import slurm_parameters, submission_folder, supervised
from launch.jobs.queue import ask_slurm
from launch.jobs.scontrol import reachable_address
from vitscale.config.errors import UserError
from vitscale.distributed.failures.events import ATTEMPT_VARIABLE
from vitscale.distributed.processes import free_port, node_name
from vitscale.runs.launching import LaunchSettings

# submitit hides the GPUs of local tasks; this variable keeps the shell's CUDA_VISIBLE_DEVICES.
VISIBLE_DEVICES_KEPT = "VITSCALE_VISIBLE_DEVICES"
ALL_DEVICES = "all"
# Exit code by which a local task asks its controller to restart all tasks.
RESTART_EXIT: int = LOCAL_REQUEUE_RETURN_CODE
# Kept when submitting from inside another job: they name the cluster, not the job.
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
# Ten years: nothing would restart a local job that submitit ends.
LOCAL_LIMIT_MIN = 10 * 365 * 24 * 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One process of a running job, read from submitit's environment."""

    cluster: str
    """slurm or local."""
    job_id: str
    rank: int
    world_size: int
    node: str
    """Its name in SLURM; elsewhere its host name."""
    folder: Path
    """Folder of the job's logs, pickles and records."""
    array_index: int | None = None
    """Number of this task among independent tasks."""
    array_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A submitted job."""

    job_id: str
    num_tasks: int
    folder: Path
    is_array: bool = False
    """Each task is a job of its own, JOBID_TASK to SLURM."""
    independent: bool = False
    """No task waits for another: if one fails, the others continue."""
    controller: subprocess.Popen[bytes] | None = None
    """Local jobs only: the process whose children are the tasks."""

    def log(self, task: int | str) -> Path:
        """Output and errors of one task; '*' gives a pattern for all tasks."""
        rank = f"{task}_0" if self.is_array else task
        return self.folder / f"{self.job_id}_{rank}_log.out"


class _Executor(SlurmExecutor):
    """submitit's executor, with a batch script whose srun is supervised."""

    def __init__(
        self,
        launch: LaunchSettings,
        *,
        name: str,
        folder: Path,
        code: Path | None,
        run_folders: Sequence[str | None],
    ) -> None:
        super().__init__(submission_folder(launch, folder), python=launch.python)
        self._launch, self._run_folders = launch, run_folders
        self.update_parameters(**slurm_parameters(launch, name=name, code=code))

    @property
    def _submitit_command_str(self) -> str:
        task = str(super()._submitit_command_str)
        return supervised(
            task, launch=self._launch, folder=self.folder, run_folders=self._run_folders
        )


class _TextExecutor(_Executor):
    """Writes batch scripts on machines without SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def sbatch_text(
    launch: LaunchSettings,
    *,
    name: str,
    folder: Path,
    code: Path | None = None,
    run_folders: Sequence[str | None] = (),
) -> str:
    """The batch script that `submit_array` would submit. Needs no SLURM.

    run_folders: of each task of the array, or of the job.
    """
    executor = _TextExecutor(launch, name=name, folder=folder, code=code, run_folders=run_folders)
    if launch.num_tasks > 1:
        # submitit adds this when it submits an array.
        executor.parameters["map_count"] = launch.num_tasks
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def require_slurm() -> None:
    """Raise UserError on a machine without SLURM's commands."""
    if any(shutil.which(program) is None for program in ("sbatch", "srun")):
        raise UserError(
            "no SLURM on this machine (sbatch and srun are not on PATH)",
            next_step="use a login node, run here with launch/local.py, or show the batch script "
            "with --dry-run",
        )


def try_start(script: str) -> None:
    """Ask SLURM whether a job with this batch script could start. Submits nothing.

    Raises NoAnswerError with its reason if not: a limit, or that nodes are down at present.
    """
    with _outside_any_job():
        ask_slurm("sbatch", "--test-only", stdin=script)


def submit_to_slurm(
    job: Callable[[], int],
    *,
    launch: LaunchSettings,
    name: str,
    folder: Path,
    code: Path | None = None,
) -> Submission:
    """Submit one job, or an array of `launch.num_tasks` equal jobs, through sbatch.

    code: the snapshot that the tasks import from; None: the code on disk.
    Raises UserError if sbatch refuses, and removes submitit's files.
    """
    # An array of one is submitted as a plain job.
    jobs = [job] * launch.num_tasks
    return submit_array(
        jobs, launch=launch, name=name, folder=folder, code=code, independent=len(jobs) > 1
    )


def submit_array(
    jobs: Sequence[Callable[[], int]],
    *,
    launch: LaunchSettings,
    name: str,
    folder: Path,
    code: Path | None = None,
    independent: bool = False,
) -> Submission:
    """Submit `launch.num_tasks` jobs as one array; a single one as a plain job.

    code: see `submit_to_slurm`; independent: see `Submission`.
    Raises UserError if sbatch refuses, and removes submitit's files.
    """
    assert len(jobs) == launch.num_tasks
    # Only jobs of runs have a run folder.
    run_folders = [getattr(job, "run_folder", None) for job in jobs]
    executor = _Executor(launch, name=name, folder=folder, code=code, run_folders=run_folders)
    with folder_lock(folder):
        before = set(_unaccepted_files(folder))
        try:
            # submitit prints sbatch's message, which the error contains as well.
            with _outside_any_job(), redirect_stderr(io.StringIO()):
                submitted = executor.submit_array(list(jobs))
        except (FailedJobError, FailedSubmissionError) as error:
            for path in set(_unaccepted_files(folder)) - before:
                path.unlink()
            message = "; ".join(
                line.removeprefix("sbatch: error: ") for line in str(error).strip().splitlines()
            )
            raise UserError(
                f"sbatch refused the job: {message}",
                next_step="compare the launch section with what sinfo and sacctmgr show",
            ) from error
    is_array = len(submitted) > 1
    job_id = submitted[0].job_id
    return Submission(
        job_id=job_id.partition("_")[0] if is_array else job_id,
        num_tasks=len(submitted) if is_array else submitted[0].num_tasks,
        folder=submitted[0].paths.folder,
        is_array=is_array,
        independent=independent,
    )


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Serialize submissions in one folder: their temporary files have the same names."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _unaccepted_files(folder: Path) -> Iterator[Path]:
    """Files that submitit writes before it knows the job's id, and then moves."""
    yield from folder.glob("*.pkl")
    yield from folder.glob(".submission_file_*")


@contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide the variables of the surrounding job: sbatch would inherit its size and GPUs."""
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    kept = {name: os.environ[name] for name in CLUSTER_VARIABLES if name in os.environ}
    with helpers.clean_env():
        os.environ.update(kept)
        yield


def start_locally(
    job: Callable[[], int],
    *,
    launch: LaunchSettings,
    num_procs: int,
    folder: Path,
    independent: bool = False,
) -> Submission:
    """Start the job's tasks on this machine. They end with the controller process.

    The job gets a new folder inside `folder`, because its id, a process id, can be reused.
    independent: run the tasks as jobs of an array instead of ranks of one job.
    """
    # Not named '%j' as under SLURM: submitit's local controller would create a folder '%j'.
    folder = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    executor = LocalExecutor(folder, python=launch.python)
    executor.update_parameters(
        timeout_min=LOCAL_LIMIT_MIN,
        tasks_per_node=num_procs,
        signal_delay_s=launch.signal_delay_s,
        stderr_to_stdout=True,
    )
    settings = {
        "MASTER_PORT": str(free_port()),
        ATTEMPT_VARIABLE: folder.name,
        "SUBMITIT_LOG_LEVEL": os.environ.get("SUBMITIT_LOG_LEVEL", "ERROR"),
        VISIBLE_DEVICES_KEPT: os.environ.get("CUDA_VISIBLE_DEVICES", ALL_DEVICES),
    }
    # Inside a SLURM job, submitit would otherwise treat the tasks as SLURM tasks.
    with (
        helpers.clean_env(),
        helpers.environment_variables(**settings),
        _redirect_stderr(folder / "controller.log"),
    ):
        submitted: Any = executor.submit(job)
    return Submission(
        job_id=submitted.job_id,
        num_tasks=num_procs,
        folder=submitted.paths.folder,
        independent=independent,
        controller=submitted._process,
    )


@contextmanager
def _redirect_stderr(path: Path) -> Iterator[None]:
    """Send the errors of processes started here to a file.

    The controller prints only a traceback when Ctrl-C reaches it.
    """
    kept = os.dup(2)
    try:
        with open(path, "ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def start_task(*, independent: bool = False) -> Task:
    """Set torch's environment variables for this process; clear an earlier attempt's result.

    A half-written result of a killed attempt would make submitit fail this one at its end.
    independent: every task is a job of its own with one rank.
    """
    environment = JobEnvironment()
    # submitit logs every SIGCONT, which SLURM sends before SIGTERM.
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    exported = helpers.TorchDistributedEnvironment().export(
        set_cuda_visible_devices=False, overwrite=True
    )
    if environment.cluster == "local":
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        devices = os.environ.pop(VISIBLE_DEVICES_KEPT, ALL_DEVICES)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if devices != ALL_DEVICES:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
    else:
        os.environ["MASTER_ADDR"] = reachable_address(exported.master_addr)
    result = environment.paths.result_pickle
    result.unlink(missing_ok=True)
    result.with_name(result.name + ".save_tmp").unlink(missing_ok=True)
    array_index = array_size = None
    if independent:
        array_index, array_size = _array_position(environment)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        os.environ.update(zip(names, "0011", strict=True))
    return Task(
        cluster=environment.cluster,
        job_id=environment.job_id,
        rank=environment.global_rank,
        world_size=environment.num_tasks,
        node=node_name(),
        folder=environment.paths.folder,
        array_index=array_index,
        array_size=array_size,
    )


def _array_position(environment: JobEnvironment) -> tuple[int, int]:
    if environment.cluster == "local":
        return environment.global_rank, environment.num_tasks
    # Both are unset for an array of one task, which is submitted as a plain job.
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
    return int(index), int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1"))
