"""Open a training session: process group, data, engine, checkpoints and tracking, in this order.

Leaves out: what happens in a step (`loop`), and what a checkpoint must agree on (`resume`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from vitscale.checkpoint.store import CheckpointStore, run_folder_lock
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.loader import Batch, open_loader, training_batches
from vitscale.data.training_set import TrainingSet, open_training_set
from vitscale.distributed.atomic_files import write_text
from vitscale.distributed.heartbeat import Heartbeat
from vitscale.distributed.random_numbers import stream_key
from vitscale.distributed.world import (
    PreemptionFlag,
    World,
    process_group,
)
from vitscale.engine.configuration import deepspeed_config, resolve_compile, resolve_precision
from vitscale.engine.engine import Engine
from vitscale.engine.settings import EngineSettings
from vitscale.evaluation.evaluation import Subject
from vitscale.evaluation.schedule import ScheduledEvaluations
from vitscale.images.decoders import resolve_decoder
from vitscale.models.interface.architecture import Architecture
from vitscale.models.registry import MODELS
from vitscale.optim.optimizer import build_optimizer, optimizer_groups
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan
from vitscale.tracking.console import ProgressLine
from vitscale.tracking.tracker import Tracker
from vitscale.training.detectors import (
    LossSpikeDetector,
    SkippedUpdateMonitor,
    UnreadableSampleMonitor,
)
from vitscale.training.interval_log import IntervalLog
from vitscale.training.loop import TrainingSession
from vitscale.training.meters import IntervalMeter, matmul_flops, peak_flops, profiled
from vitscale.training.objective import Objective, check_objective
from vitscale.training.resume import (
    PROVENANCE,
    changes,
    check_resumable,
    compatibility_key,
    provenance,
    restore,
)

# Loads weights into a fresh model, the same on every rank; returns what to say about them.
InitialWeights = Callable[[nn.Module, Architecture], list[str]]


@contextmanager
def open_session(
    run: TrainingRun, objective: Objective, *, initial_weights: InitialWeights | None = None
) -> Iterator[TrainingSession]:
    """Open a run: join the ranks, read the index, build the engine, resume, start tracking.

    initial_weights: what a new run starts from; None: random weights. Ignored when resuming.
    Raises UserError for anything that cannot train, before the first step.
    """
    with ExitStack() as stack:
        world = stack.enter_context(_join(run.engine))
        heartbeat = stack.enter_context(Heartbeat(world, timeout_min=run.engine.timeout_min))
        data, val_index = _read_data(run)
        arch = _architecture_for(run, objective, data)
        check_objective(
            objective, num_classes=len(data.classes), views=run.data.views, path=run.data.path
        )
        objective.prepare(arch=arch, device=world.device)
        plan = training_plan(run, world_size=world.world_size, num_samples=data.num_samples)
        key = compatibility_key(run, arch, data, objective=objective.settings.name)
        key |= objective.compatibility()
        folder = Path(run.folder)
        stack.enter_context(run_folder_lock(folder, world=world))
        store = stack.enter_context(
            CheckpointStore(folder, keep=run.checkpoint.keep, world=world, heartbeat=heartbeat)
        )
        checkpoint, messages = store.newest()
        check_resumable(run, checkpoint, key, plan)
        model = _build_model(run, objective, arch)
        if checkpoint is None and initial_weights is not None:
            messages += initial_weights(model, arch)
        engine = _build_engine(run, plan, world, arch, model)
        facts = provenance(run, world, dtype=engine.dtype)
        meter, spikes = IntervalMeter(world.device), LossSpikeDetector()
        if checkpoint is not None:
            restore(engine, objective, meter, spikes, checkpoint=checkpoint, world=world)
            messages += changes(checkpoint.description, facts)
        start_step = checkpoint.step if checkpoint else 0
        log = _open_log(stack, run, plan, engine, objective, arch, data, start_step, meter, spikes)
        for line in [*messages, *_opening_lines(run, plan, objective, arch, engine, start_step)]:
            log.progress.message(line)
        yield TrainingSession(
            run=run,
            objective=objective,
            world=world,
            folder=folder,
            plan=plan,
            arch=arch,
            data=data,
            val_index=val_index,
            engine=engine,
            store=store,
            description=key | {PROVENANCE: facts},
            log=log,
            evaluations=_evaluations(run, objective, engine, arch, data, val_index),
            preemption=stack.enter_context(PreemptionFlag()),
            batches=stack.enter_context(_open_batches(run, plan, world, arch, data, start_step)),
            heartbeat=heartbeat,
            start_step=start_step,
        )


def _join(settings: EngineSettings) -> AbstractContextManager[World]:
    return process_group(
        device=settings.device,
        timeout_min=settings.timeout_min,
        num_threads=settings.num_threads,
        init_timeout_min=settings.init_timeout_min,
    )


def _open_log(
    stack: ExitStack,
    run: TrainingRun,
    plan: TrainingPlan,
    engine: Engine,
    objective: Objective,
    arch: Architecture,
    data: TrainingSet,
    start_step: int,
    meter: IntervalMeter,
    spikes: LossSpikeDetector,
) -> IntervalLog:
    folder, world = Path(run.folder), engine.world
    if world.is_first:
        write_text(folder / "config.yaml", run_to_yaml(run))
    progress = stack.enter_context(
        ProgressLine.open(
            folder=folder,
            total_steps=plan.total_steps,
            start_step=start_step,
            title=run.name,
            is_writer=world.is_first,
        )
    )
    return IntervalLog(
        world=world,
        plan=plan,
        start_step=start_step,
        tracker=stack.enter_context(_open_tracker(run, world, progress, start_step)),
        progress=progress,
        meter=meter,
        spikes=spikes,
        skipped=SkippedUpdateMonitor(
            data=data,
            plan=plan,
            max_in_a_row=run.engine.max_skipped_steps,
            num_reported=engine.health().skipped,
        ),
        unreadable=UnreadableSampleMonitor(
            data=data, max_fraction=run.data.max_unreadable_fraction
        ),
        flops_per_image=objective.train_flops_per_image(arch),
        rates=_rates(world),
        profile=stack.enter_context(
            profiled(
                folder / "profile.json" if world.is_first else None,
                steps=run.engine.profile_steps,
                say=progress.message,
            )
        ),
    )


def _open_batches(
    run: TrainingRun,
    plan: TrainingPlan,
    world: World,
    arch: Architecture,
    data: TrainingSet,
    start_step: int,
) -> AbstractContextManager[Iterator[Batch]]:
    return open_loader(
        training_batches(
            data,
            settings=run.data,
            image_size=arch.image_size,
            seed=run.seed,
            start=start_step * plan.global_batch,
            stop=plan.total_steps * plan.global_batch,
            rank=world.rank,
            world_size=world.world_size,
            micro_batch=plan.micro_batch,
            pin_memory=world.device.type == "cuda",
        )
    )


def _evaluations(
    run: TrainingRun,
    objective: Objective,
    engine: Engine,
    arch: Architecture,
    data: TrainingSet,
    val_index: SplitIndex | None,
) -> ScheduledEvaluations:
    subject = None
    if val_index is not None:
        subject = Subject(
            engine=engine,
            train=tuple(data.parts),
            val=val_index,
            data=run.data,
            image_size=arch.image_size,
            micro_batch=run.engine.max_micro_batch,
        )
    return ScheduledEvaluations(
        objective.evaluations(run), subject, has_average=run.optim.ema is not None
    )


def _rates(world: World) -> dict[str, float]:
    """FLOP/s of one device where they are known; `perf/mfu` is a share of the datasheet's."""
    rates = {
        "perf/mfu": peak_flops(world.device),
        "perf/mfu_of_matmul": matmul_flops(world.device),
    }
    return {name: rate for name, rate in rates.items() if rate is not None}


