"""Train small models with the engine and by the reference trainer, and compare all their numbers.

    reference_cases.py FOLDER       (one rank; started by test_reference.py)

Owns: TASKS and SECTIONS, what is trained (an optimiser, an objective or a switch each), ALL, each
task on each machine, the session that a task is trained in, without files, and how close its
numbers must be. As a script it trains the cases of FOLDER/cases.txt; the engine's results go to
FOLDER/CASE.pt.
Leaves out: what is right (`reference_training`, `reference_losses`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from pretrain.objectives.block_masks import draw_masks
from pretrain.objectives.isotropy import directions
from pretrain.objectives.masked_patch_prediction import MaskedPatchPrediction
from pretrain.run import PretrainRun
from tests.support import reference_losses as losses
from tests.support.engine.small_models import randomized
from tests.support.reference_training import (
    Loss,
    Machine,
    Recipe,
    Result,
    normalized,
    train,
)
from vitscale.checkpoint.store import SLICE
from vitscale.data.loader import Batch
from vitscale.data.samples import view_shapes
from vitscale.data.settings import MixingSettings
from vitscale.distributed.processes import run_rank_script
from vitscale.distributed.random_numbers import stream_key
from vitscale.distributed.world import (
    World,
    gather_objects,
    process_group,
    sum_over_ranks,
)
from vitscale.engine.engine import Engine
from vitscale.evaluation.trained_model import InferenceModel, Preprocessing
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.objectives.draws import uniform_rows
from vitscale.objectives.mixing import draw_blend
from vitscale.objectives.teacher import FeatureTeacher, FrozenModel
from vitscale.runs.training import TrainingPlan, training_plan
from vitscale.training.session import TrainingSession, build_engine

# fp32: of the way that all weights moved. Both trainings round in other orders.
EXACT = 1e-5
# bf16 keeps 8 bits, so each product is off by up to 2^-9. A loss and the norm of its gradients pass
# a few dozen roundings, of which 2^-4 is 32 in one direction. Those of the weights' gradients point
# anywhere, and 20 steps hardly add them up: 2^-6 of the way that all weights moved is 8 of them.
ROUNDED = 2.0**-4
ROUNDED_WAY = 2.0**-6

STEPS = 20
SEED = 3
CLASSES = 7
# Divides over 4 ranks and 8 micro-batches with an even number of images each.
GLOBAL_BATCH = 64 * 3
# No size is a multiple of the number of ranks everywhere: slices end inside of tensors.
MODEL = {
    "image_size": 8,
    "patch_size": 4,
    "width": 30,
    "depth": 2,
    "num_heads": 2,
    "mlp_width": 44,
}
# Far above the rounding of a gradient that is zero but for it, such as that of a key's bias.
EPS = 1e-2
FP16_POWER = 8
# Buckets hold a few tensors each.
RAW = {"zero_optimization": {"reduce_bucket_size": 2000}}
BASE = Recipe(peak=1e-2, eps=EPS, weight_decay=2.0, drop_seed=SEED)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the reference trains, and how. The settings of its run are in SECTIONS."""

    recipe: Recipe = BASE
    loss: Callable[[], Loss] = losses.supervised
    frozen: str | None = None
    """Start of the names of parameters that are not trained."""
    spoiled: bool = False
    """Whether some losses or gradients are not finite, see `spoil`."""
    skips: bool = False
    """Whether every second micro-batch, so some ranks at a time, leaves out a block."""
    couples: bool = False
    """Whether the loss compares the images of a global batch, of which none is accumulated."""
    num_kinds: int = 50
    """How many images there are. Between two that are the same, KoLeo has no distance."""
    idle: tuple[str, ...] = ()
    """Parameters whose gradient is zero but for rounding: a shift before a normalisation."""
    roundings: int = 1
    """How many times what is rounded of the weights' gradients counts."""
    stages: tuple[int, ...] = (0, 1, 2, 3)


def teacher() -> nn.Module:
    """A model with other weights than the one that is trained."""
    arch = ViTSettings(**MODEL).resolved(num_classes=CLASSES)
    return randomized(build_model(arch, seed=5), 9)


