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
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from timm import create_model
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vitscale.distributed.world import World
from vitscale.engine.settings import EngineSettings
from vitscale.models.vit.architecture import ViTArchitecture
from vitscale.models.vit.model import build_model, checkpoint_activations, compile_blocks, decayed
from vitscale.models.vit.settings import ViTSettings
from vitscale.optim.optimizer import build_optimizer, optimizer_groups
from vitscale.optim.schedules import learning_rate
from vitscale.optim.settings import OptimSettings
from vitscale.training.losses import LOSSES

NUM_CLASSES = 1000
# Labels are of ten classes only, so that the loss falls within a few steps for any images.
LABELS_USED = 10
MEAN = STD = (0.5, 0.5, 0.5)
POOL = 4
Images = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one loop trains."""

    model: ViTSettings
    batch: int
    """Images per rank and micro-batch."""
    num_classes: int = NUM_CLASSES
    optim: OptimSettings = field(
        default_factory=lambda: OptimSettings(lr=3e-4, weight_decay=0.1, clip_norm=1.0)
    )
    total_steps: int = 1000
    accumulation: int = 1

    @property
    def arch(self) -> ViTArchitecture:
        return self.model.architecture(num_classes=self.num_classes)

    def initial(self) -> nn.Module:
        """The same weights for every loop."""
        return copy.deepcopy(_initial(self.model.model_dump_json(), self.num_classes))

    def rate(self, step: int) -> float:
        return learning_rate(
            step,
            peak=self.optim.lr,
            final=0.0,
            warmup_steps=10,
            total_steps=self.total_steps,
            decay="cosine",
        )

    def groups(self, named: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
        return optimizer_groups(
            named, settings=self.optim, decayed=decayed, layers_above=lambda name: 0
        )


@lru_cache(maxsize=1)
def _initial(model: str, num_classes: int) -> nn.Module:
    """Kept, since drawing the weights of a large model takes seconds."""
    settings = ViTSettings.model_validate_json(model)
    return build_model(settings, settings.architecture(num_classes=num_classes), seed=0)


def random_batches(task: Task, world: World, *, count: int = POOL) -> list[Images]:
    """Different on every rank."""
    rng = torch.Generator().manual_seed(world.rank)
    side, batches = task.arch.image_size, []
    for _ in range(count):
        shape = (task.batch, 3, side, side)
        images = torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)
        most = min(LABELS_USED, task.num_classes)
        labels = torch.randint(0, most, (task.batch,), generator=rng)
        batches.append((images.to(world.device), labels.to(world.device)))
    return batches


def normalize(images: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, images.float(), scale)


class EngineLoop:
    """The step of pretrain/main.py."""

    def __init__(
        self,
        task: Task,
        world: World,
        *,
        settings: EngineSettings,
        dtype: torch.dtype,
        compiler: str | None = None,
        raw: dict[str, Any] | None = None,
    ) -> None:
        # Imported late: the bare loops do without DeepSpeed, which takes seconds to import.
        from vitscale.engine.configuration import deepspeed_config
        from vitscale.engine.engine import Engine

        self.task = task
        self.before_update: Callable[[], None] = lambda: None
        model = task.initial()
        if settings.activation_checkpointing:
            checkpoint_activations(model)
        if compiler is not None:
            compile_blocks(model, backend=compiler)
        model.to(world.device)
        config = deepspeed_config(
            settings,
            micro_batch=task.batch,
            accumulation=task.accumulation,
            world_size=world.world_size,
            clip_norm=task.optim.clip_norm,
            dtype=dtype,
            raw=raw or {},
        )
        groups = task.groups(list(model.named_parameters()))
        self.engine = Engine(
            model,
            optimizer=build_optimizer(groups, settings=task.optim, device=world.device),
            optimizer_name=task.optim.name,
            config=config,
            world=world,
            dtype=dtype,
            mean=MEAN,
            std=STD,
            compile_input=compiler == "inductor",
        )

    def step(self, number: int, images_B3SS: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        self.engine.set_learning_rate(self.task.rate(number // self.task.accumulation))
        loss = LOSSES["softmax"](self.engine.logits(images_B3SS), labels_B, 0.0)
        self.engine.backward(loss)
        self.before_update()
        self.engine.step()
        return loss.detach()


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
            task.groups(named), settings=task.optim, device=world.device
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
        assert self.task.optim.clip_norm is not None
        if self.precision == "master":
            torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.parameters])
            torch.nn.utils.clip_grad_norm_(self.masters, self.task.optim.clip_norm)
            self.optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.task.optim.clip_norm)
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
            lr=task.optim.lr,
            weight_decay=task.optim.weight_decay,
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
