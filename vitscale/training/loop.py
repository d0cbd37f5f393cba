"""An opened run, as its loop sees it: batches in, figures and checkpoints out.

Owns: the chores at the end of a step, and when they are due.
Leaves out: the loop itself, which stays visible in pretrain/main.py and finetune/main.py, and
opening (`training`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitscale.checkpoint.commit import Commit
from vitscale.checkpoint.store import CheckpointStore
from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex
from vitscale.data.index_keys import sample_names
from vitscale.data.loader import Batch, evaluation_batches
from vitscale.data.mixing import mix_batch
from vitscale.data.remote.store import remote_metrics
from vitscale.data.samples import Unreadable
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.heartbeat import Heartbeat
from vitscale.distributed.world import PreemptionFlag, World, gather_objects, sum_over_ranks
from vitscale.engine.engine import Engine
from vitscale.engine.guard import Health
from vitscale.evaluation.classification import evaluate
from vitscale.models.architecture import Architecture
from vitscale.models.costs import train_flops_per_image
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.tracking.console import ProgressLine
from vitscale.tracking.tracker import Tracker
from vitscale.training.detectors import LossSpikeDetector, names_at, positions_of_step
from vitscale.training.meters import IntervalMeter, peak_memory_gib

UNREADABLE_SHOWN = 10


@dataclass(kw_only=True)
class Training:
    """An opened run. Every method is collective."""

    run: TrainingRun
    world: World
    folder: Path
    plan: TrainingPlan
    arch: Architecture
    data: TrainingSet
    val_index: SplitIndex | None
    engine: Engine
    store: CheckpointStore
    tracker: Tracker
    progress: ProgressLine
    meter: IntervalMeter
    stop: PreemptionFlag
    batches: Iterator[Batch]
    start_step: int
    description: dict[str, Any]
    unreadable: list[Unreadable]
    """On this rank, since the last log line."""
    spikes: LossSpikeDetector
    heartbeat: Heartbeat
    rates: dict[str, float]
    """FLOP/s of one device that the loop is held against, by the metric that says so."""
    profile: Callable[[], None]
    skipped_told: int = 0
    """Updates left out that are in the log already."""
    unreadable_told: int = 0
    """Of all ranks since the start, as far as they were in the log already."""
    num_batches: int = 0
    """Micro-batches of this rank since the start."""

    def next_batch(self) -> Batch:
        """The next micro-batch of this rank, on the device."""
        start = time.perf_counter()
        self.heartbeat.mark("waiting for data")
        batch = next(self.batches)
        self.heartbeat.mark("training")
        self.unreadable.extend(batch.unreadable)
        self.meter.add_images(len(batch.labels), wait_s=time.perf_counter() - start)
        on_device = batch.to(self.world.device)
        if self.run.data.mixing is not None:
            on_device = self._mixed(on_device)
        self.num_batches += 1
        return on_device

    def _mixed(self, batch: Batch) -> Batch:
        plan, world = self.plan, self.world
        step = self.start_step + self.num_batches // plan.accumulation
        micro_step = self.num_batches % plan.accumulation
        share = world.world_size * plan.micro_batch
        first = step * plan.global_batch + micro_step * share + world.rank * plan.micro_batch
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

    def end_step(self, step: int) -> None:
        """After every step: the live line, and the trace where one is wanted."""
        self.progress.advance(step)
        self.profile()

    def comparison_due(self, step: int) -> bool:
        every = self.run.engine.compare_weights_every_steps
        return every is not None and self.world.world_size > 1 and step % every == 0

    def compare_weights(self, step: int) -> None:
        """Raise UserError when the ranks no longer hold the same weights."""
        found = self.engine.disagreement()
        if found is not None:
            raise UserError(
                f"the weights of the ranks have come apart by step {step}: {found}",
                where="engine.compare_weights_every_steps",
                next_step="look for a faulty GPU or node, leave it out, and run the same command "
                "again; to be safe remove checkpoints younger than the last good comparison",
            )

    def checkpoint_due(self, step: int) -> bool:
        return step % self.run.checkpoint.every_steps == 0 or self.is_last(step)

    def log_interval(self, step: int, *, lr: float) -> None:
        """Write the figures since the last log line. Raises UserError when training diverged."""
        self._check_unreadable(step)
        figures = self.meter.read()
        loss, speed = figures["train/loss"], figures["perf/images_per_s"]
        figures |= {"train/lr": lr, "train/grad_norm": self.engine.gradient_norm()}
        health = self.engine.health()
        spike = self.spikes.look(loss)
        figures["train/skipped_steps"] = float(health.skipped)
        figures["train/loss_spikes"] = float(self.spikes.num_spikes)
        figures["perf/memory_gib"] = peak_memory_gib(self.world.device)
        flops = train_flops_per_image(self.arch) * speed / self.world.world_size
        if (scale := self.engine.loss_scale) is not None:
            figures["train/loss_scale"] = scale
        for name, rate in self.rates.items():
            figures[name] = flops / rate
        figures |= _storage_figures()
        self._tell(self.store.told())
        self.tracker.log(figures, step=step)
        wait = figures["perf/data_wait"]
        self.progress.update(step, loss=loss, lr=lr, images_per_s=speed, data_wait=wait)
        if spike is not None:
            self.progress.message(f"step {step}: {spike}")
        self._check_skipped(health)

    def _check_skipped(self, health: Health) -> None:
        """Name the updates that were left out; too many in a row end the run."""
        if health.skipped == self.skipped_told or health.last_step is None:
            return
        num_new, self.skipped_told = health.skipped - self.skipped_told, health.skipped
        gathered = gather_objects(health.bad_micro_steps)
        ranks = {rank: numbers for rank, numbers in enumerate(gathered) if numbers}
        cause = "the loss" if ranks else "the gradient"
        where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
        positions = positions_of_step(self.plan, step=health.last_step, micro_steps=ranks)
        names = names_at(self.data, positions)
        self.progress.message(
            f"{num_new} updates left out, {health.skipped} since the start, the last at step "
            f"{health.last_step}: {cause} was not finite{where}; samples {names}"
        )
        scale = self.engine.loss_scale
        if scale is not None and scale > 1:  # fp16 finds its scale by overflowing
            return
        if health.consecutive >= self.run.engine.max_skipped_steps:
            raise UserError(
                f"{health.consecutive} updates in a row were left out, the last at step "
                f"{health.last_step}: {cause} was not finite{where}\n"
                f"    samples of that step: {names}",
                where="engine.max_skipped_steps",
                next_step="lower optim.lr, lengthen schedule.warmup_steps or set "
                "optim.clip_norm=1; no checkpoint holds weights that are not finite",
            )

    def _check_unreadable(self, step: int) -> None:
        """Name the samples that others stood in for; too many of them end the run."""
        num_new = int(sum_over_ranks(torch.tensor([float(len(self.unreadable))])).item())
        if not num_new:
            return
        own, self.unreadable = self.unreadable[:UNREADABLE_SHOWN], []
        names = sample_names(self.data.parts, [(each.part, each.sample) for each in own])
        gathered = gather_objects(list(zip(names, own, strict=True)))
        lost = [each for found in gathered for each in found][:UNREADABLE_SHOWN]
        for name, (_, _, shard, error) in lost:
            self.progress.message(f"{shard}: sample {name} was replaced: {error}")
        self.unreadable_told += num_new
        total, unnamed = self.unreadable_told, num_new - len(lost)
        more = f", of the last {num_new} another {unnamed} not named here" if unnamed else ""
        self.progress.message(f"step {step}: {total} samples replaced since the start{more}")
        self.tracker.log({"data/unreadable": float(total)}, step=step)
        seen = (step - self.start_step) * self.plan.global_batch
        allowed = self.run.data.max_unreadable_fraction * max(seen, self.plan.num_samples)
        if total > allowed:
            raise UserError(
                f"{total} samples could not be read, more than data.max_unreadable_fraction="
                f"{self.run.data.max_unreadable_fraction:g} allows; the last: {lost[-1][0]}",
                where=lost[-1][1].shard,
                next_step="data_prep/verify_shards.py names every damaged shard; copy it again",
            )

    def log_evaluation(self, step: int) -> None:
        """Evaluate the weights, and their average where one is kept: `val/ema_top1`."""
        self.heartbeat.mark("evaluating")
        self._evaluate(step, prefix="val/")
        if self.run.optim.ema is not None:
            with self.engine.averaged():
                self._evaluate(step, prefix="val/ema_")

    def _evaluate(self, step: int, *, prefix: str) -> None:
        assert self.val_index is not None
        batches = evaluation_batches(
            self.val_index,
            settings=self.run.data,
            image_size=self.arch.image_size,
            rank=self.world.rank,
            world_size=self.world.world_size,
            micro_batch=self.run.engine.max_micro_batch,
            pin_memory=self.world.device.type == "cuda",
        )
        # Closed on errors too: workers that are left would be waited for at exit, for ever.
        with closing(batches):
            figures = evaluate(
                self.engine, batches, num_samples=self.val_index.num_samples, prefix=prefix
            )
        self.tracker.log(figures, step=step)
        self.progress.message(
            f"step {step}: {prefix}top1 {figures[f'{prefix}top1']:.4f} on "
            f"{self.val_index.num_samples} images of {self.run.data.val_split!r}, "
            f"{prefix}loss {figures[f'{prefix}loss']:.4f}"
        )

    def save(self, step: int) -> None:
        """Take a checkpoint of everything that the next step depends on; committed meanwhile."""
        self.heartbeat.mark("saving")
        self.finish_save()
        self.store.save(
            self.engine.export_state(),
            step=step,
            progress={
                "samples_seen": step * self.plan.global_batch,
                "optimizer_steps": self.engine.optimizer_steps(),
                "interval": self.meter.state(),
                "engine": self.engine.export_counters(),
                "spikes": self.spikes.state(),
            },
            description=self.description,
        )

    def finish_save(self) -> None:
        """Wait until the last checkpoint is committed. Raises UserError when it cannot be."""
        self._tell(self.store.wait())

    def _tell(self, commit: Commit | None) -> None:
        if commit is not None:
            for warning in commit.warnings:
                self.progress.message(warning)
            self.progress.message(f"step {commit.step}: checkpoint {commit.folder}")


def _storage_figures() -> dict[str, float]:
    """What remote storage was asked for since the start, over all ranks; empty without any."""
    own = remote_metrics()
    if not own:
        return {}
    total = sum_over_ranks(torch.tensor(list(own.values()), dtype=torch.float64)).tolist()
    return dict(zip(own, total, strict=True))