class FixedTeacher:
    """Stands for a teacher read from a file."""

    def __init__(self, device: torch.device):
        self.network = teacher().to(device)

    @torch.no_grad()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(normalized(images))


def feature_teachers(device: torch.device) -> list[FeatureTeacher]:
    """Two, of other widths than the model; the first has patches of half the size."""
    teachers = []
    for patch_size, width in ((2, 20), (4, 36)):
        sizes = MODEL | {"patch_size": patch_size, "width": width}
        arch = ViTSettings(**sizes).resolved(num_classes=0)
        model = InferenceModel(
            randomized(build_model(arch, seed=5), width),
            pixels=Preprocessing(image_size=8),
            world=SimpleNamespace(device=device),
        )
        opened = SimpleNamespace(arch=arch)
        frozen = FrozenModel(model=model, opened=opened, fingerprint="")
        teachers.append(FeatureTeacher(frozen=frozen, width=width, grid=arch.grid))
    return teachers


class Skippable(nn.Module):
    """A block that the losses of some micro-batches do not use."""

    is_skipped = False

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, tokens_BLD: torch.Tensor) -> torch.Tensor:
        if Skippable.is_skipped:
            return tokens_BLD
        return self.block(tokens_BLD)

    @staticmethod
    def choose(positions: np.ndarray):
        # By the position, which the reference and the engine have in common.
        micro_batch = positions[0] // len(positions)
        Skippable.is_skipped = bool(micro_batch % 2)


def supervised_with_skips() -> Loss:
    loss = losses.supervised()

    def loss_of(run, pixels, sample):
        Skippable.choose(sample.positions)
        return loss(run, pixels, sample)

    return loss_of


def distilled(*, kind: str, tau: float) -> Loss:
    return losses.distillation(teacher(), kind=kind, alpha=0.4, tau=tau)


def feature_loss() -> Loss:
    networks = [
        teacher.frozen.model.network
        for teacher in feature_teachers(torch.device("cpu"))
    ]
    return losses.features(networks, shares=(0.25, 0.75), weights=(0.7, 1.3))


def share_of(pair: int) -> float:
    """What Mixup keeps of an image, drawn for each pair."""
    settings = MixingSettings(mixup_alpha=0.8, mode="pair")
    key = stream_key("mix pair", SEED, pair)
    return draw_blend(settings, key, image_size=8).share


def order_of(positions: np.ndarray) -> np.ndarray:
    """What MAE keeps, drawn for each image."""
    noise = uniform_rows(positions, num=4, key=stream_key("mae", SEED))
    return np.argsort(noise, axis=1, kind="stable")


def corruption_of(positions: np.ndarray) -> dict[str, torch.Tensor]:
    """What is corrupted, drawn for each image."""
    run = make_run("masked patches", Machine())
    objective = MaskedPatchPrediction(run.objective, seed=SEED)
    # Set by `extend_model`, which would also change a model.
    objective._arch = run.model.resolved(num_classes=0)
    return objective.corruption(positions, torch.device("cpu"))


def directions_of(step: int) -> torch.Tensor:
    """In which LeJEPA looks at the embeddings, drawn for each step."""
    return directions(5, 9, key=stream_key("directions", SEED, step))


def masks_of(positions: np.ndarray) -> np.ndarray:
    """What iBOT masks, drawn for each image."""
    return draw_masks(
        positions,
        num_views=2,
        grid=(2, 2),
        masked_views=0.5,
        shares=(0.1, 0.5),
        seed=SEED,
    )


def temperature_of(step: int) -> float:
    """Linear over the first steps."""
    return 0.4 + 0.3 * min(step / 8, 1)


def adamw(**changed: Any) -> Recipe:
    return replace(BASE, **changed)


