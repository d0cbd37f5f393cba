"""Submit jobs to SLURM through submitit, and run a stage's script in their tasks.

Owns: options of sbatch and srun, the shell lines around srun, a task's environment (rank,
addresses, files), and stop signals before a script handles them. No other module imports submitit.
Leaves out: signals and checkpoints inside a stage (its script), and what follows an attempt
(`requeue_decision`).

submitit replays the original pickle after every requeue. The job is therefore stateless: the
position to resume from is in the run folder. A stage stopped by a signal commits a checkpoint on
all ranks and ends with EXIT_STOPPED_RESUMABLE; submitit's own mechanism, a checkpoint inside rank
0's signal handler, cannot save a model that is sharded over all ranks.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from submitit import helpers
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from launch.jobs.attempts import begin_attempt
from launch.jobs.queue import RESTART_SECONDS, reachable_address, restart_count
from vitscale.config.errors import (
    EXIT_STOPPED_RESUMABLE,
    FailureKind,
    UserError,
    print_note,
)
from vitscale.config.loader import SITE_VARIABLE
from vitscale.config.packaged import INSIDE, IS_WHEEL
from vitscale.distributed.events import (
    ATTEMPT_VARIABLE,
    Failure,
    read_failures,
    record_failure,
)
from vitscale.distributed.processes import node_name, skip_teardown
from vitscale.runs.launching import LaunchSettings

# Kept from the shell that submits: they name the cluster, not a job.
CLUSTER_VARIABLES = ("SLURM_CONF", "SLURM_CLUSTERS")
# For sbatch, variables of the shell outrank the lines of the batch script (man sbatch). Those of
# the site are kept where the script has no such option; all others are left out.
SITE_VARIABLES = dict(
    line.split()
    for line in """\
    SBATCH_ACCOUNT account
    SBATCH_CLUSTERS clusters
    SBATCH_CONSTRAINT constraint
    SBATCH_EXPORT export
    SBATCH_GET_USER_ENV get-user-env
    SBATCH_MEM_PER_CPU mem
    SBATCH_MEM_PER_GPU mem
    SBATCH_MEM_PER_NODE mem
    SBATCH_PARTITION partition
    SBATCH_QOS qos
    SBATCH_RESERVATION reservation""".splitlines()
)
# A launcher of ranks sets these; one that is left over would name another job's ranks.
RANK_VARIABLES = tuple(
    "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
)
OPTION_LINE = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)

# The ranks are gone when nobody has touched their lock for so many looks in a row.
LOOK_S = 60
SILENT_LOOKS = 5

# A submission checks its environment twice.
_say_once = cache(print_note)

# Restarts in a row that may fail without a newer checkpoint.
MAX_FRUITLESS_RESTARTS = 3

# ---- the batch script -------------------------------------------------------------------------

# Before anything: the script outlives its tasks, to record how they ended and to requeue the job.
# The tasks get its variables, also where SBATCH_EXPORT=NONE keeps out those of the submission.
FIRST = (
    "trap '' USR2 TERM",
    # The login shell's soft limits, such as one of CPU seconds, would reach the ranks.
    'for limit in t f v n u; do ulimit -S -$limit "$(ulimit -H -$limit)"; done',
    "unset SLURM_EXPORT_ENV",
    # Of the shell or the profile; a line of `launch.setup` may choose the port.
    f"unset {' '.join(RANK_VARIABLES)}",
)
# A module or an option of the site's lines must not end the script at the first code that is not 0.
# The port is below those that systems give to connections, and nobody listens on it.
BEFORE = """\
set +eu
job={job} restart=${{SLURM_RESTART_COUNT:-0}}
export {attempt}=$job/$restart
if [ "$restart" -gt {max_requeues} ]; then
    echo "not started: launch.max_requeues={max_requeues} is reached"
    exit {stopped}
