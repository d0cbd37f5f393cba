"""The same training step by our engine, by plain PyTorch and by timm's train.py, and their clocks.

All take uint8 images that are on the device, normalise them, clip the gradient norm to 1, follow a
learning-rate schedule, and return the loss without waiting for it.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm import create_model
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.run import PretrainRun
from vitscale.data.loader import Batch
from vitscale.data.samples import view_shapes
from vitscale.distributed.world import World
from vitscale.models.vit import build_model, compile_blocks, decayed, layers_above
from vitscale.optim.optimizers import build_optimizer, optimizer_groups
from vitscale.optim.settings import learning_rate
from vitscale.runs.training import TrainingPlan, training_plan
from vitscale.training.session import build_engine, seed_step

NUM_SAMPLES = 12_400_000  # of ImageNet-21k; where a schedule counts epochs
# Labels are of ten classes only, so that the loss falls within a few steps for any images.
LABELS_USED = 10
# Of every channel, in [0, 1].
MEAN = STD = 0.5
POOL = 4
Images = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[int], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the loops of a comparison train: a run without mixing, its model and its batches."""

    run: PretrainRun
    device: torch.device
    world_size: int = 1

    @cached_property
    def plan(self) -> TrainingPlan:
        return training_plan(
            self.run, world_size=self.world_size, num_samples=NUM_SAMPLES
        )

    @property
    def batch(self) -> int:
        return self.plan.micro_batch

    @cached_property
    def arch(self) -> Any:
        num_classes = self.run.model.num_classes or 0
        return self.run.model.resolved(num_classes=num_classes)

    @cached_property
    def _initial(self) -> nn.Module:
        return build_model(self.arch, seed=self.run.seed)

    def initial(self) -> nn.Module:
        """The same weights for every loop; drawing those of a large model takes seconds."""
        return copy.deepcopy(self._initial)

    def rate(self, step: int) -> float:
        return learning_rate(
            step,
            self.run.schedule,
            peak=self.run.optim.lr,
            total_steps=self.plan.total_steps,
            warmup_steps=self.plan.warmup_steps,
        )

    @property
    def view_shapes(self) -> dict[str, tuple[int, ...]]:
        return view_shapes(self.run.data, self.arch.image_size)

    @cached_property
    def pool(self) -> list[Images]:
        """uint8 images [batch, 3, side, side], or all pixels of their views, and labels."""
        rng = torch.Generator().manual_seed(0)
        side = self.arch.image_size
        shape: tuple[int, ...] = (3, side, side)
        if self.run.data.views:
            shape = (sum(map(math.prod, self.view_shapes.values())),)
        # A model without a head, as MAE's, has 0 classes; its labels are not used.
        num_labels = max(1, min(LABELS_USED, self.arch.num_classes))

        batches = []
        for _ in range(POOL):
            # Drawn on the CPU, so that the numbers are the same on every device.
            images = torch.randint(
                0,
                256,
                (self.batch, *shape),
                generator=rng,
                dtype=torch.uint8,
            )
            labels = torch.randint(
                0,
                num_labels,
                (self.batch,),
                generator=rng,
            )
            on_device = (images.to(self.device), labels.to(self.device))
            batches.append(on_device)
        return batches


class EngineLoop:
    """The step of pretrain/main.py: a run's objective and engine, on any batches."""

    def __init__(self, task: Task, world: World, *, stage: int = 1) -> None:
        engine = task.run.engine.model_copy(update={"zero_stage": stage})
        self.run = task.run.model_copy(update={"engine": engine})
        self.task = task
        self.objective = self.run.make_objective()
        classes = [str(label) for label in range(task.arch.num_classes)]
        self.objective.prepare(classes=classes, world=world, engine=engine)

        model = task.initial()
        # An objective draws weights of its own, a decoder for example: the same in every loop.
        torch.manual_seed(self.run.seed)
        self.objective.extend_model(model, task.arch)
        self.engine = build_engine(
            self.run,
            task.plan,
            world,
            task.arch,
            model,
        )

        # Where pretrain/main.py waits for the copy of a checkpoint.
        self.before_update: Callable[[], None] = lambda: None
        # Every image counts; the loader gives weight 0 to images that cannot be read.
        self._weights_B = torch.ones(task.batch, device=world.device)

    def step(
        self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor
    ) -> torch.Tensor:
        # Part of a step of the product, so it is timed, although the rivals have no such thing.
        seed_step(self.run.seed, step=number, micro_step=0, rank=0)
        first = number * len(labels_B)
        positions = np.arange(first, first + len(labels_B))
        batch = Batch(
            images_B3SS,
            labels_B,
            self._weights_B,
            positions=positions,
        )
        if self.run.data.views:
            batch = batch.with_views(self.task.view_shapes)
        self.engine.set_positions(positions)
        self.objective.step = number
        self.engine.set_learning_rate(
            self.task.rate(number), rate_factor=self.objective.rate_factor
        )
        loss: torch.Tensor = self.objective.loss(self.engine, batch)
        self.engine.backward(loss)
        self.before_update()
        self.engine.step()
        return loss.detach()