# Sections of a run beside those that all tasks have. One with a name replaces the common one.
SECTIONS: dict[str, dict[str, Any]] = yaml.safe_load("""
sgd: {optim: {name: sgd, lr: 0.1}, schedule: {decay: linear}}
lamb:
  optim: {name: lamb, lr: 0.01, eps: 0.01, weight_decay: 0.1}
  schedule: {decay: constant}
bf16 momentum: {optim: {momentum_dtype: bf16}}
sigmoid: {objective: {name: supervised, loss: sigmoid, label_smoothing: 0.1}}
bce: {objective: {name: supervised, loss: bce}}
hard distillation:
  objective: {name: distillation, kind: hard, teacher: {weights: none}, alpha: 0.4}
soft distillation:
  objective: {name: distillation, kind: soft, tau: 3, teacher: {weights: none}, alpha: 0.4}
features:
  objective:
    {name: features, teachers: [{weights: none}, {weights: none}], shares: [1, 3],
     class_weight: 0.7, patch_weight: 1.3}
mae:
  objective: {name: mae, mask_ratio: 0.5, decoder_width: 8, decoder_depth: 1, decoder_heads: 2}
  model: {positions: sincos2d_mae, width: 32}
masked patches: {objective: {name: masked_patch_prediction}}
simclr:
  objective: {name: simclr, temperature: 2, projection_width: 10}
  optim: {lr: 0.0015}
  data: {views: [{name: global, count: 2}]}
lejepa:
  objective:
    {name: lejepa, sigreg_weight: 0.02, num_directions: 9, hidden_width: 12, projection_width: 5}
  optim: {lr: 0.0005}
  data: &views {views: [{name: global, count: 2}, {name: local, image_size: 4}]}
dino:
  objective:
    &dino {name: dino, num_prototypes: 11, hidden_width: 12, bottleneck_width: 6,
           student_temperature: 0.5,
           teacher_temperature: 0.7, first_temperature: 0.4, temperature_steps: 8,
           frozen_prototype_steps: 4}
  data: *views
  optim: {ema: {decay: 0.8, final_decay: 1}, weight_decay: 0.5, final_weight_decay: 2}
  # The teacher drops nothing.
  model: {drop_path: 0.2}
dinov2:
  objective:
    {<<: *dino, patch_weight: 1, has_patch_head: true, koleo_weight: 0.002, centering: sinkhorn}
  data: *views
  optim: {ema: {decay: 0.8}}
ibot:
  objective: {<<: *dino, patch_weight: 1}
  data: *views
  optim: {ema: {decay: 0.8}}
# At a rate that falls to zero the average would end where the weights do. Its own warm-up lasts
# longer than the training.
average: {optim: {ema: {decay: 0.9}}, schedule: {decay: constant}}
clip: {optim: {clip_norm: 1.0}}
layer decay: {optim: {layer_decay: 0.6, weight_decay_mode: independent, weight_decay: 0.05}}
mixing:
  data: {mixing: {mixup_alpha: 0.8, mode: pair}}
  objective: {name: supervised, label_smoothing: 0.1}
activation checkpointing:
  engine: {activation_checkpointing: true}
  model: {drop_path: 0.2}
frozen: {optim: {ema: {decay: 0.6}}}
staged: {schedule: {freeze_backbone_steps: 7, backbone_ramp_steps: 6}}
drop path: {model: {drop_path: 0.3}}
dropout: {model: {drop_path: 0.3, dropout: 0.1}}
skipped: {optim: {ema: {decay: 0.6}, clip_norm: 1.0}, schedule: {decay: constant}}
""")
# The same in the words of the reference. Each optimiser has another curve, so each is trained once.
TASKS = {
    # Optimisers. LAMB needs whole tensors, which stages above 0 cut into slices.
    "adamw": Task(),
    "sgd": Task(
        recipe=adamw(
            optimizer="sgd",
            peak=0.1,
            weight_decay=0.0,
            curve="linear",
        )
    ),
    "lamb": Task(
        recipe=adamw(optimizer="lamb", weight_decay=0.1, curve="constant"),
        stages=(0,),
    ),
    "bf16 momentum": Task(recipe=adamw(optimizer="adamw bf16 momentum")),
    # Objectives: those of pre-training, with labels or without.
    "sigmoid": Task(loss=lambda: losses.supervised("sigmoid", smoothing=0.1)),
    "bce": Task(loss=lambda: losses.supervised("bce")),
    "hard distillation": Task(loss=lambda: distilled(kind="hard", tau=1)),
    "soft distillation": Task(loss=lambda: distilled(kind="soft", tau=3)),
    "features": Task(loss=feature_loss),
    "mae": Task(loss=lambda: losses.masked_autoencoder(order_of, kept=2)),
    "masked patches": Task(loss=lambda: losses.masked_patches(corruption_of)),
    # At higher rates and lower temperatures what bf16 rounds grows from step to step.
    "simclr": Task(
        recipe=adamw(peak=1.5e-3),
        loss=lambda: losses.contrastive(2),
        couples=True,
    ),
    # Small temperatures would carry on what bf16 rounds.
    "lejepa": Task(
        recipe=adamw(peak=5e-4),
        loss=lambda: losses.lejepa(0.02, directions_of),
        couples=True,
        idle=("norm.bias",),
        # Its norms divide by the spread of the features, which is small.
        roundings=8,
    ),
    "dino": Task(
        recipe=adamw(
            average=0.8,
            final_average=1.0,
            weight_decay=0.5,
            final_decay=2.0,
            frozen="prototypes",
            frozen_steps=4,
        ),
        loss=lambda: losses.dino(temperatures=temperature_of),
        couples=True,
    ),
    "dinov2": Task(
        recipe=adamw(average=0.8, frozen="prototypes", frozen_steps=4),
        loss=lambda: losses.dino(
            temperatures=temperature_of,
            masks_of=masks_of,
            # Near ties of the nearest image are broken by rounding.
            koleo=0.002,
            is_balanced=True,
        ),
        couples=True,
        num_kinds=5000,
        # The teacher has them, too.
        frozen="blocks.0.",
    ),
    "ibot": Task(
        recipe=adamw(average=0.8, frozen="prototypes", frozen_steps=4),
        loss=lambda: losses.dino(temperatures=temperature_of, masks_of=masks_of),
        couples=True,
    ),
    # Switches, each alone, and those that act on the same numbers together in the last.
    "average": Task(recipe=adamw(average=0.9, curve="constant")),
    "clip": Task(recipe=adamw(clip=1.0)),
    "layer decay": Task(
        recipe=adamw(
            layer_decay=0.6,
            is_independent=True,
            weight_decay=0.05,
        )
    ),
    "mixing": Task(loss=lambda: losses.supervised(smoothing=0.1, share_of=share_of)),
    "activation checkpointing": Task(),
    "staged": Task(recipe=adamw(stages=(7, 6))),
    "frozen": Task(recipe=adamw(average=0.6), frozen="blocks.0."),
    "skipped block": Task(loss=supervised_with_skips, skips=True, stages=(0, 1)),
    # Masks of drop path do not depend on the machine, those of dropout do.
    "drop path": Task(),
    "dropout": Task(),
    "skipped": Task(
        recipe=adamw(average=0.6, clip=1.0, curve="constant"), spoiled=True
    ),
}
MACHINES = [
    Machine(stage=stage, precision=precision, accumulation=accumulation, ranks=ranks)
    for stage, precision, accumulation, ranks in product(
        (0, 1, 2, 3), ("fp32", "bf16"), (1, 2, 3, 8), (1, 2, 4)
    )
]
# As on more than 64 ranks: gradients are sent in fp32.
MACHINES += [
    Machine(
        stage=stage,
        precision="bf16",
        sent_in_bf16=False,
        accumulation=accumulation,
        ranks=2,
    )
    for stage, accumulation in product((1, 2, 3), (1, 2, 3, 8))
]


