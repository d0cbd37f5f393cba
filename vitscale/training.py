"""What a training loop stands on: ranks, data, engine, checkpoints and tracking, opened together.

Owns: the order of opening, resuming, and the chores at the end of a step.
Leaves out: the loop itself, which stays visible in pretrain/main.py and finetune/main.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitscale.atomic_files import write_text
from vitscale.checkpoint.store import Checkpoint, CheckpointStore, run_folder_lock
from vitscale.config.loader import run_to_yaml
from vitscale.data.decoding import resolve_decoder
from vitscale.data.index import SplitIndex, read_split
from vitscale.data.loader import Batch, evaluation_batches, open_loader, training_batches
from vitscale.data.mixing import mix_batch
from vitscale.data.order import stream_key
from vitscale.data.samples import Unreadable
from vitscale.data.training_set import TrainingSet, open_training_set
from vitscale.distributed import (
    Ranks,
    StopRequest,
    agree_no_error,
    gather_objects,
    process_group,
    sum_over_ranks,
)
from vitscale.engine.engine import Engine, deepspeed_config, resolve_precision
from vitscale.errors import UserError
from vitscale.evaluation import evaluate
from vitscale.models.costs import num_parameters, train_flops_per_image
from vitscale.models.layers import layers_above
from vitscale.models.settings import Architecture, architecture
from vitscale.models.vit import checkpoint_activations, decayed
from vitscale.optim.optimizer import build_optimizer, optimizer_groups
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan
from vitscale.speed import IntervalMeter, peak_flops
from vitscale.tracking.console import ProgressLine
from vitscale.tracking.tracker import Tracker

UNREADABLE_SHOWN = 10
InitialModel = Callable[[Architecture], nn.Module]


def seed_step(seed: int, *, step: int, micro_step: int, rank: int) -> None:
    """Make dropout and drop path a function of the position in training: no state to save."""
    torch.manual_seed(stream_key("step", seed, step, micro_step, rank) >> 1)


@dataclass(kw_only=True)
class Training:
    """An opened run. Every method is collective."""

    run: TrainingRun
    ranks: Ranks
    folder: Path
    plan: TrainingPlan
    arch: Architecture
    val_index: SplitIndex | None
    engine: Engine
    store: CheckpointStore
    tracker: Tracker
    progress: ProgressLine
    meter: IntervalMeter
    stop: StopRequest
    batches: Iterator[Batch]
    start_step: int
    description: dict[str, Any]
    unreadable: list[Unreadable]
    """On this rank, since the start."""
    unreadable_told: int = 0
    """How many of all ranks were in the log already."""
    num_batches: int = 0
    """Micro-batches of this rank since the start."""

    def next_batch(self) -> Batch:
        """The next micro-batch of this rank, on the device."""
        start = time.perf_counter()
        batch = next(self.batches)
        self.unreadable.extend(batch.unreadable)
        self.meter.add_images(len(batch.labels), wait_s=time.perf_counter() - start)
        on_device = batch.to(self.ranks.device)
        if self.run.data.mixing is not None:
            on_device = self._mixed(on_device)
        self.num_batches += 1
        return on_device

    def _mixed(self, batch: Batch) -> Batch:
        plan, ranks = self.plan, self.ranks
        step = self.start_step + self.num_batches // plan.accumulation
        micro_step = self.num_batches % plan.accumulation
        share = ranks.world_size * plan.micro_batch
        first = step * plan.global_batch + micro_step * share + ranks.rank * plan.micro_batch
        assert self.run.data.mixing is not None
        return mix_batch(
            batch, self.run.data.mixing, seed=self.run.seed, step=step, first_position=first
        )

    def is_last(self, step: int) -> bool:
        return step == self.plan.total_steps

    def log_due(self, step: int) -> bool:
        return step % self.run.tracking.log_every_steps == 0 or self.is_last(step)

    def evaluation_due(self, step: int) -> bool:
        every = self.run.tracking.eval_every_steps
        due = (every is not None and step % every == 0) or self.is_last(step)
        return due and self.val_index is not None

    def checkpoint_due(self, step: int) -> bool:
        return step % self.run.checkpoint.every_steps == 0 or self.is_last(step)

    def log_interval(self, step: int, *, lr: float) -> None:
        """Write the figures since the last log line. Raises UserError when training diverged."""
        self._check_unreadable(step)
        figures = self.meter.read()
        loss, speed = figures["train/loss"], figures["perf/images_per_s"]
        figures |= {"train/lr": lr, "train/grad_norm": self.engine.gradient_norm()}
        peak = peak_flops(self.ranks.device)
        if peak is not None:
            flops = train_flops_per_image(self.arch) * speed / self.ranks.world_size
            figures["perf/mfu"] = flops / peak
        self.tracker.log(figures, step=step)
        wait = figures["perf/data_wait"]
        self.progress.update(step, loss=loss, lr=lr, images_per_s=speed, data_wait=wait)
        if loss != loss or abs(loss) == float("inf"):
            raise UserError(
                f"the loss is {loss} in the log interval that ends at step {step}",
                where=str(self.folder),
                next_step="lower optim.lr, lengthen schedule.warmup_steps or set "
                "optim.clip_norm=1; the checkpoint before these steps is kept",
            )

    def _check_unreadable(self, step: int) -> None:
        """Name the samples that others stood in for; too many of them end the run."""
        total = int(sum_over_ranks(torch.tensor([float(len(self.unreadable))])).item())
        if total == self.unreadable_told:
            return
        lost = [each for own in gather_objects(self.unreadable) for each in own]
        for key, shard, error in lost[-UNREADABLE_SHOWN:]:
            self.progress.message(f"{shard}: sample {key!r} was replaced: {error}")
        self.progress.message(f"step {step}: {total} samples replaced since the start")
        self.tracker.log({"data/unreadable": float(total)}, step=step)
        self.unreadable_told = total
        seen = (step - self.start_step) * self.plan.global_batch
        allowed = self.run.data.max_unreadable_fraction * max(seen, self.plan.num_samples)
        if total > allowed:
            raise UserError(
                f"{total} samples could not be read, more than data.max_unreadable_fraction="
                f"{self.run.data.max_unreadable_fraction:g} allows; the last: {lost[-1].key!r}",
                where=lost[-1].shard,
                next_step="data_prep/verify_shards.py names every damaged shard; copy it again",
            )

    def log_evaluation(self, step: int) -> None:
        assert self.val_index is not None
        batches = evaluation_batches(
            self.val_index,
            settings=self.run.data,
            image_size=self.arch.image_size,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            micro_batch=self.run.engine.max_micro_batch,
            pin_memory=self.ranks.device.type == "cuda",
        )
        figures = evaluate(self.engine, batches, num_samples=self.val_index.num_samples)
        self.tracker.log(figures, step=step)
        self.progress.message(
            f"step {step}: val/top1 {figures['val/top1']:.4f} on {self.val_index.num_samples} "
            f"images of {self.run.data.val_split!r}, val/loss {figures['val/loss']:.4f}"
        )

    def save(self, step: int) -> None:
        """Commit a checkpoint of everything that the next step depends on."""
        folder = self.store.save(
            self.engine.export_state(),
            step=step,
            progress={
                "samples_seen": step * self.plan.global_batch,
                "optimizer_steps": self.engine.optimizer_steps(),
                "interval": self.meter.state(),
            },
            description=self.description,
        )
        self.progress.message(f"step {step}: checkpoint {folder}")


@contextmanager
def open_training(run: TrainingRun, *, initial_model: InitialModel) -> Iterator[Training]:
    """Open a run: join the ranks, read the index, build the engine, resume, start tracking.

    initial_model: builds the model a run starts from; the same weights on every rank. Not called
    for its weights when a checkpoint is resumed, but the architecture must be the run's.
    Raises UserError for anything that cannot train, before the first step.
    """
    with ExitStack() as stack:
        settings = run.engine
        ranks = stack.enter_context(
            process_group(
                device=settings.device,
                timeout_min=settings.timeout_min,
                num_threads=settings.num_threads,
            )
        )
        data, val_index = _read_data(run)
        arch = _architecture_for(run, data)
        plan = training_plan(run, world_size=ranks.world_size, num_samples=data.num_samples)
        description = _describe(run, arch, data)
        folder = Path(run.folder)
        stack.enter_context(run_folder_lock(folder, ranks=ranks))
        store = CheckpointStore(folder, keep=run.checkpoint.keep, ranks=ranks)
        checkpoint, complaints = store.newest()
        _check_resumable(run, checkpoint, description, plan)
        engine = _build_engine(run, plan, ranks, arch, initial_model(arch))
        meter = IntervalMeter(ranks.device)
        if checkpoint is not None:
            _restore(engine, meter, checkpoint, ranks)
        start_step = checkpoint.step if checkpoint else 0
        if ranks.is_first:
            write_text(folder / "config.yaml", run_to_yaml(run))
        progress = stack.enter_context(
            ProgressLine.open(
                folder=folder,
                total_steps=plan.total_steps,
                start_step=start_step,
                title=run.name,
                is_writer=ranks.is_first,
            )
        )
        for line in [*complaints, *_opening_lines(run, plan, arch, engine, start_step)]:
            progress.message(line)
        tracker = stack.enter_context(_open_tracker(run, ranks, progress, start_step))
        stop = stack.enter_context(StopRequest())
        loader = training_batches(
            data,
            settings=run.data,
            image_size=arch.image_size,
            seed=run.seed,
            start=start_step * plan.global_batch,
            stop=plan.total_steps * plan.global_batch,
            rank=ranks.rank,
            world_size=ranks.world_size,
            micro_batch=plan.micro_batch,
            pin_memory=ranks.device.type == "cuda",
        )
        yield Training(
            run=run,
            ranks=ranks,
            folder=folder,
            plan=plan,
            arch=arch,
            val_index=val_index,
            engine=engine,
            store=store,
            tracker=tracker,
            progress=progress,
            meter=meter,
            stop=stop,
            batches=stack.enter_context(open_loader(loader)),
            start_step=start_step,
            description=description,
            unreadable=[],
        )
        progress.message(f"done: {folder} at step {plan.total_steps}")


def _read_data(run: TrainingRun) -> tuple[TrainingSet, SplitIndex | None]:
    training_set = open_training_set(run.data, seed=run.seed)
    val_split = run.data.val_split
    return training_set, None if val_split is None else read_split(run.data.path, split=val_split)


def _architecture_for(run: TrainingRun, data: TrainingSet) -> Architecture:
    wanted, found = run.model.num_classes, len(data.classes)
    if wanted is not None and wanted != found:
        raise UserError(
            f"{wanted} classes, but the label map of {run.data.path} has {found} "
            f"(the first is {data.classes[0]!r})",
            where="model.num_classes",
            next_step=f"set model.num_classes={found} (or null), or data.path to other shards",
        )
    return architecture(run.model, num_classes=found)


def _describe(run: TrainingRun, arch: Architecture, data: TrainingSet) -> dict[str, Any]:
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


def _check_resumable(
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


def _build_engine(
    run: TrainingRun, plan: TrainingPlan, ranks: Ranks, arch: Architecture, model: nn.Module
) -> Engine:
    dtype = resolve_precision(run.engine, ranks.device)
    if run.engine.activation_checkpointing:
        checkpoint_activations(model)
    model.to(ranks.device)
    groups = optimizer_groups(
        model.named_parameters(),
        settings=run.optim,
        decayed=decayed,
        layers_above=lambda name: layers_above(name, depth=arch.depth),
    )
    config = deepspeed_config(
        run.engine,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        world_size=ranks.world_size,
        clip_norm=run.optim.clip_norm,
        dtype=dtype,
        raw=run.deepspeed,
    )
    return Engine(
        model,
        optimizer=build_optimizer(groups, settings=run.optim, device=ranks.device),
        optimizer_name=run.optim.name,
        config=config,
        ranks=ranks,
        dtype=dtype,
        mean=run.data.mean,
        std=run.data.std,
    )


def _restore(engine: Engine, meter: IntervalMeter, checkpoint: Checkpoint, ranks: Ranks) -> None:
    error = None
    try:
        tensors = checkpoint.tensors()
    except OSError as caught:
        error = f"{checkpoint.folder}: cannot be read ({caught.strerror})"
    agree_no_error(error)
    progress = checkpoint.progress
    engine.import_state(tensors, optimizer_steps=progress["optimizer_steps"])
    meter.load_state(progress["interval"], rank=ranks.rank, world_size=ranks.world_size)


def _opening_lines(
    run: TrainingRun, plan: TrainingPlan, arch: Architecture, engine: Engine, start_step: int
) -> Iterator[str]:
    if start_step:
        yield f"resuming {run.folder} at step {start_step}"
    dtype = str(engine.dtype).removeprefix("torch.")
    yield (
        f"{run.name}: {num_parameters(arch) / 1e6:.1f} M parameters at {arch.image_size} px, "
        f"{plan.num_samples} images, {arch.num_classes} classes; {plan.equation}; "
        f"{plan.total_steps} steps; {engine.ranks.device.type}, {dtype}, "
        f"ZeRO {run.engine.zero_stage}; decoder {resolve_decoder(run.data.decoder)}"
    )


def _open_tracker(
    run: TrainingRun, ranks: Ranks, progress: ProgressLine, start_step: int
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
        is_writer=ranks.is_first,
        say=progress.message,
    )
