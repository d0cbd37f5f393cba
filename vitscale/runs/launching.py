"""Settings of the `launch` group: resources of one job, on SLURM or on this machine.

A batch script is shell, and sbatch reads options from its comment lines: a newline inside a value
would end the line, and the rest would run as shell. Hence every text is printable and on one line;
submitit quotes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vitscale.config.redaction import SECRET_ASSIGNMENT
from vitscale.config.section import Items, Problems, Section

NodeRange = Annotated[str, Field(pattern=r"^[1-9]\d*-[1-9]\d*$", examples=["2-8"])]


class LaunchSettings(Section):
    """What one job asks of SLURM, or of this machine."""

    nodes: PositiveInt | NodeRange = 1
    """Nodes of the job; 2-8: at each start as many of these as are free."""
    tasks_per_node: PositiveInt = 1
    """Processes per node: one per GPU."""
    num_tasks: PositiveInt = 1
    """Data preparation only: tasks that share the work, one node each, as a SLURM array."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each node; 0: CPU only."""
    gpu_request: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """How GPUs are requested; sites differ. none: GPUs come with the partition."""
    gpu_type: str | None = None
    """The site's GPU type, for example h200: --gpus-per-node=h200:8."""
    cpus_per_task: PositiveInt = 1
    """Cores per process."""
    mem_gb: PositiveInt | None = None
    """Memory per node, in an array per task; null: the site's default."""
    timeout_min: PositiveInt = 1440
    """SLURM only: wall time of one job; the run continues in requeued jobs."""
    signal_delay_s: PositiveInt = 120
    """How long before its end a job is warned, to save and requeue."""
    max_requeues: NonNegativeInt = 100
    """Times that a job is requeued, for any reason, before it stops for good."""
    partition: str | None = None
    """SLURM partition, or several with commas; null: the site's default."""
    account: str | None = None
    """SLURM account; null: the site's default."""
    setup: Items[str] = ()
    """Shell lines run in the batch script before srun (module load ..., export ...)."""
    srun_args: Items[str] = ()
    """Further options of srun, for example --cpu-bind=none."""
    python: str | None = None
    """Interpreter command on the nodes, for example a container call; null: this interpreter."""
    snapshot: bool = True
    """SLURM only: the job runs a copy of the code as submitted; false: the code on disk."""
    sbatch: dict[str, str | int | bool] = {}
    """Further sbatch options, passed unchanged, for example {qos: high, exclude: "n[3,5-7]"}."""

    @property
    def node_counts(self) -> range:
        """The numbers of nodes that SLURM may give the job."""
        fewest, _, most = str(self.nodes).partition("-")
        return range(int(fewest), int(most or fewest) + 1)

    @property
    def num_ranks(self) -> int:
        """Processes on as many nodes as the job may get."""
        return self.node_counts[-1] * self.tasks_per_node


# sbatch options that other keys set.
SBATCH_OWNERS = {
    **{
        field.replace("_", "-"): f"launch.{field}"
        for field in LaunchSettings.model_fields
    },
    "array": "launch.num_tasks",
    "gres": "launch.gpus_per_node with launch.gpu_request=gres",
    "job-name": "name",
    "mem": "launch.mem_gb",
    "ntasks": "launch.nodes and launch.tasks_per_node",
    "ntasks-per-node": "launch.tasks_per_node",
    "signal": "launch.signal_delay_s",
    "time": "launch.timeout_min",
}
# Log files, signals and requeueing depend on these.
SBATCH_FIXED = "error no-requeue open-mode output requeue wrap".split()
# SLURM may send the warning this much earlier (man sbatch, --signal).
SIGNAL_EARLY_S = 60


def launch_problems(
    launch: LaunchSettings, *, independent_tasks: bool = False
) -> Problems:
    """Yield (dotted key, what is wrong and what to do) for every invalid setting.

    independent_tasks: the stage's tasks share work through files; none waits for another.
    """
    # These texts become lines of a batch script, which others can read.
    for key, text in _texts_of(launch):
        if not text.replace("\t", " ").isprintable():
            yield key, f"{text!r} is not one line of printable text"
        elif found := re.search(SECRET_ASSIGNMENT, text):
            name = found["name"]
            yield (
                key,
                f"gives the value of {name}, which the run's files would show; read it on the "
                f"nodes from a file that only you can read: export {name}=$(cat FILE)",
            )
        elif key.startswith("launch.srun_args") and not text.startswith("-"):
            yield key, f"{text!r} is not an option of srun such as --cpu-bind=none"

    for option in launch.sbatch:
        key = f"launch.sbatch.{option}" if option.isprintable() else "launch.sbatch"
        name = option.replace("_", "-")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            yield (
                key,
                f"{option!r} is not the long name of an sbatch option, such as mail-type",
            )
        elif owner := SBATCH_OWNERS.get(name):
            yield key, f"is not allowed here: set {owner} instead"
        elif name in SBATCH_FIXED:
            yield key, "is not allowed here: vitscale sets it; remove it"

    if not launch.node_counts:
        yield (
            "launch.nodes",
            f"{launch.nodes} begins with the larger number; turn it round",
        )
    if launch.signal_delay_s + SIGNAL_EARLY_S >= 60 * launch.timeout_min:
        yield (
            "launch.signal_delay_s",
            f"a warning {launch.signal_delay_s} s before the end (SLURM may send it "
            f"{SIGNAL_EARLY_S} s earlier) leaves no time of launch.timeout_min="
            f"{launch.timeout_min}; lower it or request more time",
        )

    if independent_tasks:
        for field, default in {
            "nodes": 1,
            "tasks_per_node": 1,
            "gpus_per_node": 0,
        }.items():
            if (value := getattr(launch, field)) != default:
                why = "is not possible: data preparation runs as independent tasks with one process"
                what = (
                    f"{why} and no GPU; leave it at {default} and set launch.num_tasks"
                )
                yield f"launch.{field}", f"{value} {what}"
        return

    if launch.num_tasks != 1:
        why = "is for data preparation only; the size of this job is launch.nodes x"
        yield "launch.num_tasks", f"{launch.num_tasks} {why} launch.tasks_per_node"
    if launch.gpus_per_node not in (0, launch.tasks_per_node):
        what = f"{launch.tasks_per_node} processes for {launch.gpus_per_node} GPUs per node"
        yield (
            "launch.tasks_per_node",
            f"{what}; set both to the same number, one process per GPU",
        )


def _texts_of(launch: LaunchSettings) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for each text."""
    for field, value in launch:
        texts = {"": value}
        if isinstance(value, tuple):
            texts = {f"[{position}]": each for position, each in enumerate(value)}
        if isinstance(value, dict):
            texts = {f".{key}": each for key, each in value.items()}
        yield from (
            (f"launch.{field}{k}", v) for k, v in texts.items() if isinstance(v, str)
        )