def name_of(task: str, machine: Machine) -> str:
    precision = machine.precision
    if not machine.sent_in_bf16:
        precision += ", sent in fp32"
    return (
        f"{task}, ZeRO {machine.stage}, {precision}, "
        f"{machine.accumulation} accumulated, ranks {machine.ranks}"
    )


# In which order four ranks add in bf16, the reference does not know: of a loss over all images it
# has one rank. SGD at this rate carries the difference on, which Adam's denominator evens out.
BY_ORDER = ("sgd", "simclr", "dinov2", "ibot")
ALL = {
    name_of(task, machine): (task, machine)
    for task, machine in product(TASKS, MACHINES)
    if machine.stage in TASKS[task].stages
    and not (TASKS[task].couples and machine.accumulation > 1)
    and not (task in BY_ORDER and machine.in_bf16 and machine.ranks > 2)
}


@cache
def fast_cases() -> tuple[str, ...]:
    """All pairs of what a machine has, and of a task and what a machine has.

    To a task only one or several micro-batches, and one or several ranks, make a difference.
    """

    def pairs(name):
        task, machine = ALL[name]
        # Others have their parts, one by one.
        if task in ("ibot", "dropout"):
            return set()
        # DINO has all of DINOv2 but its regularisers; teachers are the same on any machine.
        if task in ("dinov2", "features"):
            return {(task, machine.ranks > 1)}
        precision = (machine.precision, machine.sent_in_bf16)
        facts = [("stage", machine.stage), ("precision", precision)]
        ranks = ("ranks", machine.ranks > 1)
        # What several ranks measure together shows in fp32 alone.
        if TASKS[task].couples:
            ranks = (*ranks, machine.precision)
        for_task = [*facts, ("several", machine.accumulation > 1), ranks]
        facts.append(("accumulation", machine.accumulation))
        facts.append(("all ranks", machine.ranks))
        return {*combinations(facts, 2), *((task, fact) for fact in for_task)}

    return _covering(pairs)


