"""Open a training session: process group, data, engine, checkpoints and tracking, in this order.

Leaves out: what happens in a step (`loop`), and what a checkpoint must agree on (`resume`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from vitscale.checkpoint.run_lock import run_folder_lock
from vitscale.checkpoint.store import CheckpointStore
from vitscale.config.loader import run_to_yaml
from vitscale.config.redaction import redact
from vitscale.data.index import SplitIndex
from vitscale.data.training_set import TrainingSet, open_training_set, open_val_split
from vitscale.distributed.atomic_files import write_json, write_text
from vitscale.distributed.events import EVENTS_NAME, record_start
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.preemption import PreemptionFlag
from vitscale.distributed.retry import or_warn
from vitscale.distributed.watchdog import Watchdog
from vitscale.distributed.world import (
    World,
    broadcast_object,
    gather_objects,
    process_group,
)
from vitscale.evaluation.trained_model import CLASSES_NAME
from vitscale.images.decoders import resolve_decoder
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan
from vitscale.tracking.console import Console
from vitscale.tracking.run_facts import DATA_TAG, read_record
from vitscale.tracking.tracker import Tracker
from vitscale.training.build import (
    InitialWeights,
    build_architecture,
    build_engine,
    build_evaluations,
    build_model,
    open_batches,
    start_from,
)
from vitscale.training.interval_log import IntervalLog, profiled
from vitscale.training.loop import TrainingSession
from vitscale.training.objective import Objective, check_objective
from vitscale.training.resume import (
    changed_settings,
    check_resumable,
    compatibility_key,
    restore_engine,
)

# `What: ...` at the start of a line of a run card.
CARD_KEY = re.compile(r"^(\w+): +", re.MULTILINE)


@contextmanager
def open_session(
    run: TrainingRun, objective: Objective, *, initial_weights: InitialWeights | None = None
) -> Iterator[TrainingSession]:
    """Open a run: join the ranks, read the index, build the engine, resume, start tracking.

    initial_weights: what a new run starts from; None: random weights. Ignored when resuming.
    Raises UserError for anything that cannot train, before the first step, and SystemExit for a run
    that is finished.
    """
    with ExitStack() as stack:
        world = stack.enter_context(
            process_group(
                device=run.engine.device,
                timeout_min=run.engine.timeout_min,
                num_threads=run.engine.num_threads,
            )
        )
        watchdog = stack.enter_context(
            Watchdog(world, timeout_min=run.engine.timeout_min, folder=Path(run.folder))
        )
        with watchdog.reporting():
            yield _open(stack, world, watchdog, run, objective, initial_weights)


def _open(
    stack: ExitStack,
    world: World,
    watchdog: Watchdog,
    run: TrainingRun,
    objective: Objective,
    initial_weights: InitialWeights | None,
) -> TrainingSession:
    data, val_index = once_per_node(
        lambda: _read_index(run, check_files=world.is_first),
        is_maker=world.local_rank == 0,
        gather=gather_objects,
    )
    check_objective(objective, run, num_classes=len(data.classes))
    plan = training_plan(run, world_size=world.world_size, num_samples=data.num_samples)
    arch = build_architecture(run, objective, data)
    objective.prepare(arch=arch, device=world.device)
    folder = Path(run.folder)
    stack.enter_context(run_folder_lock(folder, world=world))
    store = stack.enter_context(CheckpointStore(folder, keep=run.checkpoint.keep, world=world))
    checkpoint, messages = store.newest()
    description = compatibility_key(run, arch, data, objective)
    if checkpoint is not None:
        check_resumable(checkpoint, description, plan)
        _end_if_finished(folder, plan, world, checkpoint.step)
    model = build_model(run, objective, arch)
    if initial_weights is not None and checkpoint is None:
        messages += start_from(model, arch, initial_weights, world)
    session = TrainingSession(
        run=run,
        objective=objective,
        world=world,
        folder=folder,
        data=data,
        val_index=val_index,
        plan=plan,
        arch=arch,
        engine=build_engine(run, plan, world, arch, model),
        store=store,
        preemption=stack.enter_context(PreemptionFlag()),
        watchdog=watchdog,
        start_step=checkpoint.step if checkpoint else 0,
        description=description,
    )
    session.evaluations = build_evaluations(session)
    if checkpoint is not None:
        restore_engine(session.engine, checkpoint)
        messages += changed_settings(folder, run)
        messages.append(f"resuming {folder} at step {checkpoint.step}")
    if run.data.is_streamed:
        messages.append(
            "tars without an index: a resume is not exact, it shuffles anew; "
            "data_prep/index_shards.py makes an index, which resumes exactly"
        )
    facts = _facts(session)
    session.log = _open_log(stack, session, facts)
    for line in [*messages, f"{run.name}: {facts}"]:
        session.log.console.message(line)
    session.batches = stack.enter_context(open_batches(session))
    return session


def _end_if_finished(folder: Path, plan: TrainingPlan, world: World, step: int) -> None:
    """End the ranks of a run whose last step is saved and whose end is recorded.

    A run killed after its last checkpoint records its end at the next start.
    """
    if step < plan.total_steps:
        return
    record = read_record(folder) if world.is_first else None
    if broadcast_object(record is not None and record.status == "FINISHED"):
        if world.is_first:
            print(f"done before: {folder} at step {step}", flush=True)
        raise SystemExit(0)


def _open_log(stack: ExitStack, session: TrainingSession, facts: str) -> IntervalLog:
    run, plan, folder, start = session.run, session.plan, session.folder, session.start_step
    is_first, source = session.world.is_first, run.starts_from()
    if is_first:
        write_text(folder / "config.yaml", run_to_yaml(run))
        if session.objective.trains_classifier:
            write_json(folder / CLASSES_NAME, list(session.data.classes))
    console = stack.enter_context(
        Console(folder, total_steps=plan.total_steps, start_step=start, is_writer=is_first)
    )
    tags = {"vitscale.model": run.model.title, **_data_tags(session.data, session.val_index)}
    if source is not None:
        tags["vitscale.init"] = redact(source)
    tracker = Tracker(
        folder,
        settings=run.tracking,
        name=run.name,
        stage=run.stage,  # type: ignore[attr-defined]  # every concrete run type has it
        tags=tags,
        resume_step=start,
        is_writer=is_first,
        note="\n\n".join([CARD_KEY.sub(r"\n**\1:** ", run.card), facts]).strip(),
        origin=source,
        say=console.message,
    )
    if is_first and start < plan.total_steps:
        with or_warn(folder / EVENTS_NAME, console.message):
            record_start(folder, first_step=start, total_steps=plan.total_steps)
    trace = folder / "profile.json" if is_first else None
    return IntervalLog(
        run,
        plan,
        session.data,
        session.engine,
        start_step=start,
        flops_per_image=session.objective.train_flops_per_image(session.arch),
        tracker=stack.enter_context(tracker),
        console=console,
        profile=stack.enter_context(profiled(trace, steps=run.engine.profile_steps)),
    )


def _read_index(run: TrainingRun, *, check_files: bool) -> tuple[TrainingSet, SplitIndex | None]:
    """Training and evaluated samples."""
    training_set = open_training_set(run.data, seed=run.seed, check_files=check_files)
    if training_set.dev is not None:
        return training_set, training_set.dev
    return training_set, open_val_split(run.data, check_files=check_files)


def _facts(session: TrainingSession) -> str:
    """Size of model, data and schedule, and how it is computed, in a line."""
    run, plan, arch, engine = session.run, session.plan, session.arch, session.engine
    dtype, source = str(engine.dtype).removeprefix("torch."), run.starts_from()
    return (
        f"from {'random weights' if source is None else redact(source)}; "
        f"{session.objective.num_parameters(arch) / 1e6:.1f} M parameters "
        f"at {arch.image_size} px, "
        f"{plan.num_samples} images, {arch.num_classes or 'no'} classes; {plan.equation}; "
        f"{plan.total_steps} steps; {engine.world.device.type}, {dtype}, "
        f"ZeRO {run.engine.zero_stage}; "
        f"decoder {resolve_decoder(run.data.decoder)}; "
        f"CPU threads per rank: {torch.get_num_threads()}"
    )


def _data_tags(data: TrainingSet, val_index: SplitIndex | None) -> dict[str, str]:
    """Name, size and fingerprint of what a run reads."""
    if data.tars:
        folder = redact(str(data.tars[0].parent))
        parts = [f"{folder}, {data.num_samples:,} images"]
    else:
        parts = [_data(part) for part in data.parts]
    tags = {DATA_TAG: "; ".join(parts)}
    return tags if val_index is None else tags | {"vitscale.val_data": _data(val_index)}


def _data(index: SplitIndex) -> str:
    folder = redact(str(index.folder))
    name = "/".join([*folder.rstrip("/").split("/")[-2:], index.split])
    return f"{name}, {index.num_samples:,} images, {index.fingerprint[:12]}"
