"""Build what depends on the image size: architecture, model, engine, evaluations and loader.

A run is one segment, or with `schedule.resolutions` one after the other, never two at once.
Leaves out: the state that the next segment takes over (`resume`), and when it does so (`loop`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex
from vitscale.data.loader import Batch, open_loader, training_batches
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.random_numbers import stream_key
from vitscale.distributed.world import World, gather_objects
from vitscale.engine.attention import use_attention
from vitscale.engine.configuration import deepspeed_config, resolve_compile, resolve_precision
from vitscale.engine.device_batches import DeviceBatches
from vitscale.engine.engine import Engine
from vitscale.evaluation.interface.evaluation import FILES, Subject
from vitscale.evaluation.schedule import ScheduledEvaluations
from vitscale.models.interface.architecture import Architecture
from vitscale.models.interface.compilation import compile_forward
from vitscale.models.registry import MODELS
from vitscale.models.vit.patch_embedding import multiply_patches
from vitscale.models.weights.once_per_node import InitialWeights, load_once_per_node
from vitscale.optim.optimizer import build_optimizer, optimizer_groups
from vitscale.runs.training import TrainingPlan, TrainingRun, training_plan
from vitscale.training.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of a run at one image size, `plan.start` to `plan.stop`."""

    plan: TrainingPlan
    arch: Architecture
    engine: Engine
    evaluations: ScheduledEvaluations


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Builds the segments of a run."""

    run: TrainingRun
    objective: Objective
    world: World
    data: TrainingSet
    val_index: SplitIndex | None

    def plan_at(self, step: int) -> TrainingPlan:
        return training_plan(
            self.run,
            world_size=self.world.world_size,
            num_samples=self.data.num_samples,
            step=step,
        )

    def arch_at(self, step: int) -> Architecture:
        """Raises UserError when the model and the label map disagree."""
        model = self.run.model.model_copy(update={"image_size": self.plan_at(step).image_size})
        if not self.objective.trains_classifier:
            return model.architecture(num_classes=0)
        wanted, found = model.num_classes, len(self.data.classes)
        if wanted is not None and wanted != found:
            raise UserError(
                f"{wanted} classes, but the label map of {self.run.data.path} has {found} "
                f"(the first is {self.data.classes[0]!r})",
                where="model.num_classes",
                next_step=f"set model.num_classes={found} (or null), or data.path to other shards",
            )
        return model.architecture(num_classes=found)

    def build(
        self, step: int, *, initial_weights: InitialWeights | None = None
    ) -> tuple[Segment, list[str]]:
        """The segment of a step, with fresh weights, and what `initial_weights` says."""
        plan, arch = self.plan_at(step), self.arch_at(step)
        model = build_model(self.run, self.objective, arch)
        messages = []
        if initial_weights is not None:
            messages = load_once_per_node(
                model, arch, initial_weights, rank=self.world.rank, gather=gather_objects
            )
        engine = build_engine(self.run, plan, self.world, arch, model)
        evaluations = self._evaluations(plan, arch, engine)
        segment = Segment(plan=plan, arch=arch, engine=engine, evaluations=evaluations)
        return segment, messages

    def _evaluations(
        self, plan: TrainingPlan, arch: Architecture, engine: Engine
    ) -> ScheduledEvaluations:
        subject = None
        if self.val_index is not None:
            subject = Subject(
                model=engine,
                train=tuple(self.data.parts),
                val=self.val_index,
                data=self.run.data,
                image_size=plan.image_size,
                micro_batch=plan.max_micro_batch,
                num_outputs=arch.num_classes,
                classes=self.data.classes if arch.num_classes else None,
                folder=Path(self.run.folder) / FILES,
            )
        return ScheduledEvaluations(
            self.objective.evaluations(self.run),
            subject,
            engine=engine,
            has_average=self.run.optim.ema is not None,
        )

    @contextmanager
    def open_batches(self, step: int) -> Iterator[DeviceBatches[Batch]]:
        """Micro-batches of this rank from a step to the end of its segment, on its device."""
        plan = self.plan_at(step)
        loader = training_batches(
            self.data,
            settings=self.run.data,
            image_size=plan.image_size,
            seed=self.run.seed,
            start=step * plan.global_batch,
            stop=plan.stop * plan.global_batch,
            rank=self.world.rank,
            world_size=self.world.world_size,
            micro_batch=plan.micro_batch,
            pin_memory=self.world.device.type == "cuda",
        )
        with open_loader(loader) as batches:
            yield DeviceBatches(batches, self.world.device)


def build_model(run: TrainingRun, objective: Objective, arch: Architecture) -> nn.Module:
    """The same weights on every rank, from the run's seed."""
    settings = run.model.model_copy(update={"image_size": arch.image_size})
    model: nn.Module = MODELS[arch.name].load().build_model(settings, arch, seed=run.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_key("objective", run.seed) >> 1)
        objective.extend_model(model, arch)
    return model


def choose_kernels(run: TrainingRun, model: nn.Module, device: torch.device) -> bool:
    """How a model computes what it computes, in place; whether anything of it is compiled."""
    family = MODELS[run.model.name].load()
    if run.engine.activation_checkpointing:
        family.checkpoint_activations(model)
    if run.engine.patch_embedding == "matmul":
        multiply_patches(model)
    use_attention(run.engine.attention)
    compiled = resolve_compile(run.engine, device)
    if compiled == "blocks":
        family.compile_blocks(model)
    elif compiled == "model":
        compile_forward(model)
    return compiled is not None


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
