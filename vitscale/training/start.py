"""What a run starts from: architecture, model, engine, and the state of a checkpoint.

Leaves out: their order (`session`), files (`checkpoint`), state by name (`engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from vitscale.checkpoint.folders import Checkpoint
from vitscale.checkpoint.tensors import SavedTensors, Slice, read_header
from vitscale.config.errors import UserError
from vitscale.config.redaction import flatten_params
from vitscale.data.order import ORDER_VERSION
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.random_numbers import stream_key
from vitscale.distributed.world import World, broadcast_tensor, errors_on_all_ranks, gather_objects
from vitscale.engine.engine import Engine, check_nan_is_skipped, deepspeed_config, resolve_precision
from vitscale.engine.settings import EngineSettings
from vitscale.models.registry import MODELS
from vitscale.models.settings import Architecture
from vitscale.optim.optimizers import build_optimizer, optimizer_groups
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.training.objective import Objective

# Loads weights into a fresh model; returns their source, and what to say about them.
InitialWeights = Callable[[nn.Module, Architecture], tuple[str | None, list[str]]]


def build_architecture(run: TrainingRun, objective: Objective, data: TrainingSet) -> Architecture:
    """Raises UserError when the model and the label map disagree."""
    if not objective.trains_classifier:
        return run.model.resolved(num_classes=0)
    wanted, found = run.model.num_classes, len(data.classes)
    if wanted is not None and wanted != found:
        raise UserError(
            f"{wanted} classes, but the label map of {run.data.path} has {found} "
            f"(the first is {data.classes[0]!r})",
            where="model.num_classes",
            next_step=f"set model.num_classes={found} (or null), or data.path to other shards",
        )
    return run.model.resolved(num_classes=found)


def build_model(run: TrainingRun, objective: Objective, arch: Architecture) -> nn.Module:
    """The same weights on every rank, from the run's seed."""
    model: nn.Module = MODELS[arch.name].load().build_model(arch, seed=run.seed)
    for name in model.state_dict():
        if name.endswith(("running_mean", "running_var")):
            raise UserError(
                f"{run.model.title} has BatchNorm ({name}): its statistics would differ between "
                "ranks, and after a resume",
                where="model",
                allowed="models with LayerNorm, GroupNorm or none",
                next_step="take another model; as a teacher and in evaluations any will do",
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_key("objective", run.seed) >> 1)
        objective.extend_model(model, arch)
    return model


def start_from(
    model: nn.Module, arch: Architecture, load: InitialWeights, world: World
) -> tuple[str | None, list[str]]:
    """Let rank 0 load weights into a fresh model on the CPU; copy them to all ranks. Collective.

    Returns what `load` does. Raises UserError, on all ranks, when `load` does.
    """
    with errors_on_all_ranks("cannot be read", "init"):
        found = load(model, arch) if world.is_first else (None, [])
    for tensor in model.state_dict().values():
        broadcast_tensor(tensor, source=0)
    return found


def is_compiled(engine: EngineSettings, device: torch.device) -> bool:
    """Whether the blocks of models are compiled."""
    if engine.compile == "auto":
        return device.type == "cuda" and engine.zero_stage < 3
    return engine.compile


def build_engine(
    run: TrainingRun, plan: TrainingPlan, world: World, arch: Architecture, model: nn.Module
) -> Engine:
    """Move the model to the device, compile it, and give it an optimiser and an engine."""
    family = MODELS[arch.name].load()
    dtype = resolve_precision(run.engine, world.device)
    compiled = is_compiled(run.engine, world.device)
    if run.engine.activation_checkpointing:
        family.checkpoint_activations(model)
    if compiled:
        family.compile_blocks(model)
    model.to(world.device)
    groups = optimizer_groups(
        model.named_parameters(),
        settings=run.optim,
        decayed=family.decayed,
        layers_above=lambda name: family.layers_above(name, arch),
    )
    config = deepspeed_config(
        run.engine,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        world_size=world.world_size,
        largest_parameter=max(each.numel() for each in model.parameters()),
        clip_norm=run.optim.clip_norm,
        dtype=dtype,
        raw=run.deepspeed,
    )
    try:
        check_nan_is_skipped(config, world=world, dtype=dtype)
        return Engine(
            model,
            optimizer=build_optimizer(groups, settings=run.optim, device=world.device),
            optimizer_name=run.optim.name,
            config=config,
            world=world,
            dtype=dtype,
            mean=run.data.mean,
            std=run.data.std,
            ema=run.optim.ema,
            compile_input=compiled,
        )
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        if not run.deepspeed:
            raise
        what = f"DeepSpeed does not start with them: {error}"
        raise UserError(what, where="deepspeed", next_step="fix or remove the raw keys") from error


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
    changed = ""
    for key, now in description.items():
        before = checkpoint.description.get(key)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            names = [name for name in before | now if before.get(name) != now.get(name)]
            before, now = ({name: each.get(name) for name in names} for each in (before, now))
        changed += f"\n    {key}: checkpoint {before!r}, now {now!r}"
    if changed:
        what = f"this checkpoint belongs to another run; resuming would not continue it{changed}"
        raise UserError(what, where=where, next_step=f"undo the change, or {another}")
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
        for path in checkpoint.files[world.rank :: world.world_size]:
            own += read_header(path)
    slices = [each for found in gather_objects(own) for each in found]
    with SavedTensors(slices) as saved:
        engine.import_state(saved.part, optimizer_steps=progress["optimizer_steps"])
    engine.import_counters(progress["engine"])