@cache
def slow_cases() -> tuple[str, ...]:
    """All machines, all tasks at all stages in all precisions, and all other pairs of a task."""

    def facts(name):
        task, machine = ALL[name]
        ranks = (machine.ranks,)
        # A loss that ranks compute together rounds at other places on each number of them.
        if TASKS[task].couples:
            ranks = (machine.ranks, machine.precision)
        return {
            machine,
            (task, machine.stage, machine.precision),
            (task, "accumulation", machine.accumulation),
            (task, "ranks", ranks),
        }

    return _covering(facts, done=fast_cases())


def _covering(
    facts_of: Callable[[str], set[Any]], *, done: Iterable[str] = ()
) -> tuple[str, ...]:
    """Few cheap cases that have each fact of any case which those of `done` lack. Greedy."""
    facts = {name: facts_of(name) for name in ALL}
    missing = set().union(*facts.values())
    for name in done:
        missing -= facts[name]

    def facts_per_second(name):
        _, machine = ALL[name]
        return len(facts[name] & missing) / cost(machine)

    chosen = []
    while missing:
        best = max(ALL, key=facts_per_second)
        chosen.append(best)
        missing -= facts[best]
    return tuple(chosen)


def cost(machine: Machine) -> float:
    """About the seconds of a case: the starts, and micro-batches in bf16 by the reference too."""
    # In fp32 one training by the reference serves all machines.
    num_micro_batches = machine.accumulation * machine.ranks * (1 + machine.in_bf16)
    return 0.5 + 0.2 * machine.ranks + STEPS * 0.0035 * num_micro_batches


# ---- both trainings ------------------------------------------------------------------------------


def make_run(
    task: str, machine: Machine, *, device: str = "cpu", compiled: bool = False
) -> PretrainRun:
    raw: dict[str, Any] = dict(RAW)
    if not machine.sent_in_bf16:
        raw["communication_data_type"] = "fp32"
    if machine.precision == "fp16":
        # No update overflows at first, as it would at the default.
        raw["fp16"] = {"initial_scale_power": FP16_POWER}

    values: dict[str, dict[str, Any]] = {
        "data": {"path": "none", "global_batch": GLOBAL_BATCH},
        "model": dict(MODEL),
        "optim": {"lr": 1e-2, "eps": EPS, "weight_decay": 2.0},
        "schedule": {"steps": STEPS, "warmup_steps": 5},
        "engine": {
            "device": device,
            "compile": compiled,
            "precision": machine.precision,
            "zero_stage": machine.stage,
            "max_micro_batch": GLOBAL_BATCH // machine.ranks // machine.accumulation,
        },
        "deepspeed": raw,
    }
    for section, changed in SECTIONS.get(task, {}).items():
        # Another optimiser or objective refuses the keys of the common one.
        if "name" in changed:
            values[section] = {}
        values[section] = values[section] | changed
    return PretrainRun.model_validate(
        {"stage": "pretrain", "name": "x", "seed": SEED, **values}
    )


