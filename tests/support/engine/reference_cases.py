"""Train small models with the engine and by the reference trainer, and compare all their numbers.

    reference_cases.py RANKS FOLDER CASE...       (one rank; started by test_reference.py)

Owns: TASKS, what is trained (an optimiser, an objective or a switch each), CASES, which task on
which machine, and the session that a task is trained in, without files. The engine's results go to
FOLDER/CASE.pt. Leaves out: what is right (`reference_training`, `reference_losses`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from pretrain.objectives.masked_patch_prediction import MaskedPatchPrediction
from pretrain.run import PretrainRun
from tests.support import reference_losses as losses
from tests.support.engine.zero_checks import whole_state
from tests.support.reference_training import Loss, Machine, Recipe, Result, train
from vitscale.data.loader import Batch, draw_blend
from vitscale.data.settings import MixingSettings
from vitscale.distributed.processes import run_rank_script
from vitscale.distributed.random_numbers import stream_key, uniform_rows
from vitscale.distributed.world import World, process_group, sum_over_ranks
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.runs.training import training_plan
from vitscale.training.session import TrainingSession, build_engine

STEPS = 20
SEED = 3
CLASSES = 7
# Divides over 4 ranks and 8 micro-batches with an even number of images each.
GLOBAL_BATCH = 64 * 3
# No size is a multiple of the number of ranks everywhere: slices end inside of tensors.
MODEL = {"image_size": 8, "patch_size": 4, "width": 30, "depth": 2, "num_heads": 2}
MODEL |= {"mlp_width": 44}
# Far above the rounding of a gradient that is zero but for it, such as that of a key's bias.
EPS = 1e-3
# Buckets hold a few tensors each.
RAW = {"zero_optimization": {"reduce_bucket_size": 2000}}


@dataclass(frozen=True, kw_only=True)
class Task:
    """The settings of a run, and the same for the reference."""

    recipe: Recipe = Recipe(peak=1e-2, eps=EPS, weight_decay=2.0, drop_seed=SEED)
    loss: Callable[[], Loss] = losses.supervised
    sections: dict[str, Any] = field(default_factory=dict)
    frozen: str | None = None
    """Start of the names of parameters that are not trained."""
    spoiled: bool = False
    """Whether some losses are NaN."""
    skips: bool = False
    """Whether every second micro-batch, so some ranks at a time, leaves out a block."""
    stages: tuple[int, ...] = (0, 1, 2, 3)


def teacher() -> nn.Module:
    return randomized(build_model(ViTSettings(**MODEL).resolved(num_classes=CLASSES), seed=5), 9)


class FixedTeacher:
    """Stands for a teacher read from a file."""

    def __init__(self) -> None:
        self.network = teacher()

    @torch.no_grad()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network((images.float() / 255 - 0.5) / 0.5)
        return logits


class Skippable(nn.Module):
    """A block that the losses of some micro-batches do not use."""

    is_skipped = False

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, tokens_BLD: torch.Tensor) -> torch.Tensor:
        through: torch.Tensor = tokens_BLD if Skippable.is_skipped else self.block(tokens_BLD)
        return through

    @staticmethod
    def choose(positions: np.ndarray) -> None:
        Skippable.is_skipped = bool(positions[0] // len(positions) % 2)


def supervised_with_skips() -> Loss:
    loss = losses.supervised()

    def loss_of(run: Any, pixels: torch.Tensor, sample: Any) -> torch.Tensor:
        Skippable.choose(sample.positions)
        return loss(run, pixels, sample)

    return loss_of


def share_of(pair: int) -> float:
    """What Mixup keeps of an image, drawn for each pair."""
    settings = MixingSettings(mixup_alpha=0.8, mode="pair")
    return draw_blend(settings, stream_key("mix pair", SEED, pair), image_size=8).share


def order_of(positions: np.ndarray) -> np.ndarray:
    """What MAE keeps, drawn for each image."""
    noise = uniform_rows(positions, num=4, key=stream_key("mae", SEED))
    return np.argsort(noise, axis=1, kind="stable")


def corruption_of(positions: np.ndarray) -> dict[str, torch.Tensor]:
    """What is corrupted, drawn for each image."""
    run = make_run("masked patches", Machine())
    objective = MaskedPatchPrediction(run.objective, seed=SEED)
    objective._arch = run.model.resolved(num_classes=0)
    return objective.corruption(positions, torch.device("cpu"))


MIXING = {"data": {"mixing": {"mixup_alpha": 0.8, "mode": "pair"}}}
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": EPS, "weight_decay": 2.0}


def adamw(**changed: Any) -> Recipe:
    return replace(Task.recipe, **changed)


def optim(**changed: Any) -> dict[str, Any]:
    return {"optim": ADAMW | changed}


def objective(name: str, **settings: Any) -> dict[str, Any]:
    return {"objective": {"name": name, **settings}}


TEACHER = {"teacher": {"weights": "none"}, "alpha": 0.4}
MAE = {"mask_ratio": 0.5, "decoder_width": 8, "decoder_depth": 1, "decoder_heads": 2}
TASKS = {
    # Optimisers.
    "adamw": Task(),
    "sgd": Task(
        recipe=adamw(optimizer="sgd", peak=0.1, weight_decay=0.0, curve="linear"),
        sections={"optim": {"name": "sgd", "lr": 0.1}, "schedule": {"decay": "linear"}},
    ),
    "lamb": Task(
        recipe=adamw(optimizer="lamb", weight_decay=0.1, curve="constant"),
        sections={
            "optim": {"name": "lamb", "lr": 1e-2, "eps": EPS, "weight_decay": 0.1},
            "schedule": {"decay": "constant"},
        },
        stages=(0,),
    ),
    "bf16 momentum": Task(
        recipe=adamw(optimizer="adamw bf16 momentum"),
        sections=optim(momentum_dtype="bf16"),
    ),
    # Objectives.
    "sigmoid": Task(
        loss=lambda: losses.supervised("sigmoid", smoothing=0.1, share_of=share_of),
        sections=MIXING | objective("supervised", loss="sigmoid", label_smoothing=0.1),
    ),
    "bce": Task(
        loss=lambda: losses.supervised("bce", share_of=share_of),
        sections=MIXING | objective("supervised", loss="bce"),
    ),
    "hard distillation": Task(
        loss=lambda: losses.distillation(teacher(), kind="hard", alpha=0.4, tau=1),
        sections=objective("distillation", kind="hard", **TEACHER),
    ),
    "soft distillation": Task(
        loss=lambda: losses.distillation(teacher(), kind="soft", alpha=0.4, tau=3),
        sections=objective("distillation", kind="soft", tau=3, **TEACHER),
    ),
    "mae": Task(
        loss=lambda: losses.masked_autoencoder(order_of, kept=2),
        sections=objective("mae", **MAE) | {"model": {"positions": "sincos2d_mae", "width": 32}},
    ),
    "masked patches": Task(
        loss=lambda: losses.masked_patches(corruption_of),
        sections=objective("masked_patch_prediction"),
    ),
    # Switches.
    "average": Task(recipe=adamw(average=0.6), sections=optim(ema={"decay": 0.6})),
    "clip": Task(recipe=adamw(clip=0.3), sections=optim(clip_norm=0.3)),
    "layer decay": Task(
        recipe=adamw(layer_decay=0.6, is_independent=True, weight_decay=0.05),
        sections=optim(layer_decay=0.6, weight_decay_mode="independent", weight_decay=0.05),
    ),
    "mixing": Task(
        loss=lambda: losses.supervised(smoothing=0.1, share_of=share_of),
        sections=MIXING | objective("supervised", label_smoothing=0.1),
    ),
    "activation checkpointing": Task(sections={"engine": {"activation_checkpointing": True}}),
    "frozen": Task(
        recipe=adamw(average=0.6),
        sections=optim(ema={"decay": 0.6}),
        frozen="blocks.0.",
    ),
    "skipped block": Task(loss=supervised_with_skips, skips=True, stages=(0, 1)),
    "drop path": Task(sections={"model": {"drop_path": 0.3, "dropout": 0.1}}),
    "skipped": Task(
        recipe=adamw(average=0.6, clip=0.3),
        sections=optim(ema={"decay": 0.6}, clip_norm=0.3),
        spoiled=True,
    ),
}
MACHINES = [
    Machine(stage=stage, in_bf16=in_bf16, accumulation=accumulation, ranks=ranks)
    for stage, in_bf16, accumulation, ranks in product(
        (0, 1, 2, 3), (False, True), (1, 2, 3, 8), (1, 2, 4)
    )
]
# As on more than 64 ranks: gradients are sent in fp32.
MACHINES += [
    Machine(stage=stage, in_bf16=True, sent_in_bf16=False, accumulation=accumulation, ranks=2)
    for stage, accumulation in product((1, 2, 3), (1, 2, 3, 8))
]


@dataclass(frozen=True, order=True)
class Case:
    ranks: int
    name: str

    @property
    def task(self) -> str:
        return self.name.partition(",")[0]


def name_of(task: str, machine: Machine) -> str:
    sent = "" if machine.sent_in_bf16 else ", sent in fp32"
    return (
        f"{task}, ZeRO {machine.stage}, {'bf16' if machine.in_bf16 else 'fp32'}{sent}, "
        f"{machine.accumulation} accumulated, ranks {machine.ranks}"
    )


ALL = {
    name_of(task, machine): (task, machine)
    for task, machine in product(TASKS, MACHINES)
    if machine.stage in TASKS[task].stages
}


@cache
def pairwise() -> tuple[str, ...]:
    """Few cases in which every pair of a task and of what a machine has occurs. Greedy."""

    @cache
    def pairs(name: str) -> set[tuple[Any, ...]]:
        task, machine = ALL[name]
        facts = [
            ("task", task),
            ("stage", machine.stage),
            ("precision", machine.in_bf16, machine.sent_in_bf16),
            ("accumulation", machine.accumulation),
            ("ranks", machine.ranks),
        ]
        return set(combinations(facts, 2))

    missing = set().union(*map(pairs, ALL))
    chosen = []
    while missing:
        best = max(ALL, key=lambda name: len(pairs(name) & missing) / cost(ALL[name][1]))
        chosen.append(best)
        missing -= pairs(best)
    return tuple(chosen)


def cost(machine: Machine) -> float:
    """About the seconds of a case: the start, and its micro-batches."""
    of_micro_batch = 0.02 if machine.stage == 3 else 0.005
    return 1.0 + STEPS * machine.accumulation * machine.ranks * of_micro_batch


# ---- both trainings ------------------------------------------------------------------------------


def make_run(task: str, machine: Machine) -> PretrainRun:
    values: dict[str, dict[str, Any]] = {
        "data": {"path": "none", "global_batch": GLOBAL_BATCH},
        "model": dict(MODEL),
        "optim": dict(ADAMW),
        "schedule": {"steps": STEPS, "warmup_steps": 5},
        "engine": {
            "device": "cpu",
            "precision": "bf16" if machine.in_bf16 else "fp32",
            "zero_stage": machine.stage,
            "max_micro_batch": GLOBAL_BATCH // machine.ranks // machine.accumulation,
        },
        "deepspeed": RAW | ({} if machine.sent_in_bf16 else {"communication_data_type": "fp32"}),
    }
    for section, changed in TASKS[task].sections.items():
        values[section] = changed if section == "optim" else values.get(section, {}) | changed
    return PretrainRun.model_validate({"stage": "pretrain", "name": "x", "seed": SEED, **values})


def samples(positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that repeat, so that there is something to learn."""
    kinds = positions * 7 % 50
    images = np.stack([_image(int(kind)) for kind in kinds])
    return torch.from_numpy(images), torch.from_numpy(kinds % CLASSES)


