"""An open run: what it is opened from, its steps, and the end of each.

Opens process group, data, engine, checkpoints and tracking, in this order. Leaves out: the loop
itself, which is in pretrain/main.py and finetune/main.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from torch import nn

from vitscale.checkpoint.folders import (
    Checkpoint,
    Commit,
    Score,
    best_of,
    resolve_weights,
    step_folders,
    step_of,
)
from vitscale.checkpoint.store import (
    CheckpointStore,
    SavedTensors,
    Slice,
    read_header,
    run_folder_lock,
)
from vitscale.config.changes import changed_settings
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError
from vitscale.config.loader import read_values, run_to_yaml
from vitscale.config.redaction import redact
from vitscale.data.index import SplitIndex
from vitscale.data.loader import Batch, training_batches
from vitscale.data.order import ORDER_VERSION
from vitscale.data.samples import view_shapes
from vitscale.data.training_set import (
    TrainingSet,
    open_training_set,
    open_val_split,
    with_targets,
)
from vitscale.data.webdataset import check_shares
from vitscale.distributed.atomic_files import or_warn, write_json, write_text
from vitscale.distributed.events import EVENTS_NAME, record_start
from vitscale.distributed.node_files import once_per_node
from vitscale.distributed.random_numbers import stream_key
from vitscale.distributed.watchdog import Watchdog, watched_ranks
from vitscale.distributed.world import (
    PreemptionFlag,
    World,
    broadcast_tensor,
    errors_on_all_ranks,
    gather_objects,
)
from vitscale.engine.device_batches import DeviceBatches
from vitscale.engine.engine import (
    Engine,
    deepspeed_config,
    is_compiled,
    resolve_precision,
)
from vitscale.evaluation.evaluation import FILES, NonFiniteOutputs, Subject
from vitscale.evaluation.main_metric import score_of
from vitscale.evaluation.registry import ScheduledEvaluations
from vitscale.evaluation.trained_model import CLASSES_NAME
from vitscale.images.crops import resolve_decoder
from vitscale.models.registry import MODELS
from vitscale.models.settings import Architecture
from vitscale.objectives.mixing import mix_batch
from vitscale.objectives.objective import Objective, check_objective
from vitscale.optim.optimizers import build_optimizer, optimizer_groups
from vitscale.optim.settings import learning_rate
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan
from vitscale.tracking.journal import format_duration, training_log
from vitscale.tracking.mlflow_sync import (
    CONFIG_NAME,
    DATA_TAG,
    VAL_DATA_TAG,
    read_record,
)
from vitscale.tracking.tracker import Tracker
from vitscale.training.interval_log import IntervalLog, profiled
from vitscale.training.start import load_initial_weights

# Settings that act on the first weights alone.
START_ONLY = """
init init_weights keep_head position_embedding init_patch model.weight_init model.position_init
model.head_std model.head_bias model.layer_scale
""".split()
# `What: ...` at the start of a line of a run card.
CARD_KEY = re.compile(r"^(\w+): +", re.MULTILINE)


@contextmanager
def open_session(run: TrainingRun, objective: Objective) -> Iterator[TrainingSession]:
    """Open a run: join the ranks, read the index, build the engine, resume, start tracking.

    Raises UserError for anything that cannot train, before the first step, and SystemExit for a run
    that is finished.
    """
    with ExitStack() as stack:
        watchdog = stack.enter_context(watched_ranks(Path(run.folder), run.engine))
        with watchdog.reporting():
            yield TrainingSession(stack, watchdog, run, objective)


def seed_step(seed: int, *, step: int, micro_step: int, rank: int) -> None:
    """Make dropout a function of the place in training: no state to save."""
    number = stream_key("step", seed, step, micro_step, rank) >> 1

    # torch.manual_seed would read the source files of all callers at each call, to defer CUDA.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)


class TrainingSession:
    """An open run. Every method is collective. Steps are counted from 0, done steps from 1."""

    lr = 0.0
    """Learning rate of the current step."""

    def __init__(
        self,
        stack: ExitStack,
        watchdog: Watchdog,
        run: TrainingRun,
        objective: Objective,
    ) -> None:
        """stack: closes what is opened here. The others: as in `open_session`."""
        self.run = run
        self.objective = objective
        self.watchdog = watchdog
        self.world = watchdog.world
        self.folder = Path(run.folder)
        self._opened = time.monotonic()
        # There is no log yet: it gets these lines once it is open.
        self._messages: list[str] = []

        # The order is that of docs/architecture.md: each step needs those before it.
        self._read_data()
        self._make_plan()
        checkpoint = self._open_checkpoints(stack)
        model = self._initial_model(checkpoint)
        self.engine = build_engine(run, self.plan, self.world, self.arch, model)
        self._schedule_evaluations()
        self._resume(checkpoint)
        self._open_log(stack)
        self._open_loader(stack)

    def _read_data(self) -> None:
        """Read the index of the samples, and refuse an objective that they do not fit."""
        self.data, self.val_index = once_per_node(
            lambda: _read_index(self.run, needs_labels=self.objective.needs_labels),
            is_maker=self.world.local_rank == 0,
            gather=gather_objects,
        )
        check_objective(self.objective, self.run, num_classes=len(self.data.classes))

    def _make_plan(self) -> None:
        """Settle the numbers of the training, the architecture and what a resume compares."""
        run = self.run
        world_size = self.world.world_size
        self.plan = training_plan(
            run, world_size=world_size, num_samples=self.data.num_samples
        )

        # A rank or a worker without a tar would wait for ever.
        if run.data.is_streamed:
            check_shares(
                len(self.data.tars),
                num_ranks=world_size,
                num_workers=run.data.num_workers,
            )

        num_classes = 0
        if self.objective.trains_classifier:
            num_classes = len(self.data.classes)
        self.arch = run.model.resolved(num_classes=num_classes)
        agreed = self.objective.prepare(
            classes=self.data.classes, world=self.world, engine=run.engine
        )
        if self.data.targets is not None:
            agreed["targets"] = self.data.targets.fingerprint
        # Heads of another size would read each other's values.
        agreed["num_parameters"] = self.objective.num_parameters(self.arch)
        self._description = compatibility_key(run, self.arch, self.data, agreed)

    def _open_checkpoints(self, stack: ExitStack) -> Checkpoint | None:
        """Lock the run folder and find the newest checkpoint, which this run must continue."""
        stack.enter_context(run_folder_lock(self.folder, world=self.world))
        self.store = stack.enter_context(
            CheckpointStore(
                self.folder, keep=self.run.checkpoint.keep, world=self.world
            )
        )
        checkpoint, messages = self.store.newest()
        # A branch starts with the state of its trunk, and resumes with its own.
        self._is_new = checkpoint is None
        if checkpoint is None and self.run.trunk is not None:
            checkpoint, messages = resolve_weights(
                str(self.run.trunk),
                rank=self.world.rank,
                world_size=self.world.world_size,
                gather=gather_objects,
            )
        self._messages += messages
        self._messages += self.objective.messages
        self._messages += [part.note for part in self.data.parts if part.note]

        self.start_step = 0
        self._num_unreadable = 0
        if checkpoint is not None:
            check_resumable(
                checkpoint, self._description, self.plan, is_branch=self._is_new
            )
            self.start_step = checkpoint.step
            # Checkpoints of earlier versions do not count them.
            self._num_unreadable = checkpoint.progress.get("unreadable", 0)
            self._end_if_finished()
            refuse_other_start(self.folder, self.run)

        # Later ones, which are damaged if there are any, are trained and evaluated again.
        folders = []
        if self.world.is_first:
            folders = step_folders(self.store.folder)
        reached = (each for each in folders if step_of(each) <= self.start_step)
        best = gather_objects(best_of(reached))[0]
        self._best_score: Score | None = best and best[1]
        return checkpoint

    def _initial_model(self, checkpoint: Checkpoint | None) -> nn.Module:
        """A model on the CPU: random, or with weights from elsewhere if this is the first start."""
        model = build_model(self.run, self.objective, self.arch)
        self._source = self.run.init
        if self.run.trunk is not None:
            self._source = str(self.run.trunk)
        if checkpoint is None and self._source is not None:
            self._source, messages = start_from(model, self.arch, self.run, self.world)
            self._messages += messages
        elif self.world.is_first and (record := read_record(self.folder)) is not None:
            # The record names the commit of a repository that the run started from.
            self._source = record.tags.get("vitscale.init", self._source)
        return model

    def _schedule_evaluations(self) -> None:
        subject = None
        if self.val_index is not None:
            subject = Subject(
                model=self.engine,
                train=tuple(
                    part
                    for part in self.data.parts
                    if part.label_map_sha256 == self.data.label_map_sha256
                ),
                val=self.val_index,
                data=self.run.data,
                image_size=self.arch.image_size,
                micro_batch=self.run.engine.max_micro_batch,
                num_outputs=self.arch.num_classes,
                classes=self.data.classes if self.arch.num_classes else None,
                folder=self.folder / FILES,
            )

        self.evaluations = ScheduledEvaluations(
            self.objective.evaluations(self.run),
            subject,
            engine=self.engine,
            has_average=self.run.optim.ema is not None,
        )

    def _resume(self, checkpoint: Checkpoint | None) -> None:
        """Restore the engine, and say what a user may not expect of this start."""
        if checkpoint is not None:
            restore_engine(self.engine, checkpoint)
            # A branch has no last start of its own.
            last = checkpoint.folder.parent.parent
            begins = f"resuming {self.folder}"
            title = "changed since the last start:"
            if self._is_new:
                begins = f"a branch of {last}"
                title = "settings other than those of the trunk:"
            if changes := changes_since_start(last, self.run):
                self._messages += [title, *changes]
            self._messages.append(f"{begins} at step {self.start_step}")
        if self.run.data.is_streamed:
            self._messages.append(
                "tars without an index: a resume is not exact, it shuffles anew; "
                "vitscale prepare index makes an index, which resumes exactly"
            )
        if self.plan.advice is not None:
            self._messages.append(self.plan.advice)

    def _open_log(self, stack: ExitStack) -> None:
        """Open journal and tracking, and say everything that the start has found."""
        facts = self._facts()
        with errors_on_all_ranks(
            "cannot be written", self.folder, tried=self.world.is_first
        ):
            self.log = self._make_log(stack, facts)
        for line in [*self._messages, f"{self.run.name}: {facts}"]:
            self.log.say(line)

        # From here on a signal ends the run at a step, with a checkpoint.
        self.preemption = stack.enter_context(PreemptionFlag())

    def _open_loader(self, stack: ExitStack) -> None:
        plan = self.plan
        self._views = view_shapes(self.run.data, self.run.model.image_size)
        loader = training_batches(
            self.data,
            settings=self.run.data,
            image_size=self.run.model.image_size,
            seed=self.run.seed,
            start=self.start_step * plan.global_batch,
            stop=plan.total_steps * plan.global_batch,
            rank=self.world.rank,
            world_size=self.world.world_size,
            micro_batch=plan.micro_batch,
            pin_memory=self.world.device.type == "cuda",
        )
        self.batches = DeviceBatches(stack.enter_context(loader), self.world.device)

    def _end_if_finished(self) -> None:
        """End the ranks of a run whose last step is saved and whose end is recorded.

        A run killed after its last checkpoint records its end at the next start.
        """
        if self.start_step < self.plan.total_steps:
            return

        # Rank 0 alone reads the record, so that all ranks decide alike.
        is_finished = False
        if self.world.is_first:
            record = read_record(self.folder)
            is_finished = record is not None and record.status == "FINISHED"
        if not gather_objects(is_finished)[0]:
            return

        if self.world.is_first:
            lines = [f"done before: {self.folder} at step {self.start_step}"]
            if changes := changes_since_start(self.folder, self.run):
                lines += [
                    "not used, since the run is finished:",
                    *changes,
                    "  next: to train with these settings, choose another name=...",
                ]
            print(*lines, sep="\n", flush=True)
        raise SystemExit(0)

    def _make_log(self, stack: ExitStack, facts: str) -> IntervalLog:
        run = self.run
        folder = self.folder
        is_first = self.world.is_first

        # Later commands read the settings, and the names of the classes.
        card = f"{run.card}\nRun: {run.stage} {facts}".strip()
        if is_first:
            described = run.model_copy(update={"card": card})
            write_text(folder / CONFIG_NAME, run_to_yaml(described))
            if self.objective.trains_classifier:
                write_json(folder / CLASSES_NAME, list(self.data.classes))

        say = stack.enter_context(training_log(folder, is_writer=is_first))
        tags = {
            "vitscale.model": run.model.title,
            **_data_tags(self.data, self.val_index),
        }
        if self._source is not None:
            tags["vitscale.init"] = redact(self._source)
        tracker = Tracker(
            folder,
            settings=run.tracking,
            name=run.name,
            stage=run.stage,
            tags=tags,
            resume_step=0 if self._is_new else self.start_step,
            is_writer=is_first,
            note=CARD_KEY.sub(r"\n**\1:** ", card).strip(),
            origin=self._source,
            say=say,
        )

        # A start that has no step left to do is no attempt at training.
        total_steps = self.plan.total_steps
        if is_first and self.start_step < total_steps:
            with or_warn(folder / EVENTS_NAME, say):
                record_start(
                    folder, first_step=self.start_step, total_steps=total_steps
                )

        trace = folder / "profile.json" if is_first else None
        profile = profiled(trace, steps=run.engine.profile_steps)
        return IntervalLog(
            run,
            self.plan,
            self.data,
            self.engine,
            start_step=self.start_step,
            num_replaced=self._num_unreadable,
            flops_per_image=self.objective.train_flops_per_image(self.arch),
            tracker=stack.enter_context(tracker),
            say=say,
            profile=stack.enter_context(profile),
            warning=self.objective.warning,
        )

    def _facts(self) -> str:
        """Size of model, data and schedule, and how it is computed, in a line."""
        run = self.run
        plan = self.plan
        arch = self.arch
        engine = self.engine

        start = "from random weights"
        if self._source is not None:
            start = f"from {redact(self._source)}"
        if self.start_step:
            start += f", resumed at step {self.start_step}"

        num_parameters = self.objective.num_parameters(arch) / 1e6
        num_classes = arch.num_classes or "no"
        dtype = str(engine.dtype).removeprefix("torch.")
        return (
            f"{start}; {num_parameters:.1f} M parameters at {arch.image_size} px"
            f", {plan.num_samples} images of {redact(run.data.path)}, {num_classes} classes; "
            f"{plan.equation}; "
            f"{plan.total_steps} steps; {engine.world.device.type}, {dtype}, "
            f"ZeRO {run.engine.zero_stage}; "
            f"JPEG decoder {resolve_decoder(run.data.decoder)}; "
            f"CPU threads per rank: {torch.get_num_threads()}"
        )

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
            self.objective.step = step
            self.engine.set_learning_rate(
                self.lr,
                rate_factor=self.objective.rate_factor,
                decay_factor=self.run.optim.decay_factor(step, plan.total_steps),
                backbone_factor=self.run.schedule.backbone_factor(step),
            )
            yield step

        self._report(self.store.wait())
        if self.world.is_first:
            self._say_end()

    def _say_end(self) -> None:
        """What was trained, how good it is, and what to do with it."""
        duration = format_duration(time.monotonic() - self._opened)
        num_steps = self.plan.total_steps - self.start_step
        text = f"done: {self.folder}, {num_steps:,} steps in {duration}"
        best = best_of(step_folders(self.store.folder))
        if best is not None:
            score = best[1]
            text += f"; best {score['metric']} {score['value']:.4f} at step {step_of(best[0]):,}"
        quoted = quote(str(self.folder))
        use = f"finetune CONFIG init={quoted} data.path=SHARDS"
        if self.objective.trains_classifier:
            use = f"predict init={quoted} IMAGES"
        self.log.say(
            f"{text}\nnext: vitscale {use}\n      vitscale visualize init={quoted}\n"
            f"      vitscale compare {quoted} OTHER_RUN"
        )

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """The micro-batches of this rank in a step, on the device, random state set for each."""
        plan = self.plan
        world = self.world
        seed = self.run.seed
        mixing = self.run.data.mixing
        for micro_step in range(plan.accumulation):
            with self._waiting_for_data():
                batch = next(self.batches)
            self.log.add_batch(batch)

            # Positions are those of one long training on one rank, whatever the ranks are today.
            number = micro_step * world.world_size + world.rank
            first = step * plan.global_batch + number * plan.micro_batch
            positions = np.arange(first, first + len(batch.labels))
            batch = replace(batch, positions=positions)
            if self.data.targets is not None:
                batch = batch.with_targets(self.data.targets.header)
            if self.run.data.views:
                batch = batch.with_views(self._views)
            if mixing is not None:
                batch = mix_batch(
                    batch, mixing, seed=seed, step=step, first_position=first
                )

            self.engine.set_positions(positions)
            seed_step(seed, step=step, micro_step=micro_step, rank=world.rank)
            yield batch

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
        # A save may still read the weights.
        self.store.wait_for_host_copy()
        self.engine.step()
        self.log.means.add({"train/loss": loss, **self.objective.recorded})
        with self._waiting_for_data():
            self.batches.prefetch()

    def end_step(self, step: int) -> None:
        """Log, evaluate and save what is due.

        Raises SystemExit after a checkpoint when the job is preempted; a UserError when
        training cannot continue.
        """
        done = step + 1
        is_last = done == self.plan.total_steps
        self.watchdog.step = done
        self.log.advance()

        # All ranks agree on what is due now: a signal may have reached only one of them.
        preempted = self.preemption.set_on_any_rank() and not is_last
        is_saved = is_last or preempted or done % self.run.checkpoint.every_steps == 0
        is_evaluated = bool(self.evaluations.due(done, is_last=is_last))

        # A save ends the interval, so that no checkpoint holds a part of one.
        is_logged = done % self.run.tracking.log_every_steps == 0
        if is_saved or is_evaluated or is_logged:
            self._report(self.store.take_committed())
            self.log.write(done, lr=self.lr)

        score: Score | None = None
        if is_evaluated:
            # Evaluation takes time that says nothing about the speed of training.
            with self.log.not_counting():
                score = self._evaluate(done, is_last=is_last)
        if is_last:
            self.objective.draw(self)

        # The best one so far is kept beside the newest ones.
        best = self._best_score
        if score is not None and (best is None or score["order"] > best["order"]):
            self._best_score = score
            is_saved = True

        # Saved last: a checkpoint means that everything up to its step was logged.
        if is_saved:
            with self.log.not_counting():
                self._save(done, score)
        if preempted:
            self._report(self.store.wait())
            kept = f"{done} of {self.plan.total_steps} steps are kept"
            self.log.say(f"stopped by a signal: {kept}; the same command resumes")
            raise SystemExit(EXIT_STOPPED_RESUMABLE)

    def _evaluate(self, done: int, *, is_last: bool) -> Score | None:
        """Log what is due. Returns its main metric."""
        self.watchdog.mark("evaluating")
        assert self.val_index is not None
        images = f"{self.val_index.num_samples} images of {self.run.data.evaluated}"
        found: dict[str, float] = {}
        try:
            for metrics in self.evaluations.run(done, is_last=is_last):
                found |= metrics
                self.log.tracker.log(metrics, step=done)
                shown = ", ".join(
                    f"{name} {value:.4f}" for name, value in metrics.items()
                )
                self.log.say(f"step {done}: {shown} on {images}")
        except NonFiniteOutputs as error:
            # A long training survives it: fp16 may overflow once. Broken weights end it elsewhere.
            self.log.say(f"step {done}: not evaluated: {error.what}")
            return None
        return score_of(found)

    def _save(self, done: int, score: Score | None) -> None:
        """Start saving everything that the next step depends on; committed in the background."""
        self.watchdog.mark("saving")
        # The save before this one comes to its end first; if it fails, that is only a warning.
        self._report(self.store.wait(say=self.log.say))
        self.store.save(
            self.engine.export_state(),
            step=done,
            progress={
                "samples_seen": done * self.plan.global_batch,
                "unreadable": self.log.num_unreadable,
                "score": score,
                "optimizer_steps": self.engine.optimizer_steps(),
                "engine": self.engine.export_counters(),
            },
            description=self._description,
            before_commit=self.log.tracker.flush,
        )

    def _report(self, commit: Commit | None) -> None:
        if commit is not None:
            for warning in commit.warnings:
                self.log.say(warning)
            self.log.say(f"step {commit.step}: checkpoint {commit.folder}")


def _read_index(
    run: TrainingRun, *, needs_labels: bool
) -> tuple[TrainingSet, SplitIndex | None]:
    """Training and evaluated samples. Each node looks for all files: one may lack a mount."""
    training_set = open_training_set(run.data, seed=run.seed, needs_labels=needs_labels)
    folder = getattr(run.objective, "targets", None)
    if folder is not None:
        training_set = with_targets(
            training_set,
            folder,
            run.data,
            image_size=run.model.image_size,
            seed=run.seed,
        )
    val_index = training_set.dev
    if val_index is None:
        val_index = open_val_split(run.data, parts=training_set.parts)
    return training_set, val_index


def _data_tags(data: TrainingSet, val_index: SplitIndex | None) -> dict[str, str]:
    """Name, size and fingerprint of what a run reads."""
    parts = [part.title for part in data.parts]
    # Tars without an index are named by their folder: they have no fingerprint.
    parts += [
        f"{redact(str(tar.parent))}, {data.num_samples:,} images"
        for tar in data.tars[:1]
    ]

    tags = {DATA_TAG: "; ".join(parts)}
    if val_index is not None:
        tags[VAL_DATA_TAG] = val_index.title
    return tags


# ---- what a run starts from ---------------------------------------------------------------------


def build_model(
    run: TrainingRun, objective: Objective, arch: Architecture
) -> nn.Module:
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

    # The objective's own parameters do not depend on how many numbers the model drew.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_key("objective", run.seed) >> 1)
        objective.extend_model(model, arch)
    _refuse_unfit_parameters(model, run.model.title)
    return model


def _refuse_unfit_parameters(model: nn.Module, title: str) -> None:
    """Raise UserError for parameters that DeepSpeed or a checkpoint cannot hold.

    They are looked for at the start, since one with two names would end the training at its first
    save.
    """
    # `named_parameters` leaves out second names by default, so both lists are needed.
    all_names = dict(model.named_parameters(remove_duplicate=False))
    first_names = {name for name, _ in model.named_parameters()}
    second_names = [name for name in all_names if name not in first_names]
    scalars = [name for name, parameter in all_names.items() if parameter.ndim == 0]

    problem = ""
    if second_names:
        problem = (
            f"uses {len(second_names)} parameters under two names ({second_names[0]})"
        )
    elif scalars:
        problem = f"has {len(scalars)} parameters without a dimension ({scalars[0]})"
    if problem:
        raise UserError(
            f"{title} {problem}, which cannot be trained here",
            where="model",
            next_step="take another model; as a teacher and in evaluations any will do",
        )


def start_from(
    model: nn.Module, arch: Architecture, run: TrainingRun, world: World
) -> tuple[str, list[str]]:
    """Let rank 0 load `init` into a fresh model on the CPU; copy it to all ranks. Collective.

    Returns what `load_initial_weights` does, and raises its UserError on all ranks; NodeError where
    another node can read what that of rank 0 cannot.
    """
    source_and_messages: tuple[str, list[str]] = ("", [])
    failure: Exception | None = None
    if world.is_first:
        try:
            source_and_messages = load_initial_weights(model, arch, run)
        except (OSError, UserError) as error:
            failure = error

    # One copy is read while all is well. After a failure every node tries: one may lack a mount.
    is_tried = world.is_first
    if gather_objects(failure is not None)[0]:
        is_tried = world.local_rank == 0
    with errors_on_all_ranks("cannot be read", "init", tried=is_tried):
        if failure is not None:
            raise failure
        if is_tried and not world.is_first:
            load_initial_weights(model, arch, run)

    for tensor in model.state_dict().values():
        broadcast_tensor(tensor, source=0)
    return source_and_messages


def build_engine(
    run: TrainingRun,
    plan: TrainingPlan,
    world: World,
    arch: Architecture,
    model: nn.Module,
) -> Engine:
    """Move the model to the device, compile it, and give it an optimiser and an engine."""
    family = MODELS[arch.name].load()
    dtype = resolve_precision(run.engine, world.device)
    compiled = is_compiled(run.engine, world.device)

    # A copy before anything is wrapped: the teacher has no backward pass.
    objective = run.make_objective()
    teacher = None
    if objective.has_teacher:
        teacher = deepcopy(model)

    # Blocks are wrapped before they are compiled, and compiled before the model is moved.
    if run.engine.activation_checkpointing:
        family.checkpoint_activations(model)
    if compiled:
        for network in filter(None, (model, teacher)):
            family.compile_blocks(network)
    model.to(world.device)

    # Without stages there is one group for both: kernels are launched for each group.
    classifiers: Any = model.classifiers
    heads = tuple(f"{name}." for name in ("objective", *classifiers))
    is_staged = run.schedule.is_staged
    groups = optimizer_groups(
        model.named_parameters(),
        settings=run.optim,
        decayed=family.decayed,
        layers_above=lambda name: family.layers_above(name, arch),
        part_of=objective.part_of,
        is_backbone=lambda name: is_staged and not name.startswith(heads),
    )

    # DeepSpeed has no one error for keys that it does not take.
    try:
        config = deepspeed_config(
            run.engine,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            world_size=world.world_size,
            largest_parameter=max(p.numel() for p in model.parameters()),
            clip_norm=run.optim.clip_norm,
            dtype=dtype,
            raw=run.deepspeed,
        )
        return Engine(
            model,
            optimizer=build_optimizer(groups, settings=run.optim),
            optimizer_name=run.optim.name,
            config=config,
            world=world,
            dtype=dtype,
            mean=run.data.mean,
            std=run.data.std,
            ema=run.optim.ema,
            total_steps=plan.total_steps,
            teacher=teacher,
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


def compatibility_key(
    run: TrainingRun, arch: Architecture, data: TrainingSet, agreed: dict[str, Any]
) -> dict[str, Any]:
    """What a checkpoint and a run must agree on for resuming, and what transfer reads.

    agreed: what the objective adds.
    """
    optim = run.optim

    # Whatever changes the meaning of the saved tensors, or the samples of the next steps.
    return {
        "stage": run.stage,
        "architecture": arch.description(),
        "grid": list(arch.grid),
        "num_prefix_tokens": arch.num_prefix_tokens,
        "objective": run.objective.name,
        "optimizer": optim.name,
        "layer_decay": optim.layer_decay,
        "weight_decay_mode": optim.weight_decay_mode,
        "ema": None
        if optim.ema is None
        else optim.ema.model_dump(mode="json", exclude_none=True),
        "data_fingerprint": data.fingerprint,
        "only_keys": data.key_hash,
        "order_version": ORDER_VERSION,
        "label_map_sha256": data.label_map_sha256,
        "global_batch": run.data.global_batch,
        "seed": run.seed,
    } | agreed


def changes_since_start(folder: Path, run: TrainingRun) -> list[str]:
    """A line for each setting that differs from those of the last start in a run folder; such
    changes are no error."""
    return [
        f"    {key}: {before or 'not set'} -> {now or 'not set'}"
        for key, (before, now) in _changes(folder, run).items()
    ]


def refuse_other_start(folder: Path, run: TrainingRun) -> None:
    """Raise UserError where settings that only a start reads are not those of the start.

    A resume takes the run's own weights, so they would have no effect, and config.yaml would name
    an origin that the weights do not have.
    """
    rows = [
        f"\n    {key}: started with {before}, now {now}"
        for key, (before, now) in _changes(folder, run).items()
        if key in START_ONLY and before is not None and now is not None
        if not _same_start(key, before, now)
    ]
    if rows:
        raise UserError(
            f"the run has started, and resumes from its own weights{''.join(rows)}",
            where=folder,
            next_step="undo the change, or choose another name (name=...) to start anew",
        )


def _changes(
    folder: Path, run: TrainingRun
) -> dict[str, tuple[str | None, str | None]]:
    """Settings of the last start and of this one that differ; none if the file is unreadable."""
    with suppress(UserError):
        last = read_values(folder / CONFIG_NAME)
        return changed_settings(last, run.model_dump(mode="json"), purpose="resume")
    return {}


def _same_start(key: str, before: str, now: str) -> bool:
    """One path may be written in several ways, and `auto` stands for a value."""
    if key == "init" and not now.startswith("hf://"):
        return Path(before).expanduser().resolve() == Path(now).expanduser().resolve()
    return before == now or "auto" in (before, now)


def check_resumable(
    checkpoint: Checkpoint,
    description: dict[str, Any],
    plan: TrainingPlan,
    *,
    is_branch: bool = False,
) -> None:
    """Raise UserError when resuming from this checkpoint would not continue its run.

    is_branch: it is of another run, the trunk.
    """
    where = str(checkpoint.folder)
    problem = "belongs to another run; resuming would not continue it"
    otherwise = "choose another name (name=...), or remove the run folder to start over"
    last_step = plan.total_steps
    if is_branch:
        problem = "is of a trunk with other settings, which this run would not continue"
        otherwise = f"take its weights alone: init={where}"
        # A finished run resumes to say so; a branch trains.
        last_step -= 1
    changed = ""
    for key, now in description.items():
        # What a checkpoint of an earlier version does not say is not compared.
        before = checkpoint.description.get(key, now)
        if before == now:
            continue

        # Only the entries of an architecture that differ are shown.
        if isinstance(before, dict) and isinstance(now, dict):
            names = [name for name in before | now if before.get(name) != now.get(name)]
            before = {name: before.get(name) for name in names}
            now = {name: now.get(name) for name in names}
        changed += f"\n    {key}: checkpoint {before!r}, now {now!r}"
    if changed:
        raise UserError(
            f"this checkpoint {problem}{changed}",
            where=where,
            next_step=f"undo the change, or {otherwise}",
        )
    if checkpoint.step > last_step:
        raise UserError(
            f"step {checkpoint.step} is not before the end of this run, step {plan.total_steps}",
            where=where,
            next_step=f"raise schedule.steps, or {otherwise}",
        )


def restore_engine(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore everything that the next step depends on. Every rank reads what it would save.

    The header of each file is read by one rank. Collective.
    Raises StorageError, on all ranks, when the files of a verified checkpoint cannot be read.
    """
    world = engine.world
    progress = checkpoint.progress

    # Each rank reads the headers of its share of the files and tells the others what they hold.
    slices_here: list[Slice] = []
    with errors_on_all_ranks("cannot be read", checkpoint.folder):
        for path in checkpoint.files[world.rank :: world.world_size]:
            slices_here += read_header(path)
    slices_of_ranks = gather_objects(slices_here)

    with SavedTensors(list(chain.from_iterable(slices_of_ranks))) as saved:
        engine.import_state(saved.part, optimizer_steps=progress["optimizer_steps"])
    engine.import_counters(progress["engine"])
