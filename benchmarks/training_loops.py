"""The same training step by our engine, by plain PyTorch and by timm's train.py, and their clocks.

All take uint8 images that are on the device, normalise them, clip the gradient norm to 1, follow a
learning-rate schedule, and return the loss without waiting for it.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
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
from vitscale.distributed.world import World
from vitscale.models.vit import build_model, compile_blocks, decayed, layers_above
from vitscale.optim.optimizers import build_optimizer, optimizer_groups
from vitscale.optim.settings import learning_rate
from vitscale.runs.training import TrainingPlan, training_plan
from vitscale.training.session import build_engine, seed_step

NUM_SAMPLES = 12_400_000  # of ImageNet-21k; where a schedule counts epochs
# Labels are of ten classes only, so that the loss falls within a few steps for any images.
LABELS_USED = 10
MEAN = STD = (0.5, 0.5, 0.5)
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
        return self.run.model.resolved(num_classes=self.run.model.num_classes or 0)

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

    @cached_property
    def pool(self) -> list[Images]:
        """uint8 images [batch, 3, side, side] and labels, on the device."""
        rng = torch.Generator().manual_seed(0)
        side, classes = (
            self.arch.image_size,
            max(1, min(LABELS_USED, self.arch.num_classes)),
        )
        found = []
        for _ in range(POOL):
            images = torch.randint(
                0, 256, (self.batch, 3, side, side), generator=rng, dtype=torch.uint8
            )
            labels = torch.randint(0, classes, (self.batch,), generator=rng)
            found.append((images.to(self.device), labels.to(self.device)))
        return found


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
        torch.manual_seed(self.run.seed)
        self.objective.extend_model(model, task.arch)
        self.engine = build_engine(self.run, task.plan, world, task.arch, model)
        self.before_update: Callable[[], None] = lambda: None
        self._weights_B = torch.ones(task.batch, device=world.device)

    def step(
        self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor
    ) -> torch.Tensor:
        seed_step(self.run.seed, step=number, micro_step=0, rank=0)
        positions = np.arange(number * len(labels_B), (number + 1) * len(labels_B))
        batch = Batch(images_B3SS, labels_B, self._weights_B, positions=positions)
        self.engine.set_learning_rate(self.task.rate(number))
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
        self.task, self.precision = task, precision
        model = task.initial()
        if compiled:
            compile_blocks(model, backend="inductor")
        model.to(task.device)
        named = [
            (name, nn.Parameter(p.detach().clone()))
            for name, p in model.named_parameters()
        ]
        if precision == "master":
            model.to(torch.bfloat16)
            self.masters = [copy for _, copy in named]
            for master in self.masters:
                master.grad = torch.empty_like(master)
        else:
            named = list(model.named_parameters())
        self.model, self.parameters = model, list(model.parameters())
        groups = optimizer_groups(
            named,
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
        loss = F.cross_entropy(logits_BC.float(), labels_B)
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(number) * group["lr_scale"]
        if self.precision == "master":
            torch._foreach_copy_(
                [m.grad for m in self.masters], [p.grad for p in self.parameters]
            )
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision != "autocast":
            return nullcontext()
        return torch.autocast(self.task.device.type, dtype=torch.bfloat16)


def normalize(images: torch.Tensor) -> torch.Tensor:
    return images.float() * (1 / (255 * STD[0])) - MEAN[0] / STD[0]


class TimmLoop:
    """timm's train.py with --amp --amp-dtype bfloat16 --clip-grad 1 --opt adamw [--torchcompile].

    In its favour: fused AdamW, fused attention (timm's default), no synchronisation in the step,
    images that are on the device already, normalised as its prefetcher does.
    """

    def __init__(self, name: str, task: Task, *, compiled: bool, **sizes: Any) -> None:
        self.task = task
        classes, side = task.arch.num_classes, task.arch.image_size
        model = create_model(name, num_classes=classes, img_size=side, **sizes).to(
            task.device
        )
        optim = task.run.optim
        self.optimizer = create_optimizer_v2(
            model,
            opt="adamw",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            fused=task.device.type == "cuda",
        )
        self.parameters = list(model.parameters())
        self.model = torch.compile(model) if compiled else model
        shape = (1, 3, 1, 1)
        self.mean = torch.tensor([255 * x for x in MEAN], device=task.device).view(
            shape
        )
        self.std = torch.tensor([255 * x for x in STD], device=task.device).view(shape)
        self.loss = nn.CrossEntropyLoss()

    def step(
        self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor
    ) -> torch.Tensor:
        x_B3SS = images_B3SS.float().sub_(self.mean).div_(self.std)
        with torch.autocast(self.task.device.type, dtype=torch.bfloat16):
            loss = self.loss(self.model(x_B3SS), labels_B)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(number)
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
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


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
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps) if turn % 2 == 0 else reversed(list(steps)):

            def several(
                step: Step = steps[name], first: int = turn * steps_per_round
            ) -> None:
                for number in range(first, first + steps_per_round):
                    step(number)

            found[name].append(seconds_of(several, device) / steps_per_round)
    return found


def matmul_rate(device: torch.device, *, side: int) -> float:
    """FLOP/s of a square product on random numbers: bf16 on a GPU, fp32 on a CPU.

    After a second of work: a cool GPU is faster.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in "ab")
    out = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    products(3)
    count = (
        max(1, int(1.0 / seconds_of(lambda: products(3), device) * 3))
        if side > 1000
        else 3
    )
    products(count)
    return 2 * side**3 * count / seconds_of(lambda: products(count), device)