def samples(
    positions: np.ndarray, *, num_kinds: int = 50
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that repeat, so that there is something to learn."""
    # Neighbours, which mixing puts together, have other labels.
    kinds = positions * 11 % num_kinds
    images = np.stack([_image(int(kind)) for kind in kinds])
    return torch.from_numpy(images), torch.from_numpy(kinds % CLASSES)


@cache
def _image(kind: int) -> np.ndarray:
    rng = np.random.default_rng(kind)
    return rng.integers(0, 256, (3, 8, 8), dtype=np.uint8)


def arch_of(run: PretrainRun) -> Any:
    num_classes = 0
    if run.make_objective().trains_classifier:
        num_classes = CLASSES
    return run.model.resolved(num_classes=num_classes)


def new_model(task: str) -> Any:
    run = make_run(task, Machine())
    objective = run.make_objective()
    arch = arch_of(run)
    model = build_model(arch, seed=0)
    # These draw numbers, too.
    objective.teachers = feature_teachers(torch.device("cpu"))
    torch.manual_seed(0)
    objective.extend_model(model, arch)
    if TASKS[task].skips:
        model.blocks[1] = Skippable(model.blocks[1])
    randomized(model)
    frozen = TASKS[task].frozen
    if frozen is not None:
        for name, parameter in model.named_parameters():
            if name.startswith(frozen):
                parameter.requires_grad_(False)
    return model


def spoil(loss: torch.Tensor, step: int, micro: int, rank: int) -> torch.Tensor:
    """Four updates are to be skipped. The first two, and the last two, are in a row."""
    # A sum of 0 is one micro-batch of one rank; a sum of 1 is one of each of two ranks.
    turn = (step, micro + rank)
    if turn in ((3, 0), (10, 0)):
        return loss * math.nan
    if turn == (4, 1):
        return loss + math.inf  # its gradient is finite
    if turn == (9, 0):
        loss.register_hook(lambda gradient: gradient * math.nan)
    return loss


def train_reference(task: str, machine: Machine) -> Result:
    """In fp32 the truth is the training of one rank and one micro-batch, where that is the same.

    fp16 has more digits than bf16: its truth is fp32.
    """
    by_micro_batch = TASKS[task].spoiled or TASKS[task].skips or task == "dropout"
    if machine.precision == "fp16":
        machine = replace(machine, precision="fp32")
    if TASKS[task].couples:
        # One rank that has the images of all: the loss has no smaller parts.
        return _train_reference(task, replace(machine, ranks=1))
    if not by_micro_batch and not machine.in_bf16:
        machine = Machine()
    return _train_reference(task, machine)


@cache
def _train_reference(task: str, machine: Machine) -> Result:
    options: dict[str, Any] = {}
    if TASKS[task].spoiled:
        options["spoil"] = spoil
    return train(
        new_model(task),
        TASKS[task].loss(),
        partial(samples, num_kinds=TASKS[task].num_kinds),
        recipe=TASKS[task].recipe,
        machine=machine,
        global_batch=GLOBAL_BATCH,
        **options,
    )


class SyntheticBatches:
    """The micro-batches of a rank from a step on, as its loader gives them."""

    def __init__(
        self, start: int, plan: TrainingPlan, world: World, views: Any, num_kinds: int
    ):
        self._views = views
        self._num_kinds = num_kinds
        self._order = self._batches(start, plan, world)

    def _batches(self, start: int, plan: TrainingPlan, world: World) -> Iterator[Batch]:
        size = plan.micro_batch
        for number in range(start * plan.accumulation, STEPS * plan.accumulation):
            # The order of the reference: within a micro-batch of all ranks, rank by rank.
            first = (number * world.world_size + world.rank) * size
            positions = np.arange(first, first + size)
            images, labels = samples(positions, num_kinds=self._num_kinds)
            if self._views:
                # The pixels of all views in a row.
                pixels = [images.flatten(1), images.flip(-1).flatten(1)]
                if len(self._views) > 1:
                    pixels.append(images[..., :4, :4].flatten(1))
                images = torch.cat(pixels, dim=1)
            batch = Batch(images, labels, torch.ones(size))
            yield batch.to(world.device)

    def __next__(self) -> Batch:
        return next(self._order)

    def prefetch(self):
        pass


def new_engine(
    task: str,
    machine: Machine,
    world: World,
    *,
    model: nn.Module | None = None,
    compiled: bool = False,
) -> Engine:
    """model: in place of the task's."""
    run = make_run(task, machine, device=world.device.type, compiled=compiled)
    plan = training_plan(run, world_size=world.world_size, num_samples=1000)
    return build_engine(run, plan, world, arch_of(run), model or new_model(task))


class Training:
    """The engine in a session that has no files, and the numbers of all steps so far."""

    def __init__(
        self,
        task: str,
        machine: Machine,
        world: World,
        *,
        before: Result | None = None,
        **model: Any,
    ):
        """before: of the steps that another machine made. model: as in `new_engine`."""
        self.task = task
        self.world = world
        self.result = before or Result()
        self.engine = new_engine(task, machine, world, **model)

        # Without its __init__, which opens folders, data and tracking: the real steps and updates.
        session: Any = object.__new__(TrainingSession)
        run = make_run(task, machine)
        session.run = run
        session.world = world
        session.engine = self.engine
        session.plan = training_plan(run, world_size=world.world_size, num_samples=1000)
        assert session.plan.accumulation == machine.accumulation

        # What `prepare` and `extend_model` would set, which the model of the task has seen.
        objective: Any = run.make_objective()
        arch = arch_of(run)
        if hasattr(objective, "patch_size") or "mae" in run.objective.name:
            objective.patch_size = arch.patch_size  # of MAE
        objective._arch = arch  # of masked patches
        objective.teacher = FixedTeacher(world.device)  # of distillation
        objective.teachers = feature_teachers(world.device)  # of features
        module = getattr(self.engine._engine.module, "objective", None)
        objective._module = module  # of DINO
        session.objective = objective

        session.start_step = len(self.result.losses)
        session.batches = SyntheticBatches(
            session.start_step,
            session.plan,
            world,
            run.data.views,
            TASKS[task].num_kinds,
        )
        session.data = SimpleNamespace(targets=None)
        session._views = view_shapes(run.data, arch.image_size)
        session.watchdog = SimpleNamespace(mark=lambda doing: None)
        session.store = SimpleNamespace(wait_for_host_copy=lambda: None)
        # Of all micro-batches of a step, as the log of a run adds them.
        self._sum = torch.zeros(1, dtype=torch.float64, device=world.device)

        def add(values):
            self._sum += values["train/loss"].item()
            self._measured = values

        session.log = SimpleNamespace(
            add_batch=lambda batch: None,
            waiting=nullcontext,
            means=SimpleNamespace(add=add),
        )
        self._session = session
        self._steps = session.steps()

    def train(self, stop: int):
        """Train until so many steps are done."""
        task = TASKS[self.task]
        session = self._session
        for step in islice(self._steps, stop - len(self.result.losses)):
            self._sum.zero_()
            for micro, batch in enumerate(session.micro_batches(step)):
                if task.skips:
                    Skippable.choose(batch.positions)
                loss = session.objective.loss(self.engine, batch)
                if task.spoiled:
                    loss = spoil(loss, step, micro, self.world.rank)
                session.update(loss)
            total = float(sum_over_ranks(self._sum))
            num_ranks = self.world.world_size
            self.result.losses.append(total / session.plan.accumulation / num_ranks)
            measured = {}
            if task.couples:
                for name, value in self._measured.items():
                    measured[name] = sum_over_ranks(value.detach()).item() / num_ranks
            self.result.metrics.append(measured)
            self.result.norms.append(self.engine.gradient_norm())

    def finish(self) -> Result:
        """Close the engine."""
        state = whole_state(self.engine)
        self.engine.close()
        has_average = TASKS[self.task].recipe.average is not None
        for name, parameter in new_model(self.task).named_parameters():
            # The reference has no masters of what is not trained.
            if not parameter.requires_grad:
                continue
            self.result.weights[name] = state[f"model.{name}"]
            if has_average:
                self.result.average[name] = state[f"ema.{name}"]
        return self.result


def whole_state(engine: Engine) -> dict[str, torch.Tensor]:
    """The tensors of all ranks, put together of their slices, on the CPU."""
    state: dict[str, torch.Tensor] = {}
    for share in gather_objects(engine.export_state()):
        for key, part in share.items():
            piece = SLICE.fullmatch(key)
            if piece is None:
                state[key] = part.to("cpu", copy=True)
                continue
            # A slice knows the shape of its tensor; a scalar's is empty.
            shape = [int(size) for size in piece["shape"].split("x") if size]
            empty = torch.empty(shape, dtype=part.dtype)
            whole = state.setdefault(piece["name"], empty).view(-1)
            start = int(piece["start"])
            whole[start : start + part.numel()] = part
    return state


# ---- how close both are --------------------------------------------------------------------------


def distances(
    ours: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    initial: dict[str, torch.Tensor],
) -> tuple[float, float]:
    """How far tensors are from where they should be, of the way that they moved.

    Returns this of all tensors together, and the largest of one.
    """
    assert ours.keys() == right.keys()
    gaps = []
    ways = []
    for name, expected in right.items():
        expected = expected.double()
        gaps.append((ours[name] - expected).norm())
        ways.append((expected - initial[name]).norm())
    gap = torch.stack(gaps)
    way = torch.stack(ways)
    # Of such a tensor no distance means anything: a task that does not train it is of no use.
    assert way.min() > 0, "a tensor has not moved"
    together = gap.norm() / way.norm()
    largest = (gap / way).max()
    return together.item(), largest.item()


def check(task: str, ours: Result, right: Result, *, exact: bool):
    # The few values of a bias, and what hardly moves, may be off by more than all weights.
    close = ROUNDED
    close_way = ROUNDED_WAY * TASKS[task].roundings
    close_tensor = 4 * ROUNDED
    # One bit in fp32 may change how the moment that is kept in bf16 rounds.
    if exact and TASKS[task].recipe.optimizer != "adamw bf16 momentum":
        close = EXACT
        close_way = EXACT * TASKS[task].roundings
        close_tensor = 10 * EXACT
    initial = {key: value.detach() for key, value in new_model(task).named_parameters()}

    assert ours.losses == pytest.approx(right.losses, rel=close, nan_ok=True)
    # DeepSpeed's norm of an update that is skipped is infinite.
    norms = [norm if math.isfinite(norm) else math.nan for norm in ours.norms]
    assert norms == pytest.approx(right.norms, rel=close, nan_ok=True)
    for measured, expected in zip(ours.metrics, right.metrics, strict=True):
        if expected:
            measured.pop("train/loss")
            assert measured == pytest.approx(expected, rel=close, abs=close)

    # Of what hardly moves, the distance says nothing.
    for idle in TASKS[task].idle:
        ours.weights.pop(idle, None)
        right.weights.pop(idle, None)
    pairs = [(ours.weights, right.weights)]
    if TASKS[task].recipe.average is not None:
        pairs.append((ours.average, right.average))
    for trained, expected in pairs:
        together, largest = distances(trained, expected, initial)
        assert together < close_way and largest < close_tensor, (together, largest)


def main():
    folder = Path(sys.argv[1])
    with process_group(device="cpu", timeout_min=5, num_threads=1) as world:
        for line in (folder / "cases.txt").read_text().splitlines():
            training = Training(*ALL[line], world)
            training.train(STEPS)
            result = training.finish()
            if world.is_first:
                # The test reads the file as soon as it has its name.
                part = folder / "part"
                torch.save(vars(result), part)
                part.rename(folder / f"{line}.pt")
                print(f"trained: {line}", flush=True)


if __name__ == "__main__":
    run_rank_script(main)