def _read_data(run: TrainingRun) -> tuple[TrainingSet, SplitIndex | None]:
    training_set = open_training_set(run.data, seed=run.seed)
    val_split = run.data.val_split
    if val_split is None:
        return training_set, None
    return training_set, read_split(run.data.path, split=val_split, remote_settings=run.data.remote)


def _architecture_for(run: TrainingRun, objective: Objective, data: TrainingSet) -> Architecture:
    if not objective.trains_classifier:
        return run.model.architecture(num_classes=0)
    wanted, found = run.model.num_classes, len(data.classes)
    if wanted is not None and wanted != found:
        raise UserError(
            f"{wanted} classes, but the label map of {run.data.path} has {found} "
            f"(the first is {data.classes[0]!r})",
            where="model.num_classes",
            next_step=f"set model.num_classes={found} (or null), or data.path to other shards",
        )
    return run.model.architecture(num_classes=found)


def _build_model(run: TrainingRun, objective: Objective, arch: Architecture) -> nn.Module:
    """The same weights on every rank, from the run's seed."""
    model: nn.Module = MODELS[arch.name].load().build_model(run.model, arch, seed=run.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_key("objective", run.seed) >> 1)
        objective.extend_model(model, arch)
    return model


def _build_engine(
    run: TrainingRun, plan: TrainingPlan, world: World, arch: Architecture, model: nn.Module
) -> Engine:
    family = MODELS[arch.name].load()
    dtype = resolve_precision(run.engine, world.device)
    if run.engine.activation_checkpointing:
        family.checkpoint_activations(model)
    compiled = resolve_compile(run.engine, world.device)
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
        clip_norm=run.optim.clip_norm,
        dtype=dtype,
        raw=run.deepspeed,
    )
    try:
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


def _opening_lines(
    run: TrainingRun,
    plan: TrainingPlan,
    objective: Objective,
    arch: Architecture,
    engine: Engine,
    start_step: int,
) -> Iterator[str]:
    if start_step:
        yield f"resuming {run.folder} at step {start_step}"
    dtype = str(engine.dtype).removeprefix("torch.")
    yield (
        f"{run.name}: {objective.num_parameters(arch) / 1e6:.1f} M parameters "
        f"at {arch.image_size} px, "
        f"{plan.num_samples} images, {arch.num_classes} classes; {plan.equation}; "
        f"{plan.total_steps} steps; {engine.world.device.type}, {dtype}, "
        f"ZeRO {run.engine.zero_stage}; decoder {resolve_decoder(run.data.decoder)}"
    )


def _open_tracker(
    run: TrainingRun, world: World, progress: ProgressLine, start_step: int
) -> Tracker:
    return Tracker.open(
        folder=run.folder,
        settings=run.tracking,
        run_name=run.name,
        stage=run.stage,  # type: ignore[attr-defined]  # every concrete run type has it
        params=run.model_dump(mode="json"),
        tags={"vitscale.model": run.model.preset or "custom"},
        config_yaml=run_to_yaml(run),
        resume_step=start_step,
        is_writer=world.is_first,
        say=progress.message,
    )
