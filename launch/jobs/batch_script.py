"""What a batch script asks of SLURM and runs.

Owns: options of sbatch and srun, the imports of a snapshot, and the lines that supervise srun.
Leaves out: the script's form and submitting it (`submission`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitscale.runs.launching import LaunchSettings

# submitit reports the end of every process as a success, and signals that the stages handle.
QUIET = "export SUBMITIT_LOG_LEVEL=CRITICAL"
# The batch script outlives its tasks, to record how they ended and to requeue the job.
IGNORE_SIGNALS = "trap '' USR2 TERM"


def slurm_parameters(
    launch: LaunchSettings, *, name: str, code: Path | None = None
) -> dict[str, Any]:
    """submitit's parameters for validated settings.

    code: the snapshot to import from; None: whatever the interpreter finds.
    """
    parameters: dict[str, Any] = {
        "job_name": name,
        "time": launch.timeout_min,
        "nodes": launch.nodes,
        "ntasks_per_node": launch.tasks_per_node,
        "cpus_per_task": launch.cpus_per_task,
        "signal_delay_s": launch.signal_delay_s,
        "stderr_to_stdout": True,
        # `supervised` starts it.
        "use_srun": False,
        # Sites that check accounting keys refuse submitit's default key.
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
    for field in ("partition", "account", "qos", "exclude"):
        if (value := getattr(launch, field)) is not None:
            parameters[field] = value
    imports = _imports_from(code) if code else ()
    parameters["setup"] = [IGNORE_SIGNALS, *launch.setup, *imports, QUIET]
    return parameters


def _imports_from(code: Path) -> list[str]:
    """Shell lines that put a snapshot before the installed code, but after what setup adds."""
    return [
        f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
        # Otherwise `python -m` imports from the current folder first: often the checkout.
        "export PYTHONSAFEPATH=1",
    ]


def _gpu_parameters(launch: LaunchSettings) -> dict[str, str]:
    if not launch.gpus_per_node:
        return {}
    kind = f"{launch.gpu_type}:" if launch.gpu_type else ""
    return {
        "gpus_per_node": {"gpus_per_node": f"{kind}{launch.gpus_per_node}"},
        "gres": {"gres": f"gpu:{kind}{launch.gpus_per_node}"},
        "none": {},
    }[launch.gpu_request]


def submission_folder(launch: LaunchSettings, folder: Path) -> Path:
    """One folder per submission, named after the job or the whole array."""
    return folder / ("%A" if launch.num_tasks > 1 else "%j")


# The supervisor writes to descriptor 3 when it has decided what follows. If it does not start, or
# is killed, the script requeues by itself.
SCRIPT = """\
exec 4>&1
decided=$({supervisor} {options} -- \\
{srun} 3>&1 >&4 4>&-) && code=0 || code=$?
job={job}
if [ -z "$decided" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ] &&
    scontrol show job "$job" | grep -q JobState=RUNNING; then
    echo "requeueing job $job: its supervisor did not start, or was killed"
    scontrol requeue "$job" || code=1
fi
exit "$code"
"""


def supervised(
    command: str, *, launch: LaunchSettings, folder: Path, run_folders: Sequence[str | None]
) -> str:
    """The shell lines that run `command` in every task, with restarts.

    folder: the job folder, with patterns of SLURM; run_folders: one for each task of an array.
    """
    options = ["--job-folder", str(folder), "--signal-delay", str(launch.signal_delay_s)]
    options += ["--num-tasks", str(launch.nodes * launch.tasks_per_node)]
    options += ["--max-requeues", str(launch.max_requeues)]
    options += ["--max-fruitless-restarts", str(launch.max_fruitless_restarts)]
    for run_folder in run_folders:
        if run_folder is not None:
            options += ["--run-folder", run_folder]
    is_array = launch.num_tasks > 1
    log = "%A_%a" if is_array else "%j"
    srun = ["srun", "--unbuffered", "--output", f"{folder}/{log}_%t_log.out"]
    # Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch.
    # After one rank failed, the others would wait in a collective: end them at once.
    srun += [f"--cpus-per-task={launch.cpus_per_task}", "--kill-on-bad-exit=1"]
    srun += launch.srun_args
    # The interpreter that submits: that of the tasks may be in a container, which has no srun.
    supervisor = [sys.executable, "-u", "-m", "launch.jobs.supervision", "--decision-descriptor=3"]
    return SCRIPT.format(
        supervisor=shlex.join(supervisor),
        options=shlex.join(options),
        srun=f"{shlex.join(srun)} {command}",
        # SLURM_JOB_ID of the first task of an array would mean all its tasks.
        job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if is_array else "$SLURM_JOB_ID",
        max_requeues=launch.max_requeues,
    )
