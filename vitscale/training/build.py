"""Build what a run trains: architecture, model and engine.

Leaves out: their order at the start of a run (`session`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from vitscale.config.errors import UserError
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.node_files import private_folder
from vitscale.distributed.random_numbers import stream_key
from vitscale.distributed.world import World, broadcast_tensor, errors_on_all_ranks
from vitscale.engine.configuration import deepspeed_config, resolve_compile, resolve_precision
from vitscale.engine.engine import Engine, check_nan_is_skipped
from vitscale.models.registry import MODELS
from vitscale.models.settings import Architecture
from vitscale.optim.optimizers import build_optimizer, optimizer_groups
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.training.objective import Objective

# Loads weights into a fresh model; returns what to say about them.
InitialWeights = Callable[[nn.Module, Architecture], list[str]]


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
) -> list[str]:
    """Let rank 0 load weights into a fresh model on the CPU; copy them to all ranks. Collective.

    Returns what `load` says. Raises UserError, on all ranks, when `load` does.
    """
    with errors_on_all_ranks("cannot be read", "init"):
        messages = load(model, arch) if world.is_first else []
    for tensor in model.state_dict().values():
        broadcast_tensor(tensor, source=0)
    return messages


def choose_kernels(run: TrainingRun, model: nn.Module, device: torch.device) -> bool:
    """How a model computes what it computes, in place; whether anything of it is compiled."""
    family = MODELS[run.model.name].load()
    if run.engine.activation_checkpointing:
        family.checkpoint_activations(model)
    compiled = resolve_compile(run.engine, device)
    if compiled:
        # Compiled code is executed; the folder that torch would choose may be another user's.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_folder() / "compiled"))
        family.compile_blocks(model)
    return compiled


def build_engine(
    run: TrainingRun, plan: TrainingPlan, world: World, arch: Architecture, model: nn.Module
) -> Engine:
    """Move the model to the device, compile it, and give it an optimiser and an engine."""
    family = MODELS[arch.name].load()
    dtype = resolve_precision(run.engine, world.device)
    compiled = choose_kernels(run, model, world.device)
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
        raise UserError(
            f"DeepSpeed does not start with them: {error}",
            where="deepspeed",
            next_step="fix or remove the raw keys",
        ) from error