@cache
def _image(kind: int) -> np.ndarray:
    return np.random.default_rng(kind).integers(0, 256, (3, 8, 8), dtype=np.uint8)


@torch.no_grad()
def randomized(model: nn.Module, seed: int = 1) -> nn.Module:
    """Move every tensor off its initial value, where decay or an exchange would not show."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += 0.2 * torch.randn(parameter.shape, generator=random)
    return model


def new_model(task: str, run: PretrainRun) -> Any:
    objective = run.make_objective()
    arch = run.model.resolved(num_classes=CLASSES if objective.trains_classifier else 0)
    model = build_model(arch, seed=0)
    torch.manual_seed(0)
    objective.extend_model(model, arch)
    if TASKS[task].skips:
        model.blocks[1] = Skippable(model.blocks[1])
    randomized(model)
    for name, parameter in model.named_parameters():
        if TASKS[task].frozen is not None and name.startswith(TASKS[task].frozen):
            parameter.requires_grad_(False)
    return model


def spoil(step: int, micro: int, rank: int) -> float:
    """Some losses are NaN: of the first and the last micro-batch, the first and the last rank."""
    return float("nan") if (step, micro + rank) in ((3, 0), (4, 1), (9, 0)) else 1.0


def train_reference(name: str) -> Result:
    """In fp32 the truth is the training of one rank and one micro-batch, where that is the same."""
    task, machine = ALL[name]
    by_micro_batch = TASKS[task].spoiled or TASKS[task].skips or task == "drop path"
    by_micro_batch |= machine.in_bf16
    return _train_reference(task, machine if by_micro_batch else Machine())


@cache
def _train_reference(task: str, machine: Machine) -> Result:
    run = make_run(task, machine)
    return train(
        new_model(task, run),
        TASKS[task].loss(),
        samples,
        recipe=TASKS[task].recipe,
        machine=machine,
        global_batch=GLOBAL_BATCH,
        **({"spoil": spoil} if TASKS[task].spoiled else {}),
    )


class SyntheticBatches:
    """The micro-batches of a rank, as its loader gives them."""

    def __init__(self, micro_batch: int, accumulation: int, world: World) -> None:
        self._order = self._batches(micro_batch, accumulation, world)

    def _batches(self, size: int, accumulation: int, world: World) -> Iterator[Batch]:
        for number in range(STEPS * accumulation):
            first = (number * world.world_size + world.rank) * size
            images, labels = samples(np.arange(first, first + size))
            yield Batch(images, labels, torch.ones(size))

    def __next__(self) -> Batch:
        return next(self._order)

    def prefetch(self) -> None:
        pass


def train_engine(name: str, world: World) -> Result:
    """Train in a session that has no files."""
    task, machine = ALL[name]
    run = make_run(task, machine)
    session: Any = object.__new__(TrainingSession)
    session.run = run
    session.world = world
    session.objective = objective = run.make_objective()
    session.plan = plan = training_plan(run, world_size=world.world_size, num_samples=1000)
    assert plan.accumulation == machine.accumulation
    model = new_model(task, run)
    objective.extend_model = lambda model, arch: None  # type: ignore[method-assign]  # it was
    arch = run.model.resolved(num_classes=CLASSES if objective.trains_classifier else 0)
    if hasattr(objective, "patch_size") or "mae" in run.objective.name:
        objective.patch_size = arch.patch_size  # type: ignore[attr-defined]  # of MAE
    objective._arch = arch  # type: ignore[attr-defined]  # of masked patches
    objective.teacher = FixedTeacher()  # type: ignore[attr-defined]  # of distillation
    session.engine = engine = build_engine(run, plan, world, arch, model)
    session.start_step = 0
    session.batches = SyntheticBatches(plan.micro_batch, plan.accumulation, world)
    session.watchdog = SimpleNamespace(mark=lambda doing: None)
    session.store = SimpleNamespace(wait=lambda: None, wait_for_host_copy=lambda: None)
    sums = torch.zeros(1, dtype=torch.float64)
    session.log = SimpleNamespace(
        add_batch=lambda batch: None,
        waiting=nullcontext,
        say=lambda line: None,
        means=SimpleNamespace(add=lambda values: sums.add_(values["train/loss"].item())),
    )
    session.folder = "none"

    result = Result()
    for step in session.steps():
        sums.zero_()
        for micro, batch in enumerate(session.micro_batches(step)):
            if TASKS[task].skips:
                Skippable.choose(batch.positions)
            loss = objective.loss(engine, batch)
            if TASKS[task].spoiled:
                loss = loss * spoil(step, micro, world.rank)
            session.update(loss)
        total = sum_over_ranks(sums)
        result.losses.append(float(total) / plan.accumulation / world.world_size)
        result.norms.append(engine.gradient_norm())
    state = whole_state(engine)
    engine.close()
    trained = {n for n, p in new_model(task, run).named_parameters() if p.requires_grad}
    result.weights = {n: state[f"model.{n}"].clone() for n in trained}
    if run.optim.ema is not None:
        result.average = {n: state[f"ema.{n}"].clone() for n in trained}
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    with process_group(device="cpu", timeout_min=5, num_threads=1) as world:
        for line in (folder / "cases.txt").read_text().splitlines():
            result = train_engine(line, world)
            if world.is_first:
                torch.save(vars(result), folder / f"{line}.pt")
                print(f"trained: {line}", flush=True)


if __name__ == "__main__":
    run_rank_script(main)
