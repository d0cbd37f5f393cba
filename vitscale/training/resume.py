"""Resume a run from a checkpoint: compatibility, changed settings, and restoring state.

Leaves out: files (`checkpoint`), state by name (`engine`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vitscale.checkpoint.folders import Checkpoint
from vitscale.checkpoint.tensors import SavedTensors, Slice, read_header
from vitscale.config.errors import UserError
from vitscale.config.redaction import flatten_params
from vitscale.data.order import ORDER_VERSION
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import errors_on_all_ranks, gather_objects
from vitscale.engine.engine import Engine
from vitscale.models.settings import Architecture
from vitscale.runs.training import TrainingPlan, TrainingRun


def compatibility_key(
    run: TrainingRun, arch: Architecture, data: TrainingSet, agreed: dict[str, Any]
) -> dict[str, Any]:
    """What a checkpoint and a run must agree on for resuming, and what transfer reads.

    agreed: what the objective adds.
    """
    optim = run.optim
    return {
        "stage": run.stage,  # type: ignore[attr-defined]  # every concrete run type has it
        "architecture": arch.description(),
        "grid": list(arch.grid),
        "num_prefix_tokens": arch.num_prefix_tokens,
        "objective": run.objective.name,  # type: ignore[attr-defined]  # as `stage`
        "optimizer": optim.name,
        "layer_decay": optim.layer_decay,
        "weight_decay_mode": optim.weight_decay_mode,
        "ema": None if optim.ema is None else optim.ema.model_dump(mode="json"),
        "data_fingerprint": data.fingerprint,
        "only_keys": data.key_hash,
        "order_version": ORDER_VERSION,
        "label_map_sha256": data.label_map_sha256,
        "global_batch": run.data.global_batch,
        "seed": run.seed,
    } | agreed


def changed_settings(folder: Path, run: TrainingRun) -> list[str]:
    """Lines that list how the settings differ from the last start's; such changes are no error."""
    try:
        last = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    before, now = flatten_params(last), flatten_params(run.model_dump(mode="json"))
    rows = [
        f"    {key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    return ["changed since the last start:", *rows] if rows else []


def check_resumable(
    checkpoint: Checkpoint, description: dict[str, Any], plan: TrainingPlan
) -> None:
    """Raise UserError when resuming from this checkpoint would not continue its run."""
    where = str(checkpoint.folder)
    another = "choose another name (name=...), or remove the run folder to start over"
    saved = checkpoint.description
    changed = [
        f"    {key}: checkpoint {saved.get(key)!r}, now {value!r}"
        for key, value in description.items()
        if saved.get(key) != value
    ]
    if changed:
        table = "\n".join(changed)
        what = f"this checkpoint belongs to another run; resuming would not continue it\n{table}"
        raise UserError(what, where=where, next_step=f"undo the change, or {another}")
    seen, due = checkpoint.progress["samples_seen"], checkpoint.step * plan.global_batch
    if seen != due:
        what = f"{seen} samples seen by step {checkpoint.step}, which are {due} of this run"
        raise UserError(what, where=where, next_step=f"use the checkpoint before it, or {another}")
    if checkpoint.step > plan.total_steps:
        what = f"step {checkpoint.step} is beyond the {plan.total_steps} steps of this run"
        raise UserError(what, where=where, next_step=f"raise schedule.steps, or {another}")


def restore_engine(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore everything that the next step depends on. Every rank reads what it would save.

    The header of each file is read by one rank. Collective.
    Raises StorageError, on all ranks, when the files of a verified checkpoint cannot be read.
    """
    world, progress, own = engine.world, checkpoint.progress, list[Slice]()
    with errors_on_all_ranks("cannot be read", checkpoint.folder):
        for name in checkpoint.files[world.rank :: world.world_size]:
            own += read_header(checkpoint.folder / name)
    slices = [each for found in gather_objects(own) for each in found]
    with SavedTensors(checkpoint.folder, slices) as saved:
        engine.import_state(saved.part, optimizer_steps=progress["optimizer_steps"])
    engine.import_counters(progress["engine"])
