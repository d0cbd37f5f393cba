"""The parts of the training loop: steps, micro-batches, and the end of a step.

Leaves out: the loop itself, which is in pretrain/main.py and finetune/main.py, and opening a
session (`session`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitscale.checkpoint.commit import Commit
from vitscale.checkpoint.store import CheckpointStore
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.data.index import SplitIndex
from vitscale.data.loader import Batch
from vitscale.data.mixing import mix_batch
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.preemption import PreemptionFlag
from vitscale.distributed.random_numbers import stream_key
from vitscale.distributed.watchdog import Watchdog
from vitscale.distributed.world import World
from vitscale.engine.device_batches import DeviceBatches
from vitscale.engine.engine import Engine
from vitscale.evaluation.schedule import ScheduledEvaluations
from vitscale.models.settings import Architecture
from vitscale.optim.schedules import learning_rate
from vitscale.runs.training import TrainingPlan, TrainingRun
from vitscale.training.interval_log import IntervalLog
from vitscale.training.objective import Objective


def seed_step(seed: int, *, step: int, micro_step: int, rank: int) -> None:
    """Make dropout and drop path a function of the position in training: no state to save."""
    torch.manual_seed(stream_key("step", seed, step, micro_step, rank) >> 1)


@dataclass(kw_only=True)
class TrainingSession:
    """An open run. Every method is collective. Steps are counted from 0, done steps from 1."""

    run: TrainingRun
    objective: Objective
    world: World
    folder: Path
    data: TrainingSet
    val_index: SplitIndex | None
    plan: TrainingPlan
    arch: Architecture
    engine: Engine
    store: CheckpointStore
    preemption: PreemptionFlag
    watchdog: Watchdog
    start_step: int
    description: dict[str, Any]
    """What a checkpoint says of the run: see `compatibility_key`."""
    evaluations: ScheduledEvaluations = field(init=False)
    log: IntervalLog = field(init=False)
    batches: DeviceBatches = field(init=False)
    lr: float = 0.0
    """Of the current step."""

    def steps(self) -> Iterator[int]:
        """The steps from the checkpoint's to the last one, each with its learning rate set.

        Ends when the last checkpoint is committed.
        """
        plan = self.plan
        for step in range(self.start_step, plan.total_steps):
            self.lr = learning_rate(
                step,
                self.run.schedule,
                peak=self.run.optim.lr,
                total_steps=plan.total_steps,
                warmup_steps=plan.warmup_steps,
                cooldown_steps=plan.cooldown_steps,
            )
            self.engine.set_learning_rate(self.lr)
            yield step
        self._finish_save()
        self.log.console.message(f"done: {self.folder} at step {plan.total_steps}")

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """The micro-batches of this rank in a step, on the device, random state set for each."""
        for micro_step in range(self.plan.accumulation):
            batch = self._next_batch(step, micro_step)
            seed_step(self.run.seed, step=step, micro_step=micro_step, rank=self.world.rank)
            yield batch

    def _next_batch(self, step: int, micro_step: int) -> Batch:
        with self._waiting_for_data():
            batch = next(self.batches)
        self.log.add_batch(batch)
        mixing, plan, world = self.run.data.mixing, self.plan, self.world
        number = micro_step * world.world_size + world.rank
        first = step * plan.global_batch + number * plan.micro_batch
        batch = replace(batch, positions=np.arange(first, first + len(batch.labels)))
        if mixing is None:
            return batch
        return mix_batch(batch, mixing, seed=self.run.seed, step=step, first_position=first)

    @contextmanager
    def _waiting_for_data(self) -> Iterator[None]:
        self.watchdog.mark("waiting for data")
        with self.log.waiting():
            yield
        self.watchdog.mark("training")

    def update(self, loss: torch.Tensor) -> None:
        """Backward pass, and the optimiser's step at the end of an accumulation."""
        self.watchdog.mark("running the backward pass")
        self.engine.backward(loss)
        self.watchdog.mark("updating the weights")
        self.store.wait_for_host_copy()  # a save may still read the weights
        self.engine.step()
        self.log.add_values({"train/loss": loss, **self.objective.recorded})
        with self._waiting_for_data():
            self.batches.prefetch()

    def end_step(self, step: int) -> None:
        """Log, evaluate, compare and save what is due.

        Raises SystemExit after a checkpoint when the job is preempted; a UserError when
        training cannot continue.
        """
        done = step + 1
        is_last = done == self.plan.total_steps
        self.watchdog.step = done
        self.log.advance(done)
        preempted = self.preemption.set_on_any_rank() and not is_last
        is_saved = is_last or preempted or done % self.run.checkpoint.every_steps == 0
        # A save ends the interval, so that no checkpoint holds a part of one.
        if is_saved or done % self.run.tracking.log_every_steps == 0:
            self._report(self.store.take_committed())
            self.log.write(done, lr=self.lr)
        if self.evaluations.due(done, is_last=is_last):
            self._evaluate(done, is_last=is_last)
        if is_last:
            self.objective.draw(self)
        # Saved last: a checkpoint means that everything up to its step was logged.
        if is_saved:
            self._save(done)
        if preempted:
            self._finish_save()
            self.log.console.message(f"stopped by a signal at step {done}; rerun to resume")
            raise SystemExit(EXIT_STOPPED_RESUMABLE)

    def _evaluate(self, done: int, *, is_last: bool) -> None:
        self.watchdog.mark("evaluating")
        assert self.val_index is not None
        subject = f"{self.val_index.num_samples} images of {self.run.data.evaluated}"
        for metrics in self.evaluations.run(done, is_last=is_last):
            self.log.write_evaluation(done, metrics, subject=subject)

    def _save(self, done: int) -> None:
        """Start saving everything that the next step depends on; committed in the background."""
        self.watchdog.mark("saving")
        self._report(self.store.wait(say=self.log.console.message))
        self.store.save(
            self.engine.export_state(),
            step=done,
            progress={
                "samples_seen": done * self.plan.global_batch,
                "optimizer_steps": self.engine.optimizer_steps(),
                "engine": self.engine.export_counters(),
            },
            description=self.description,
        )

    def _finish_save(self) -> None:
        """Wait until the last checkpoint is committed. Raises UserError when it cannot be."""
        self._report(self.store.wait())

    def _report(self, commit: Commit | None) -> None:
        if commit is not None:
            for warning in commit.warnings:
                self.log.console.message(warning)
            self.log.console.message(f"step {commit.step}: checkpoint {commit.folder}")
