"""Settings of the `launch` group: what one job asks of SLURM (or of this machine)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vitscale.config.section import Section


class LaunchSettings(Section):
    nodes: int = Field(default=1, gt=0)
    tasks_per_node: int = Field(default=1, gt=0)
    """Processes per node: one per GPU."""
    gpus_per_node: int = Field(default=0, ge=0)
    gpu_request: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """How GPUs are asked for; sites differ."""
    gpu_type: str | None = None
    """Site's GPU type, for example h200: --gpus-per-node=h200:8."""
    cpus_per_task: int = Field(default=1, gt=0)
    mem_gb: int | None = Field(default=None, gt=0)
    """Memory per node; null: the site's default."""
    timeout_min: int = Field(default=1440, gt=0)
    """Wall time of one job; a run outlives it by being requeued."""
    signal_delay_s: int = Field(default=120, gt=0)
    """Warning before the end, used to commit a checkpoint and requeue."""
    max_requeues: int = Field(default=100, ge=0)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    comment: str | None = None
    setup: tuple[str, ...] = Field(default=(), strict=False)
    """Shell lines run in the batch script before srun (module load ..., export ...)."""
    srun_args: tuple[str, ...] = Field(default=(), strict=False)
    python: str | None = None
    """Interpreter command on the nodes, for example a container call; null: this interpreter."""
    sbatch: dict[str, str | int | bool] = {}
    """Further sbatch options, passed as they are."""
