"""Resume a run from a checkpoint: compatibility, provenance, and restoring state.

Leaves out: files (`checkpoint`), state by name (`engine`).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vitscale.checkpoint.folders import Checkpoint
from vitscale.checkpoint.tensors import SavedTensors, Slice, read_header
from vitscale.config.errors import UserError
from vitscale.data.order import ORDER_VERSION
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import World, agree_no_error, gather_objects
from vitscale.engine.engine import Engine
from vitscale.images.decoders import resolve_decoder
from vitscale.models.settings import Architecture
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.tracking.run_facts import flatten_params
from vitscale.tracking.source_version import git_commit

PROVENANCE = "record"
RECORDED_PACKAGES = ("torch", "deepspeed", "timm", "numpy", "pillow", "simplejpeg", "vitscale")
CHANGES_SHOWN = 20


def compatibility_key(
    run: TrainingRun, arch: Architecture, data: TrainingSet, *, objective: str
) -> dict[str, Any]:
    """What a checkpoint and a run must agree on for resuming, and what transfer reads."""
    optim = run.optim
    return {
        "stage": run.stage,  # type: ignore[attr-defined]  # every concrete run type has it
        "architecture": arch.description(),
        "grid": list(arch.grid),
        "num_prefix_tokens": arch.num_prefix_tokens,
        "objective": objective,
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
    }


def provenance(run: TrainingRun, world: World, *, dtype: torch.dtype) -> dict[str, str]:
    """Everything else that can change what a run computes, as text without secrets."""
    facts = {f"config {key}": text for key, text in flatten_params(run.model_dump()).items()}
    facts["number of ranks"] = str(world.world_size)
    facts["device"] = world.device.type
    if world.device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(world.device)
    facts["precision"] = str(dtype).removeprefix("torch.")
    facts["decoder"] = resolve_decoder(run.data.decoder)
    facts["threads per rank"] = str(torch.get_num_threads())
    facts["python"] = platform.python_version()
    facts |= {name: _version(name) for name in RECORDED_PACKAGES}
    facts["git commit"] = (git_commit() if world.is_first else None) or "unknown"
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def changes(saved: Mapping[str, Any], now: Mapping[str, str]) -> Iterator[str]:
    """One message that lists the changed provenance; such changes are reported, not refused."""
    before = saved.get(PROVENANCE)
    if not isinstance(before, Mapping):
        return
    rows = [
        f"    {key.removeprefix('config ')}: {before.get(key, 'not set')} -> "
        f"{now.get(key, 'not set')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if rows:
        more = [f"    ... {len(rows) - CHANGES_SHOWN} more"] if len(rows) > CHANGES_SHOWN else []
        yield "\n".join(["changed since the checkpoint:", *rows[:CHANGES_SHOWN], *more])


def check_resumable(
    run: TrainingRun, checkpoint: Checkpoint | None, description: dict[str, Any], plan: TrainingPlan
) -> None:
    """Raise UserError when resuming from this checkpoint would not continue its run."""
    if checkpoint is None:
        return
    where = str(checkpoint.folder)
    another = "choose another name (name=...), or remove the run folder to start over"
    saved = checkpoint.description
    changed = [
        f"    {key}: checkpoint {saved.get(key)!r}, now {value!r}"
        for key, value in description.items()
        if key != PROVENANCE and saved.get(key) != value
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

    Collective.

    Raises UserError, on all ranks, when the files of a verified checkpoint cannot be read.
    """
    slices = _all_slices(checkpoint, engine.world)
    progress = checkpoint.progress
    with SavedTensors(checkpoint.folder, slices) as saved:
        engine.import_state(saved.part, optimizer_steps=progress["optimizer_steps"])
    engine.import_counters(progress["engine"])


def _all_slices(checkpoint: Checkpoint, world: World) -> list[Slice]:
    """What all files hold; each header is read by one rank. Collective.

    Raises UserError on all ranks.
    """
    own, error = list[Slice](), None
    try:
        for name in checkpoint.files[world.rank :: world.world_size]:
            own += read_header(checkpoint.folder / name)
    except OSError as caught:
        error = f"{checkpoint.folder}: cannot be read ({caught.strerror})"
    agree_no_error(error)
    return [each for slices in gather_objects(own) for each in slices]
