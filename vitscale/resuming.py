"""What a checkpoint says of its run, and whether a run may go on from it.

Owns: the description that is compared, and putting the saved state back.
Leaves out: files (`checkpoint`), state by name (`engine`).
"""

from __future__ import annotations

from typing import Any

from vitscale.checkpoint.folders import Checkpoint
from vitscale.data.training_set import TrainingSet
from vitscale.distributed import Ranks, agree_no_error
from vitscale.engine.engine import Engine
from vitscale.errors import UserError
from vitscale.models.settings import Architecture
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.speed import IntervalMeter


def describe(run: TrainingRun, arch: Architecture, data: TrainingSet) -> dict[str, Any]:
    """What a checkpoint must agree with to be resumed, and what transfer needs to know."""
    return {
        "stage": run.stage,  # type: ignore[attr-defined]  # every concrete run type has it
        "architecture": arch.description(),
        "grid": list(arch.grid),
        "num_prefix_tokens": arch.num_prefix_tokens,
        "optimizer": run.optim.name,
        "data_fingerprint": data.fingerprint,
        "label_map_sha256": data.label_map_sha256,
        "global_batch": run.data.global_batch,
        "seed": run.seed,
    }


def check_resumable(
    run: TrainingRun, checkpoint: Checkpoint | None, description: dict[str, Any], plan: TrainingPlan
) -> None:
    if checkpoint is None:
        return
    where = str(checkpoint.folder)
    another = "choose another name (name=...), or remove the run folder to start over"
    if run.checkpoint.resume == "never":
        what = f"the run folder holds a checkpoint of step {checkpoint.step}"
        raise UserError(what, where=where, next_step=f"set checkpoint.resume=auto, or {another}")
    changed = [
        f"    {key}: checkpoint {checkpoint.description.get(key)!r}, now {value!r}"
        for key, value in description.items()
        if checkpoint.description.get(key) != value
    ]
    if changed:
        table = "\n".join(changed)
        what = f"this checkpoint belongs to another run; resuming would not continue it\n{table}"
        raise UserError(what, where=where, next_step=f"undo the change, or {another}")
    if checkpoint.step > plan.total_steps:
        what = f"step {checkpoint.step} lies behind the {plan.total_steps} steps of this run"
        raise UserError(what, where=where, next_step=f"raise schedule.steps, or {another}")


def restore(engine: Engine, meter: IntervalMeter, checkpoint: Checkpoint, ranks: Ranks) -> None:
    error = None
    try:
        tensors = checkpoint.tensors()
    except OSError as caught:
        error = f"{checkpoint.folder}: cannot be read ({caught.strerror})"
    agree_no_error(error)
    progress = checkpoint.progress
    engine.import_state(tensors, optimizer_steps=progress["optimizer_steps"])
    meter.load_state(progress["interval"], rank=ranks.rank, world_size=ranks.world_size)
