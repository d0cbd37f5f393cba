"""The only module that speaks to submitit.

Owns: the batch script, submitting to SLURM or to this machine, and what a running task learns about
itself (rank, addresses, files).
Leaves out: what a task does (`job`), and what people are told (`slurm.py`, `local.py`).

submitit replays the original pickle after every requeue and node failure. The job is therefore
stateless: where to go on is found in the run folder, never in the pickle.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import helpers
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE, LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from launch.jobs.scontrol import reachable_address
from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings

# submitit hides the GPUs of local tasks unless told their number; this keeps what the shell had.
VISIBLE_DEVICES_KEPT = "VITSCALE_VISIBLE_DEVICES"
ALL_DEVICES = "all"
# With this code a local task asks its controller to start all tasks again.
RESTART_EXIT: int = LOCAL_REQUEUE_RETURN_CODE
# Kept when submitting from inside another job: it says which cluster is meant, not which job.
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One process of a running job, as submitit's environment describes it."""

    cluster: str
    """slurm or local."""
    job_id: str
    rank: int
    world_size: int
    folder: Path
    """Holds the logs, pickles and records of the job."""
    array_index: int | None = None
    """Which of several independent tasks this is."""
    array_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job handed over."""

    job_id: str
    num_tasks: int
    folder: Path
    is_array: bool = False
    """Each task is a job of its own, JOBID_TASK to SLURM."""
    independent: bool = False
    """No task waits for another: when one fails, the others go on."""
    controller: subprocess.Popen[bytes] | None = None
    """Local jobs only: the process whose children are the tasks."""

    def log(self, task: int | str) -> Path:
        """Standard output and error of one task; a pattern such as '*' stands for several."""
        rank = f"{task}_0" if self.is_array else task
        return self.folder / f"{self.job_id}_{rank}_log.out"


class _TextExecutor(SlurmExecutor):
    """Writes batch scripts on machines without SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def slurm_parameters(launch: LaunchSettings, *, name: str) -> dict[str, Any]:
    """submitit's parameters for validated settings."""
    # Since 22.05 srun takes the tasks' CPUs from its own command line, not from sbatch's.
    # One failed rank leaves the others waiting in a collective: end them at once.
    srun_args = [f"--cpus-per-task={launch.cpus_per_task}", "--kill-on-bad-exit=1"]
    parameters: dict[str, Any] = {
        "job_name": name,
        "time": launch.timeout_min,
        "nodes": launch.nodes,
        "ntasks_per_node": launch.tasks_per_node,
        "cpus_per_task": launch.cpus_per_task,
        "signal_delay_s": launch.signal_delay_s,
        "stderr_to_stdout": True,
        "srun_args": [*srun_args, *launch.srun_args],
        # submitit's default key is refused where keys are checked; none is asked for.
        "wckey": None,
        "additional_parameters": {
            "requeue": True,
            **{key: value for key, value in launch.sbatch.items() if value is not False},
        },
        "array_parallelism": launch.max_running_tasks or launch.num_tasks,
        **_gpu_parameters(launch),
    }
    if launch.mem_gb is not None:
        parameters["mem"] = f"{launch.mem_gb}GB"
    for field in ("partition", "account", "qos", "constraint", "exclude", "comment"):
        if (value := getattr(launch, field)) is not None:
            parameters[field] = value
    if launch.reservation is not None:
        parameters["additional_parameters"]["reservation"] = launch.reservation
    if launch.setup:
        parameters["setup"] = list(launch.setup)
    return parameters


def _gpu_parameters(launch: LaunchSettings) -> dict[str, str]:
    if not launch.gpus_per_node:
        return {}
    kind = f"{launch.gpu_type}:" if launch.gpu_type else ""
    return {
        "gpus_per_node": {"gpus_per_node": f"{kind}{launch.gpus_per_node}"},
        "gres": {"gres": f"gpu:{kind}{launch.gpus_per_node}"},
        "none": {},
    }[launch.gpu_request]


def sbatch_text(launch: LaunchSettings, *, name: str, folder: Path) -> str:
    """The batch script that `submit_to_slurm` would submit; needs no SLURM."""
    executor = _TextExecutor(_submission_folder(launch, folder), python=launch.python)
    executor.update_parameters(**slurm_parameters(launch, name=name))
    if launch.num_tasks > 1:
        # What submitit adds itself when it submits an array.
        executor.parameters["map_count"] = launch.num_tasks
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


def _submission_folder(launch: LaunchSettings, folder: Path) -> Path:
    """One folder per submission: named after the job, or after the array as a whole."""
    return folder / ("%A" if launch.num_tasks > 1 else "%j")


