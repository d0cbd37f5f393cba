"""The same training step by our engine, by plain PyTorch and by timm's train.py.

Owns: the model and data of a comparison, and one class per way of training.
Leaves out: timing (`timing`) and what is compared (`speed`, `engine_tax`).

All take uint8 images that are on the device, normalise them, clip the gradient norm to 1, follow a
learning-rate schedule, and return the loss without waiting for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm import create_model
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pretrain.run import PretrainRun
from vitscale.data.loader import Batch
from vitscale.data.mixing import mix_batch
from vitscale.distributed.world import World
from vitscale.images.size import rows_and_columns
from vitscale.models.interface.architecture import Architecture
from vitscale.models.vit.architecture import ViTArchitecture
from vitscale.models.vit.model import build_model, compile_blocks, decayed
from vitscale.models.vit.settings import ViTSettings
from vitscale.optim.optimizer import build_optimizer, optimizer_groups
from vitscale.runs.training import TrainingPlan, training_plan
from vitscale.training.loop import learning_rate_at, seed_step

NUM_SAMPLES = 12_400_000  # of ImageNet-21k; where a schedule counts epochs
# Labels are of ten classes only, so that the loss falls within a few steps for any images.
LABELS_USED = 10
MEAN = STD = (0.5, 0.5, 0.5)
POOL = 4
Images = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the loops of a comparison train: a run without mixing, its model and its batches."""

    run: PretrainRun
    world_size: int = 1

    @cached_property
    def plan(self) -> TrainingPlan:
        return training_plan(self.run, world_size=self.world_size, num_samples=NUM_SAMPLES)

    @property
    def batch(self) -> int:
        """Images per rank and micro-batch."""
        return self.plan.micro_batch

    @property
    def num_classes(self) -> int:
        assert self.run.model.num_classes is not None
        return self.run.model.num_classes

    @property
    def arch(self) -> ViTArchitecture:
        arch = self.run.model.architecture(num_classes=self.num_classes)
        assert isinstance(arch, ViTArchitecture)
        return arch

    def initial(self) -> nn.Module:
        """The same weights for every loop."""
        return copy.deepcopy(_initial(self.run.model, self.num_classes))

    def rate(self, step: int) -> float:
        return learning_rate_at(step, run=self.run, plan=self.plan)

    def groups(self, named: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
        return optimizer_groups(
            named, settings=self.run.optim, decayed=decayed, layers_above=lambda name: 0
        )


@lru_cache(maxsize=1)
def _initial(model: ViTSettings, num_classes: int) -> nn.Module:
    """Kept, since drawing the weights of a large model takes seconds."""
    return build_model(model, model.architecture(num_classes=num_classes), seed=0)


def random_batches(task: Task, world: World, *, count: int = POOL) -> list[Images]:
    """Different on every rank."""
    rng = torch.Generator().manual_seed(world.rank)
    return [
        random_images(task.arch, task.batch, device=world.device, rng=rng) for _ in range(count)
    ]


def random_images(
    arch: Architecture, num: int, *, device: torch.device, rng: torch.Generator | None = None
) -> Images:
    """uint8 images [num, 3, rows, columns] and labels [num] of a few classes, on the device."""
    rows, columns = rows_and_columns(arch.image_size)
    shape = (num, 3, rows, columns)
    images = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
    most = max(1, min(LABELS_USED, arch.num_classes))
    labels = torch.randint(0, most, (num,), generator=rng)
    return images.to(device), labels.to(device)


def normalize(images: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, images.float(), scale)


class EngineLoop:
    """The step of pretrain/main.py: a run's objective, engine and mixing, on any batches."""

    def __init__(self, run: Any, world: World, *, model: nn.Module | None = None) -> None:
        """run: of pre-training or fine-tuning. model: fresh, on the CPU; None: built from the run.

        Raises UserError, as the run itself would.
        """
        # Imported late: the bare loops do without DeepSpeed, which takes seconds to import.
        from vitscale.training.segment import build_engine, build_model

        self.run, self.world = run, world
        self.before_update: Callable[[], None] = lambda: None
        self.plan = training_plan(run, world_size=world.world_size, num_samples=NUM_SAMPLES)
        self.objective = run.make_objective()
        num_classes = run.model.num_classes if self.objective.trains_classifier else 0
        self.arch = run.model.architecture(num_classes=num_classes)
        self.objective.prepare(arch=self.arch, device=world.device)
        if model is None:
            model = build_model(run, self.objective, self.arch)
        self.engine = build_engine(run, self.plan, world, self.arch, model)
        self._weights_B = torch.ones(self.plan.micro_batch, device=world.device)

    @property
    def wrapper(self) -> str:
        """DeepSpeed's class that holds the optimiser, and what it does with gradients."""
        return self.engine.gradient_path

    def step(self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        """One micro-step; with an update where it ends an accumulation."""
        update, micro_step = divmod(number, self.plan.accumulation)
        seed_step(self.run.seed, step=update, micro_step=micro_step, rank=self.world.rank)
        first = number * len(labels_B)
        positions = np.arange(first, first + len(labels_B))
        batch = Batch(images_B3SS, labels_B, self._weights_B, positions=positions)
        if self.run.data.mixing is not None:
            mixing, seed = self.run.data.mixing, self.run.seed
            batch = mix_batch(batch, mixing, seed=seed, step=update, first_position=first)
        self.engine.set_learning_rate(learning_rate_at(update, run=self.run, plan=self.plan))
        loss: torch.Tensor = self.objective.loss(self.engine, batch)
        self.engine.backward(loss)
        self.before_update()
        self.engine.step()
        return loss.detach()

    def close(self) -> None:
        self.engine.close()


class BareLoop:
    """A plain PyTorch loop with the same model, optimiser and precision.

    "fp32"; "autocast": bf16 products of fp32 weights, as our ZeRO 0; "master": bf16 weights whose
    fp32 copies the optimiser updates, as ZeRO 1 to 3. On several ranks DistributedDataParallel.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        precision: str,
        compiler: str | None = None,
        whole: bool = False,
    ) -> None:
        """whole: compile the model as one, not block by block."""
        assert precision in ("fp32", "autocast", "master")
        self.task, self.device, self.precision = task, world.device, precision
        model = task.initial()
        if compiler is not None and whole:
            model.compile(backend=compiler)
        elif compiler is not None:
            compile_blocks(model, backend=compiler)
        model.to(world.device)
        named = [(name, p.detach().clone()) for name, p in model.named_parameters()]
        if precision == "master":
            model.to(torch.bfloat16)
            self.masters = [copy for _, copy in named]
            for master in self.masters:
                master.grad = torch.empty_like(master)
        else:
            named = list(model.named_parameters())
        self.parameters = list(model.parameters())
        self.optimizer = build_optimizer(
            task.groups(named), settings=task.run.optim, device=world.device
        )
        self.model = DistributedDataParallel(model) if world.world_size > 1 else model
        scale, shift = 1 / (255 * STD[0]), -MEAN[0] / STD[0]
        self.scale, self.shift = (torch.tensor(x, device=world.device) for x in (scale, shift))
        self.normalize: Any = normalize
        if compiler is not None:
            self.normalize = torch.compile(normalize, backend=compiler)

    def step(self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        x_B3SS = self.normalize(images_B3SS, self.shift, self.scale)
        if self.precision == "master":
            x_B3SS = x_B3SS.to(torch.bfloat16)
        with self._autocast():
            logits_BC = self.model(x_B3SS)
        loss = F.cross_entropy(logits_BC.float(), labels_B)
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(number)
        assert self.task.run.optim.clip_norm is not None
        if self.precision == "master":
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.parameters])
            torch.nn.utils.clip_grad_norm_(self.masters, self.task.run.optim.clip_norm)
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.task.run.optim.clip_norm)
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision != "autocast":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class TimmLoop:
    """timm's train.py with --amp --amp-dtype bfloat16 --clip-grad 1 --opt adamw [--torchcompile].

    In its favour: fused AdamW, fused attention (timm's default), no synchronisation in the step,
    images that are on the device already, normalised as its prefetcher does.
    """

    def __init__(
        self, name: str, task: Task, world: World, *, compiler: str | None, sizes: dict[str, Any]
    ) -> None:
        self.task, self.device = task, world.device
        model = create_model(
            name,
            pretrained=False,
            num_classes=task.num_classes,
            img_size=task.arch.image_size,
            **sizes,
        ).to(world.device)
        self.optimizer = create_optimizer_v2(
            model,
            opt="adamw",
            lr=task.run.optim.lr,
            weight_decay=task.run.optim.weight_decay,
            fused=world.device.type == "cuda",
        )
        self.parameters = list(model.parameters())
        self.model = model if compiler is None else torch.compile(model, backend=compiler)
        shape = (1, 3, 1, 1)
        self.mean = torch.tensor([255 * x for x in MEAN], device=world.device).view(shape)
        self.std = torch.tensor([255 * x for x in STD], device=world.device).view(shape)
        self.loss = nn.CrossEntropyLoss()

    def step(self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        x_B3SS = images_B3SS.float().sub_(self.mean).div_(self.std)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.loss(self.model(x_B3SS), labels_B)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.rate(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