fi
until [ -n "$MASTER_PORT" ]; do
    port=$((20000 + RANDOM % 12000))
    (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null || export MASTER_PORT=$port
done
# submitit reports the end of every process as a success, and signals that the stages handle.
export SUBMITIT_LOG_LEVEL=CRITICAL
srun_errors=$(mktemp) || srun_errors=/dev/null
# A node that was away gets signals to its last step a minute later: this one has another number.
[ $((restart % 2)) = 0 ] || srun --nodes=1 --ntasks=1 true
# A daemon that was away when the ranks ended leaves srun waiting for them until the time limit.
watch_lock() {{
    local first now last still=0
    first=$(stat -c "%y %s" "$1" 2> /dev/null)
    while sleep {look_s}; do
        now=$(stat -c "%y %s" "$1" 2> /dev/null)
        # Rank 0 touches its lock every few seconds, from when it has opened the run.
        # Storage that fails says nothing of them.
        still=$((still + 1))
        [ -n "$now" ] && [ "$now" = "$last" ] && [ "$now" != "$first" ] || still=0
        last=$now
        [ "$still" -lt {silent_looks} ] || {{
            echo "no rank has touched $1 since $(date -r "$1" 2>&1): srun is ended"
            pkill -KILL -s 0 -x srun
            return
        }}
    done
}}
watch_lock {lock} 2> /dev/null & watcher=$!
disown
# srun lets the others wait for a task that could not start: its log cannot be opened, for example.
end_step='scancel $(squeue -hs -j "$SLURM_JOB_ID" -o %i | grep "[.][0-9]")'
{{"""
# The interpreter that submits: that of the tasks may be in a container, which has no scontrol.
AFTER = """\
}} 2>&1 | tee "$srun_errors" >(sed -nu "/ launch failed: /e $end_step")
code=${{PIPESTATUS[0]}}
# Its sleep, and then itself: TERM is ignored here.
pkill -KILL -P "$watcher"
kill -KILL "$watcher" 2> /dev/null
next=$({decide} --script "$0" --job "$job" --code "$code" < "$srun_errors")
[ ! -f "$srun_errors" ] || rm "$srun_errors"
# Without Python on this node: a line for each start in a row, as `requeue_decision` would do.
failed={failed}
[ -z "$next" ] || {{ rm -f "$failed"; exit "$next"; }}
[ "$code" != 0 ] || exit 0
echo "$SLURMD_NODENAME" >> "$failed"
echo "job $job: Python did not start on $SLURMD_NODENAME, or was killed"
if [ "$restart" -ge {max_requeues} ] || [ "$(wc -l < "$failed")" -gt {max_fruitless} ]; then
    echo "not requeued: submit again when the cause is removed"
elif fields=$(scontrol --oneliner show job "$job") && [[ "$fields" = *JobState=RUNNING* ]]; then
    echo "requeueing job $job"
    scontrol requeue "$job" && scontrol update "JobId=$job" StartTime=now+{restart_s}
    node=$(tail -n 2 "$failed" | uniq -d)
    before=$(grep -o 'ExcNodeList=[^ (]*' <<< "$fields") before=${{before#*=}}
    up=$(sinfo -hN -o %N -t idle,mix,alloc,comp -p "$SLURM_JOB_PARTITION" | sort -u | wc -l)
    all=$node${{before:+,$before}}
    [ -z "$node" ] || [ "$up" -le {fewest_nodes} ] ||
        ! sbatch --test-only --dependency= --exclude="$all" "$0" 2> /dev/null ||
        for try in {{1..10}}; do
            scontrol update "JobId=$job" "ExcNodeList=$all" && break
            sleep 2
        done
fi
exit "$code\""""


def sbatch_text(
    launch: LaunchSettings,
    *,
    name: str,
    folder: Path,
    run_folder: str | None = None,
    code: Path | None = None,
) -> str:
    """The batch script that `submit_to_slurm` would submit. Needs no SLURM."""
    executor = _executor(launch, name, folder, run_folder, code)
    if launch.num_tasks > 1:
        # submitit adds this when it submits an array.
        executor.parameters["map_count"] = launch.num_tasks
    return _script_of(executor)


def _script_of(executor: SlurmExecutor) -> str:
    text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
    return text


class _Executor(SlurmExecutor):
    """submitit's executor, which also writes batch scripts on machines without SLURM."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """Read the job id from sbatch's output."""
        if isinstance(string, bytes):
            string = string.decode()

        # With --parsable, or where a site wraps sbatch, the id stands alone.
        bare_id = re.search(r"^(\d+)(;\S+)?$", string, re.MULTILINE)
        if bare_id:
            return bare_id[1]
        return SlurmExecutor._get_job_id_from_submission_command(string)


def _executor(
    launch: LaunchSettings,
    name: str,
    folder: Path,
    run_folder: str | None,
    code: Path | None,
) -> _Executor:
    """Set up submitit's executor for validated settings."""
    script_values = _script_values(launch, folder, run_folder)
    num_tasks = launch.tasks_per_node
    cpus_per_task = launch.cpus_per_task

    # A wheel's stages are on no path of their own.
    if code is None and IS_WHEEL:
        code = INSIDE

    setup = [*FIRST, *_gpu_lines(launch), *launch.setup]
    if code is not None:
        setup += [
            f"export PYTHONPATH={shlex.quote(str(code))}${{PYTHONPATH:+:$PYTHONPATH}}",
            # Otherwise `python -m` imports from the current folder first: often the checkout.
            "export PYTHONSAFEPATH=1",
        ]

    srun_args = [
        # Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch.
        f"--cpus-per-task={cpus_per_task}",
        # After one rank failed, the others would wait in a collective: end them at once.
        "--kill-on-bad-exit=1",
        *launch.srun_args,
    ]

    sbatch_options: dict[str, Any] = {"requeue": True}
    for option, value in launch.sbatch.items():
        # False leaves an option out; True writes it without a value.
        if value is not False:
            sbatch_options[option] = value

    layout = {"ntasks_per_node": num_tasks, "cpus_per_task": cpus_per_task}
    if isinstance(launch.nodes, str):
        # Of --ntasks-per-node=1 and 2 to 8 nodes, SLURM makes two tasks, for which it takes two
        # nodes. So sbatch asks for one task per node, with all cores, and srun starts the ranks.
        layout = {"cpus_per_task": num_tasks * cpus_per_task}
        srun_args.append(f"--ntasks-per-node={num_tasks}")
        sbatch_options["nodes"] = launch.nodes
        setup += [
            "export SLURM_NNODES=$SLURM_JOB_NUM_NODES",
            f"export SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * {num_tasks}))",
            "export SLURM_NPROCS=$SLURM_NTASKS",
        ]

    mem = None
    if launch.mem_gb is not None:
        mem = f"{launch.mem_gb}GB"

    # One folder per submission, named after the job or the whole array.
    log_folder = folder / "%j"
    if launch.num_tasks > 1:
        log_folder = folder / "%A"

    executor = _Executor(log_folder, python=launch.python)
    executor.update_parameters(
        job_name=name,
        time=launch.timeout_min,
        partition=launch.partition,
        account=launch.account,
        mem=mem,
        nodes=launch.node_counts[-1],
        signal_delay_s=launch.signal_delay_s,
        stderr_to_stdout=True,
        # Sites that check accounting keys refuse submitit's default key.
        wckey=None,
        additional_parameters=sbatch_options,
        array_parallelism=launch.num_tasks,
        setup=[*setup, BEFORE.format(**script_values)],
        srun_args=srun_args,
        teardown=[AFTER.format(**script_values)],
        **layout,
        **_gpu_parameters(launch),
    )
    return executor


def _script_values(
    launch: LaunchSettings, folder: Path, run_folder: str | None
) -> dict[str, object]:
    """Map the placeholders of BEFORE and AFTER to their values, as the shell reads them."""
    job_id = "$SLURM_JOB_ID"
    job = job_id
    if launch.num_tasks > 1:
        # SLURM_JOB_ID of the first task of an array would mean all its tasks.
        job_id = "$SLURM_ARRAY_JOB_ID"
        job = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"

    # A task without a run has its record beside its log.
    record = f'{shlex.quote(str(folder))}/{job_id}/"$job"'
    attempts = record
    if run_folder:
        attempts = shlex.quote(run_folder)

    fewest_nodes = launch.node_counts[0]
    options = (
        f"--signal-delay {launch.signal_delay_s} --max-requeues {launch.max_requeues}"
    )
    if len(launch.node_counts) > 1:
        options += f" --fewest-nodes {fewest_nodes}"

    return {
        "job": job,
        "attempt": ATTEMPT_VARIABLE,
        "max_requeues": launch.max_requeues,
        "stopped": EXIT_STOPPED_RESUMABLE,
        "failed": f"{record}.failed_starts",
        "max_fruitless": MAX_FRUITLESS_RESTARTS,
        "look_s": LOOK_S,
        "silent_looks": SILENT_LOOKS,
        "lock": f"{attempts}/.lock",
        "fewest_nodes": fewest_nodes,
        "restart_s": RESTART_SECONDS,
        "decide": f"{shlex.quote(sys.executable)} -u -m launch.jobs.requeue_decision "
        f"{attempts} {options}",
    }


def _gpu_parameters(launch: LaunchSettings) -> dict[str, str]:
    if not launch.gpus_per_node:
        return {}
    gpus = str(launch.gpus_per_node)
    if launch.gpu_type:
        gpus = f"{launch.gpu_type}:{gpus}"
    return {
        "gpus_per_node": {"gpus_per_node": gpus},
        "gres": {"gres": f"gpu:{gpus}"},
        "none": {},
    }[launch.gpu_request]


def _gpu_lines(launch: LaunchSettings) -> Iterator[str]:
    """Name the GPUs that come with the partition: a rank without one would train on its CPU."""
    if launch.gpus_per_node and launch.gpu_request == "none":
        numbers = ",".join(map(str, range(launch.gpus_per_node)))
        yield f"export CUDA_VISIBLE_DEVICES={numbers}"


# ---- submitting -------------------------------------------------------------------------------


class Submission(NamedTuple):
    job_id: str
    folder: Path

    def log(self, rank: int | str) -> Path:
        """Output and errors of one rank; TASK_RANK in an array."""
        return self.folder / f"{self.job_id}_{rank}_log.out"


def require_slurm() -> None:
    """Raise UserError on a machine without SLURM's commands."""
    if any(shutil.which(program) is None for program in ("sbatch", "srun")):
        raise UserError(
            "no SLURM on this machine (sbatch and srun are not on PATH)",
            next_step="use a login node, run here with `vitscale launch --local`, or show the "
            "batch script with --dry-run",
        )


def submit_to_slurm(
    job: StageJob,
    *,
    launch: LaunchSettings,
    name: str,
    folder: Path,
    code: Path | None = None,
) -> Submission:
    """Submit one job, or an array of `launch.num_tasks` equal jobs, through sbatch.

    code: the snapshot that the tasks import from; None: the code on disk.
    Raises UserError if sbatch refuses.
    """
    executor = _executor(launch, name, folder, job.run_folder, code)

    try:
        # submitit prints sbatch's message, which the error contains as well.
        with (
            submission_environment(_script_of(executor)),
            redirect_stderr(io.StringIO()),
        ):
            # An array of one is submitted as a plain job.
            submitted = executor.submit_array([job] * launch.num_tasks)
    except (FailedJobError, FailedSubmissionError) as error:
        lines = str(error).strip().splitlines()
        message = "; ".join(line.removeprefix("sbatch: error: ") for line in lines)
        raise UserError(
            f"sbatch refused the job: {message}",
            next_step="compare the launch section with what sinfo and sacctmgr show",
        ) from error

    first = submitted[0]
    return Submission(first.job_id.partition("_")[0], first.paths.folder)


@contextmanager
def submission_environment(script: str) -> Iterator[None]:
    """Hide the variables that would override what a batch script says, and say which.

    These are the options of the shell or of a module (SBATCH_*), the size and GPUs of a job around
    this shell (SLURM_*), and the ranks of another launcher.
    """
    # The site decides what the run leaves to it, such as the account.
    options = OPTION_LINE.findall(script)
    of_site = {
        name: f"the run leaves {option} to it"
        for name, option in SITE_VARIABLES.items()
        if name in os.environ and option not in options
    }
    kept = {
        name: os.environ[name]
        for name in (*CLUSTER_VARIABLES, *of_site)
        if name in os.environ
    }

    # Inside a job, SLURM has set the variables of that job: nobody chose them for this one.
    prefixes: tuple[str, ...] = ("SBATCH_",)
    if "SLURM_JOB_ID" not in os.environ:
        prefixes = ("SBATCH_", "SLURM_", "SRUN_")
    left_out = sorted(
        name
        for name in os.environ
        if name in RANK_VARIABLES or (name.startswith(prefixes) and name not in kept)
    )

    # Nothing of the environment is dropped, or counts, in silence.
    if left_out:
        _say_once(
            f"left out of the job, so that the run decides: {', '.join(left_out)}"
        )
    for name, why in of_site.items():
        _say_once(f"{name}={os.environ[name]} of this shell counts: {why}")

    with helpers.clean_env(RANK_VARIABLES):
        os.environ.update(kept)
        yield


# ---- in a task of the job ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class StageJob:
    """Run a stage's script in every task. Small, picklable, without torch. Paths are absolute."""

    script: str
    config: str  # resolved
    run_folder: str | None = None
    """Folder of checkpoints and attempts; None: each task is a job of its own
    instead of a rank of one job, and has its record in the job's folder."""

    @property
    def arguments(self) -> list[str]:
        return [self.script, "--config", self.config]

    def heading(self, num_tasks: int) -> str:
        script = "/".join(Path(self.script).parts[-2:])
        return f"{script}: {num_tasks} process(es), settings in {self.config}"

    def __call__(self) -> int:
        task = _enter_task()

        def stop_early(number: int, _: object) -> None:
            # Nothing to save: the script has no handlers, or has not set them yet.
            state = "; finished work is kept"
            if self.run_folder:
                state = " before training started"
            print(f"stopped by {signal.Signals(number).name}{state}", flush=True)
            os._exit(EXIT_STOPPED_RESUMABLE)

        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, stop_early)

        # One rank records the attempt for all.
        if task.global_rank == 0:
            nodes = task.hostnames[: task.num_nodes]
            attempt = begin_attempt(
                self.run_folder or task.paths.folder / task.job_id,
                cluster="slurm",
                job_id=task.job_id,
                restart=restart_count(),
                nodes=nodes,
            )
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            job = f"job {task.job_id} on {', '.join(nodes)}"
            print(f"{now} attempt {attempt.number} of the run, {job}", flush=True)
            print(self.heading(task.num_tasks), flush=True)

        code = run_in_process(self.arguments, self.run_folder or "")
        skip_teardown(code)
        if code:
            # The script has reported its error; no traceback is needed.
            raise SystemExit(code)
        return code


def _enter_task() -> JobEnvironment:
    """Set torch's environment variables for this process; clear an earlier attempt's result."""
    environment = JobEnvironment()

    # A line of `launch.setup`, --chdir or a container may have changed the folder, and a run's
    # paths may be relative.
    with suppress(OSError, KeyError):
        os.chdir(os.environ["SLURM_SUBMIT_DIR"])

    # submitit logs every SIGCONT, which SLURM sends before SIGTERM.
    signal.signal(signal.SIGCONT, signal.SIG_DFL)

    # Names of nodes need not be host names.
    exported = helpers.TorchDistributedEnvironment().export(
        set_cuda_visible_devices=False, overwrite=True
    )
    os.environ["MASTER_ADDR"] = reachable_address(exported.master_addr)

    # A half-written result of a killed attempt would make submitit fail this one at its end.
    result = environment.paths.result_pickle
    for path in (result, result.with_name(f"{result.name}.save_tmp")):
        path.unlink(missing_ok=True)
    return environment


def run_in_process(arguments: list[str], run_folder: str) -> int:
    """Run a script in this process as `python ARGUMENTS` would. Returns its exit code.

    run_folder: where an error that leaves it is recorded, if the script has not.
    """
    sys.argv = arguments

    # The configuration is complete; a site file edited since must not change it.
    os.environ[SITE_VARIABLE] = ""

    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        # Its context is an error that was printed; a bare code is a decision of the script.
        if end.code:
            _record_end(run_folder, end.__context__)

        # As Python does at its own end, a text is printed and counts as code 1.
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:
        _record_end(run_folder, error)
        raise
    return 0


def _record_end(run_folder: str, error: BaseException | None) -> None:
    """Record what ended one of several ranks before it could: a broken package, for example."""
    if error is None or os.environ["WORLD_SIZE"] == "1":
        return

    # A report of the script itself says more.
    rank = int(os.environ["RANK"])
    known = read_failures(run_folder, attempt=os.environ[ATTEMPT_VARIABLE])
    if any(report.reported_by == rank for report in known):
        return

    node = node_name()
    first_line = str(error).partition("\n")[0]
    failure = Failure(
        kind=FailureKind.OTHER,
        what=f"rank {rank} on {node} ended with an error: {type(error).__name__}: {first_line}",
        rank=rank,
        node=node,
        reported_by=rank,
    )
    record_failure(run_folder, failure)
