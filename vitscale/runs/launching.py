"""Settings of the `launch` group: resources of one job, on SLURM or on this machine.

Owns: the fields and their validation. A batch script is shell, and sbatch reads options from its
comment lines: a newline inside a value would end the line, and the rest would run as shell. Hence
every field allows only certain characters, all printable.
Leaves out: the script itself (launch/jobs/submission.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from vitscale.config.redaction import SECRET_ASSIGNMENT
from vitscale.config.section import Section


class LaunchSettings(Section):
    """What one job asks of SLURM, or of this machine."""

    nodes: int = Field(default=1, gt=0)
    """Nodes of the job."""
    tasks_per_node: int = Field(default=1, gt=0)
    """Processes per node: one per GPU."""
    num_tasks: int = Field(default=1, gt=0)
    """Data preparation only: tasks that share the work, one node each, as a SLURM array."""
    max_running_tasks: int | None = Field(default=None, gt=0)
    """Limit of tasks that run at a time; null: no limit."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs of each node; 0: CPU only."""
    gpu_request: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """How GPUs are requested; sites differ. none: GPUs come with the partition."""
    gpu_type: str | None = None
    """The site's GPU type, for example h200: --gpus-per-node=h200:8."""
    cpus_per_task: int = Field(default=1, gt=0)
    """Cores per process."""
    mem_gb: int | None = Field(default=None, gt=0)
    """Memory per node, in an array per task; null: the site's default."""
    timeout_min: int = Field(default=1440, gt=0)
    """SLURM only: wall time of one job; the run continues in requeued jobs."""
    signal_delay_s: int = Field(default=120, gt=0)
    """How long before its end a job is warned, to save and requeue."""
    max_requeues: int = Field(default=100, ge=0)
    """Times that a job is requeued, for any reason, before it stops for good."""
    max_fruitless_restarts: int = Field(default=3, ge=0)
    """Restarts in a row that may fail without a newer checkpoint; 0: a failure is final."""
    partition: str | None = None
    """SLURM partition, or several with commas; null: the site's default."""
    account: str | None = None
    """SLURM account; null: the site's default."""
    qos: str | None = None
    """SLURM quality of service; null: the site's default."""
    exclude: str | None = None
    """Nodes not to run on, for example node[3,5-7]."""
    setup: tuple[str, ...] = Field(default=(), strict=False)
    """Shell lines run in the batch script before srun (module load ..., export ...)."""
    srun_args: tuple[str, ...] = Field(default=(), strict=False)
    """Further options of srun, for example --cpu-bind=none."""
    python: str | None = None
    """Interpreter command on the nodes, for example a container call; null: this interpreter."""
    snapshot: bool = True
    """SLURM only: the job runs a copy of the code as submitted; false: the code on disk."""
    sbatch: dict[str, str | int | bool] = {}
    """Further sbatch options, passed unchanged, for example {constraint: a100&ib}."""