def require_slurm() -> None:
    """Raise UserError on a machine without SLURM's commands."""
    if any(shutil.which(program) is None for program in ("sbatch", "srun")):
        raise UserError(
            "no SLURM on this machine (sbatch and srun are not on PATH)",
            next_step="log in to a node of the cluster, run here with launch/local.py, "
            "or look at the batch script with --dry-run",
        )


def submit_to_slurm(
    job: Callable[[], int], *, launch: LaunchSettings, name: str, folder: Path
) -> Submission:
    """Submit through sbatch: one job, or an array of `launch.num_tasks` equal ones.

    Raises UserError when sbatch says no; leaves nothing behind then.
    """
    executor = SlurmExecutor(
        _submission_folder(launch, folder),
        max_num_timeout=launch.max_requeues,
        python=launch.python,
    )
    executor.update_parameters(**slurm_parameters(launch, name=name))
    with _submitting_alone(folder):
        before = set(_files_before_acceptance(folder))
        try:
            with _outside_any_job():
                # A single one is submitted as a plain job.
                jobs = executor.submit_array([job] * launch.num_tasks)
        except (FailedJobError, FailedSubmissionError) as error:
            for path in set(_files_before_acceptance(folder)) - before:
                path.unlink()
            raise UserError(
                f"sbatch refused the job: {str(error).strip()}",
                next_step="compare the launch section with what your site offers (sinfo, sacctmgr)",
            ) from error
    is_array = len(jobs) > 1
    job_id = jobs[0].job_id
    return Submission(
        job_id=job_id.partition("_")[0] if is_array else job_id,
        num_tasks=len(jobs) if is_array else jobs[0].num_tasks,
        folder=jobs[0].paths.folder,
        is_array=is_array,
        independent=is_array,
    )


@contextmanager
def _submitting_alone(folder: Path) -> Iterator[None]:
    """Let other commands wait that submit in the same folder: their new files look like ours."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _files_before_acceptance(folder: Path) -> Iterator[Path]:
    """What submitit writes before it knows the job's id, and moves once it does."""
    yield from folder.glob("*.pkl")
    yield from folder.glob(".submission_file_*")


@contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide the surrounding job's variables: sbatch would take its size and GPUs over."""
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
    """Start the job's tasks on this machine; they end with the controller process.

    The job gets a new folder inside `folder`: its id is a process id, which can come again.
    independent: as the jobs of an array, not as the ranks of one job.
    """
    # Not named '%j', as SLURM's are: submitit's controller would create one of that very name.
    folder = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    executor = LocalExecutor(folder, python=launch.python)
    executor.update_parameters(
        timeout_min=launch.timeout_min,
        tasks_per_node=num_procs,
        signal_delay_s=launch.signal_delay_s,
        stderr_to_stdout=True,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "MASTER_PORT": str(port),
        "SUBMITIT_LOG_LEVEL": os.environ.get("SUBMITIT_LOG_LEVEL", "ERROR"),
        VISIBLE_DEVICES_KEPT: os.environ.get("CUDA_VISIBLE_DEVICES", ALL_DEVICES),
    }
    # From inside a SLURM job, submitit would otherwise take the tasks for SLURM's own.
    with (
        helpers.clean_env(),
        helpers.environment_variables(**settings),
        _errors_go_to(folder / "controller.log"),
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
def _errors_go_to(path: Path) -> Iterator[None]:
    """Let processes started here write their errors to a file.

    The controller has nothing to say to people but a traceback when Ctrl-C reaches it.
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
    """Tell torch (through the environment) who this process is; clear an earlier attempt's result.

    A result left half-written by a killed attempt would make submitit fail this one at its end.
    independent: every task is a job of its own, with one rank.
    """
    environment = JobEnvironment()
    exported = helpers.TorchDistributedEnvironment().export(
        set_cuda_visible_devices=False, overwrite=True
    )
    if environment.cluster == "local":
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        # submitit ignores SIGTERM; until the script handles it, nothing is lost by ending.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
        array_index, array_size = _place_among_tasks(environment)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        os.environ.update(zip(names, "0011", strict=True))
    return Task(
        cluster=environment.cluster,
        job_id=environment.job_id,
        rank=environment.global_rank,
        world_size=environment.num_tasks,
        folder=environment.paths.folder,
        array_index=array_index,
        array_size=array_size,
    )


def _place_among_tasks(environment: JobEnvironment) -> tuple[int, int]:
    if environment.cluster == "local":
        return environment.global_rank, environment.num_tasks
    # Both are missing when the array has one task, which is submitted as a plain job.
    index = os.environ.get("SLURM_ARRAY_TASK_ID", "0")
    return int(index), int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1"))


def resubmission(job: Callable[[], int]) -> helpers.DelayedSubmission:
    """What submitit's own signal handler asks for: here, the same job once more."""
    return helpers.DelayedSubmission(job)