class BareLoop:
    """A plain PyTorch loop with the same model and optimiser.

    precision: "autocast": bf16 products of fp32 weights, as our ZeRO 0; "master": bf16
    weights whose fp32 copies the optimiser updates, as ZeRO 1 to 3.
    """

    def __init__(self, task: Task, *, precision: str, compiled: bool) -> None:
        self.task = task
        self.precision = precision
        model = task.initial()
        if compiled:
            compile_blocks(model, backend="inductor")
        model.to(task.device)

        trained = dict(model.named_parameters())
        if precision == "master":
            # Cloned before the weights become bf16: the masters keep all bits of the first ones.
            trained = {
                name: nn.Parameter(weight.detach().clone())
                for name, weight in trained.items()
            }
            model.to(torch.bfloat16)
            # Allocated once: each step copies the gradients of the model into them.
            for master in trained.values():
                master.grad = torch.empty_like(master)
        self.masters = list(trained.values())
        self.model = model
        self.parameters = list(model.parameters())

        # The groups of the product, so that both decay the same tensors.
        groups = optimizer_groups(
            trained.items(),
            settings=task.run.optim,
            decayed=decayed,
            layers_above=lambda name: layers_above(name, task.arch),
        )
        self.optimizer = build_optimizer(groups, settings=task.run.optim)
        self.normalize: Any = torch.compile(normalize) if compiled else normalize

    def step(
        self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor
    ) -> torch.Tensor:
        x_B3SS = self.normalize(images_B3SS)
        if self.precision == "master":
            x_B3SS = x_B3SS.to(torch.bfloat16)
        with self._autocast():
            logits_BC = self.model(x_B3SS)
        # In fp32, as the engine's loss: a sum over 1,000 classes loses too much in bf16.
        loss = F.cross_entropy(logits_BC.float(), labels_B)
        loss.backward()

        rate = self.task.rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        if self.precision == "master":
            # One launch for all tensors: a loop of copies would make this loop needlessly slow.
            gradients = [weight.grad for weight in self.parameters]
            master_gradients = [master.grad for master in self.masters]
            torch._foreach_copy_(master_gradients, gradients)
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if self.precision == "master":
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)

        # None, not 0: the next backward pass then writes instead of adding.
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision != "autocast":
            return nullcontext()
        return torch.autocast(self.task.device.type, dtype=torch.bfloat16)


def normalize(images: torch.Tensor) -> torch.Tensor:
    """uint8 to fp32 in [-1, 1], by a product and a sum: a division would be slower."""
    scale = 1 / (255 * STD)
    shift = MEAN / STD
    return images.float() * scale - shift


class TimmLoop:
    """timm's train.py with --amp --amp-dtype bfloat16 --clip-grad 1 --opt adamw [--torchcompile].

    In its favour: fused AdamW, fused attention (timm's default), no synchronisation in the step,
    images that are on the device already, normalised as its prefetcher does.
    """

    def __init__(self, name: str, task: Task, *, compiled: bool, **sizes: Any) -> None:
        self.task = task
        model = create_model(
            name,
            num_classes=task.arch.num_classes,
            img_size=task.arch.image_size,
            **sizes,
        )
        model.to(task.device)

        optim = task.run.optim
        self.optimizer = create_optimizer_v2(
            model,
            opt="adamw",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            # PyTorch's fused update is for GPUs.
            fused=task.device.type == "cuda",
        )
        self.parameters = list(model.parameters())
        self.model: Any = model

        # As --torchcompile does, the whole model; ours compiles block by block.
        if compiled:
            self.model = torch.compile(model)

        # As timm's prefetcher keeps them: a value for each channel, in the units of the pixels.
        shape = (1, 3, 1, 1)
        self.mean = torch.full(shape, 255 * MEAN, device=task.device)
        self.std = torch.full(shape, 255 * STD, device=task.device)
        self.loss = nn.CrossEntropyLoss()

    def step(
        self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor
    ) -> torch.Tensor:
        x_B3SS = images_B3SS.float()
        x_B3SS = x_B3SS.sub_(self.mean).div_(self.std)
        with torch.autocast(self.task.device.type, dtype=torch.bfloat16):
            loss = self.loss(self.model(x_B3SS), labels_B)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        rate = self.task.rate(number)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Calls(TorchDispatchMode):
    """Counts calls of ATen."""

    count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        self.count += 1
        # torch passes None where there are no named arguments.
        kwargs = kwargs or {}
        return func(*args, **kwargs)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the device needs for what `work` enqueues; synchronises at both ends only."""
    synchronize(device)
    start_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start_s


def start_afresh(device: torch.device) -> None:
    """Free the memory of the previous loops, and their compiled code.

    torch keeps few compiled variants per function: without this, later models would run uncompiled.
    """
    # A loop is part of circles (engine, hooks, closures), which nothing else would free.
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def interleaved(
    steps: Mapping[str, Step],
    *,
    rounds: int,
    steps_per_round: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Seconds per step of each loop and round: A B C, C B A, A B C, ..."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        names = list(steps)
        # A card that warms up in a round would always favour the same loop.
        if turn % 2 == 1:
            names.reverse()
        first = turn * steps_per_round
        for name in names:
            several = partial(run_steps, steps[name], steps_per_round, first=first)
            # Several steps between two synchronisations: the host runs ahead, as in training.
            seconds[name].append(seconds_of(several, device) / steps_per_round)
    return seconds


def run_steps(step: Step, num: int, *, first: int = 0) -> None:
    for number in range(first, first + num):
        step(number)


def matmul_rate(
    device: torch.device, *, shape: tuple[int, ...], seconds: float
) -> float:
    """FLOP/s of a product on random numbers: bf16 on a GPU, fp32 on a CPU.

    shape: rows, columns, and terms of each sum. seconds: of work before, since a cool GPU is
    faster, and of the measurement; ten products at least.
    """
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16
    rows, columns, terms = shape
    # Random, since products of zeros take less power, and the card clocks higher.
    a = torch.randn(rows, terms, device=device).to(dtype)
    b = torch.randn(terms, columns, device=device).to(dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    # The first ones choose a kernel and load it.
    products(3)
    seconds_of_one = seconds_of(lambda: products(3), device) / 3
    count = max(10, int(seconds / seconds_of_one))
    products(count)

    # A multiplication and an addition for each term.
    flops = 2 * rows * columns * terms * count
    return flops / seconds_of(lambda: products(count), device)