# One name, or several separated by commas.
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,+@-]*")
FIELD_PATTERNS = {
    "gpu_type": (re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*"), "letters, digits, '_', '.', '-'"),
    "partition": (_NAMES, "names separated by commas"),
    "account": (_NAMES, "a name"),
    "qos": (_NAMES, "a name"),
    "exclude": (re.compile(r"[A-Za-z0-9_.,\[\]-]+"), "node names such as node[3,5-7]"),
    "python": (re.compile(r".+"), "a command on one line"),
}
SBATCH_OPTION = re.compile(r"[a-z][a-z0-9-]*")
# Options set from other keys, or fixed because log files, signals and requeueing depend on them.
SBATCH_OWNED = {
    "account": "launch.account",
    "array": "launch.num_tasks and launch.max_running_tasks",
    "cpus-per-task": "launch.cpus_per_task",
    "error": None,
    "exclude": "launch.exclude",
    "gpus-per-node": "launch.gpus_per_node",
    "gres": "launch.gpus_per_node with launch.gpu_request=gres",
    "job-name": "name",
    "mem": "launch.mem_gb",
    "no-requeue": None,
    "nodes": "launch.nodes",
    "ntasks": "launch.nodes and launch.tasks_per_node",
    "ntasks-per-node": "launch.tasks_per_node",
    "open-mode": None,
    "output": None,
    "partition": "launch.partition",
    "qos": "launch.qos",
    "requeue": None,
    "signal": "launch.signal_delay_s",
    "time": "launch.timeout_min",
    "wrap": None,
}
# SLURM may send the warning this much earlier (man sbatch, --signal).
SIGNAL_EARLY_S = 60


def launch_problems(
    launch: LaunchSettings, *, independent_tasks: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, what is wrong and what to do) for every invalid setting.

    independent_tasks: the stage's tasks share work through files; none waits for another.
    """
    yield from _text_problems(launch)
    yield from _sbatch_problems(launch.sbatch)
    yield from _signal_problems(launch)
    if independent_tasks:
        yield from _array_problems(launch)
    else:
        yield from _single_job_problems(launch)


def _array_problems(launch: LaunchSettings) -> Iterator[tuple[str, str]]:
    for field, only in (("nodes", 1), ("tasks_per_node", 1), ("gpus_per_node", 0)):
        if (value := getattr(launch, field)) != only:
            yield (
                f"launch.{field}",
                f"{value} is not possible: data preparation runs as independent tasks with one "
                f"process and no GPU; leave it at {only} and set launch.num_tasks",
            )


def _single_job_problems(launch: LaunchSettings) -> Iterator[tuple[str, str]]:
    for field, unset in (("num_tasks", 1), ("max_running_tasks", None)):
        if (value := getattr(launch, field)) != unset:
            yield (
                f"launch.{field}",
                f"{value} is for data preparation only; the size of this job is "
                "launch.nodes x launch.tasks_per_node",
            )
    if launch.gpus_per_node and launch.tasks_per_node != launch.gpus_per_node:
        yield (
            "launch.tasks_per_node",
            f"{launch.tasks_per_node} processes for {launch.gpus_per_node} GPUs per node; "
            "set both to the same number, one process per GPU",
        )


def _text_problems(launch: LaunchSettings) -> Iterator[tuple[str, str]]:
    for field, (pattern, meaning) in FIELD_PATTERNS.items():
        value = getattr(launch, field)
        if value is not None and not (value.isprintable() and pattern.fullmatch(value)):
            yield (f"launch.{field}", f"{value!r} is not {meaning}")
    for position, line in enumerate(launch.setup):
        # Shell by design, tabs included, but one line per entry.
        if not line.replace("\t", " ").isprintable():
            yield (
                f"launch.setup[{position}]",
                f"{line!r} is not one line; use one entry per line",
            )
    words = {f"launch.setup[{position}]": line for position, line in enumerate(launch.setup)}
    words["launch.python"] = launch.python or ""
    words |= {f"launch.sbatch.{key}": str(value) for key, value in launch.sbatch.items()}
    for key, text in words.items():
        if found := SECRET_ASSIGNMENT.search(text):
            name = found["name"]
            yield (
                key,
                f"gives the value of {name}, which the run's files would show; read it on the "
                f"nodes from a file that only you can read: export {name}=$(cat FILE)",
            )
    for position, argument in enumerate(launch.srun_args):
        if not (argument.isprintable() and argument.startswith("-")):
            yield (
                f"launch.srun_args[{position}]",
                f"{argument!r} is not an option of srun such as --cpu-bind=none",
            )


def _sbatch_problems(options: dict[str, str | int | bool]) -> Iterator[tuple[str, str]]:
    for option, value in options.items():
        key = f"launch.sbatch.{option}" if option.isprintable() else "launch.sbatch"
        name = option.replace("_", "-")
        if not SBATCH_OPTION.fullmatch(name):
            yield (key, f"{option!r} is not the long name of an sbatch option, such as mail-type")
        elif name in SBATCH_OWNED:
            owner = SBATCH_OWNED[name]
            advice = f"set {owner} instead" if owner else "vitscale sets it; remove it"
            yield (key, f"is not allowed here: {advice}")
        if isinstance(value, str) and not (value and value.isprintable()):
            yield (key, f"{value!r} is not printable text on one line")


def _signal_problems(launch: LaunchSettings) -> Iterator[tuple[str, str]]:
    if launch.signal_delay_s + SIGNAL_EARLY_S >= 60 * launch.timeout_min:
        yield (
            "launch.signal_delay_s",
            f"a warning {launch.signal_delay_s} s before the end (SLURM may send it "
            f"{SIGNAL_EARLY_S} s earlier) leaves no time of launch.timeout_min="
            f"{launch.timeout_min}; lower it or request more time",
        )
