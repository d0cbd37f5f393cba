"""A training written out in plain PyTorch, from the papers: what the engine's numbers must be.

Owns: the order of samples over micro-batches and ranks, rounding in half precision, sums of
gradients, clipping, schedule, optimisers, decay groups, layer decay and the average of the weights.
Ranks run one after another in one process. Optimisers compute in fp64. Shares with the product only
the model, the samples, and what is drawn for each (a contract). The losses: `reference_losses`.
"""

import hashlib
import math
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# Runs the model on pixels.
Run = Callable[..., Any]
# Takes normalised pixels in fp32 and a function that runs the model on them.
Loss = Callable[[Run, torch.Tensor, "Sample"], torch.Tensor]
TOKENS = ("pos_embed", "cls_token", "reg_token", "dist_token", "mask_token")
HEADS = ("head.", "objective.")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the optimiser is given: defaults are those of the tests, not of the product."""

    optimizer: str = "adamw"
    peak: float = 1e-3
    curve: str = "cosine"
    warmup: int = 5
    total: int = 20
    eps: float = 1e-8
    weight_decay: float = 0.0
    is_independent: bool = False
    layer_decay: float = 1.0
    depth: int = 2
    clip: float = math.inf
    average: float | None = None
    final_average: float | None = None
    """A cosine leads from the one to the other, as in DINO; None: it stays."""
    final_decay: float | None = None
    """The same of the weight decay."""
    frozen: str = ""
    """Part of the names of parameters that do not move in the first steps."""
    frozen_steps: int = 0
    stages: tuple[int, int] = (0, 0)
    """Steps of the heads alone, and steps in which the rate of all else then rises."""
    drop_seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How many ranks and micro-batches make a step, and what is rounded."""

    ranks: int = 1
    accumulation: int = 1
    stage: int = 0
    precision: str = "fp32"
    sent_in_bf16: bool = True

    @property
    def in_bf16(self) -> bool:
        return self.precision == "bf16"


@dataclass(frozen=True)
class Sample:
    """A micro-batch. positions, int64 [B]: of its images in training."""

    images: torch.Tensor
    labels: torch.Tensor
    positions: np.ndarray
    step: int = 0
    teacher: Run | None = None
    """Runs the model with the average of its weights."""
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the loss measures besides, by the names of the product."""


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Of a loss that looks at all images of a step at once."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    average: dict[str, torch.Tensor] = field(default_factory=dict)


def normalized(images: torch.Tensor) -> torch.Tensor:
    """uint8 to fp32 in [-1, 1], as ViT's own preprocessing."""
    return (images.float() / 255 - 0.5) / 0.5


def train(
    model: nn.Module,
    loss_of: Loss,
    samples: Callable[[np.ndarray], tuple[torch.Tensor, torch.Tensor]],
    *,
    recipe: Recipe,
    machine: Machine,
    global_batch: int,
    spoil: Callable[..., torch.Tensor] = lambda loss, step, micro, rank: loss,
) -> Result:
    """Train for `recipe.total` steps. samples: uint8 images and labels of positions in training.

    spoil: makes the loss of a micro-batch of a rank, or its gradient, not finite.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # fp64, so that only what the recipe rounds is rounded.
    masters = {name: parameter.detach().double() for name, parameter in trained.items()}
    states = {name: {} for name in masters}
    result = Result(average={name: value.clone() for name, value in masters.items()})
    size = global_batch // machine.ranks // machine.accumulation
    # The teacher is rounded at every stage.
    of_teacher = replace(machine, stage=max(1, machine.stage))
    averaged = deepcopy(model)
    teacher = torch.no_grad()(_prepared(averaged.eval(), of_teacher))
    run = _prepared(model, machine)
    for step in range(recipe.total):
        _set_weights(model, trained, masters, machine)
        for name, value in result.average.items():
            averaged.get_parameter(name).data.copy_(value.float())
        losses = []
        sums = {}
        # A contract: the ranks take turns within a micro-batch, so any layout sees one order.
        turns = product(range(machine.accumulation), range(machine.ranks))
        for turn, (micro, rank) in enumerate(turns):
            first = step * global_batch + turn * size
            positions = np.arange(first, first + size)
            _seed(recipe.drop_seed, step, micro, rank)
            for module in model.modules():
                # Of drop path.
                if hasattr(module, "positions"):
                    module.positions = torch.from_numpy(positions)
            sample = Sample(*samples(positions), positions, step, teacher)
            loss = loss_of(run, normalized(sample.images), sample)
            loss = spoil(loss, step, micro, rank)
            losses.append(loss.item())
            gradients = torch.autograd.grad(
                loss / machine.accumulation,
                trained.values(),
                # Of a parameter that the loss does not use the gradient is 0, not None.
                materialize_grads=True,
            )
            sums[micro, rank] = dict(zip(trained, gradients, strict=True))

        measured = {name: value.item() for name, value in sample.metrics.items()}
        result.metrics.append(measured)
        means = {name: _mean(sums, name, machine) for name in masters}
        # What is frozen must not shrink the others: DINO's code clips each tensor for itself.
        counted = [
            mean for name, mean in means.items() if not _is_frozen(name, step, recipe)
        ]
        squares = [float(mean.double().square().sum()) for mean in counted]
        norm = math.sqrt(sum(squares))
        # The gradient of a loss that is not finite may be: the update is skipped all the same.
        if not all(map(math.isfinite, losses)):
            norm = math.nan
        result.losses.append(sum(losses) / len(losses))
        result.norms.append(norm)
        if math.isfinite(norm):
            # As torch.nn.utils.clip_grad_norm_, which has this constant, too.
            shrink = min(1.0, recipe.clip / (norm + 1e-6))
            for name, mean in means.items():
                gradient = mean.double() * shrink
                masters[name] = _updated(
                    name,
                    masters[name],
                    gradient,
                    states[name],
                    step,
                    recipe,
                )

        # After a skipped update, too. Its warm-up is that of TensorFlow's moving average.
        if recipe.average is not None:
            decay = _moved(recipe.average, recipe.final_average, step, recipe)
            kept = min(decay, (2 + step) / (11 + step))
            for name, value in masters.items():
                average = result.average[name]
                result.average[name] = kept * average + (1 - kept) * value
    result.weights = masters
    return result


# ---- half precision, micro-batches and ranks -----------------------------------------------------


def _prepared(model: nn.Module, machine: Machine) -> Run:
    """The forward pass on fp32 pixels. At stage 0 bf16 products of fp32 weights; else bf16."""
    rounds_weights = machine.in_bf16 and machine.stage > 0
    if rounds_weights:
        model.to(torch.bfloat16)

    def run(pixels, **options):
        with ExitStack() as stack:
            if machine.in_bf16 and machine.stage == 0:
                stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if machine.in_bf16 and machine.stage == 3:
                stack.enter_context(patch.object(F, "linear", _rounded_before_bias))
            if rounds_weights:
                pixels = pixels.bfloat16()
            return model(pixels, **options)

    return run


def _rounded_before_bias(
    x: torch.Tensor, weight: torch.Tensor, bias=None
) -> torch.Tensor:
    """A layer at stage 3, whose kernel frees the weights: DeepSpeed's runtime/zero/linear.py."""
    product = x.matmul(weight.t())
    # torch's own kernel adds the bias in fp32, before it rounds.
    if bias is not None:
        product = product + bias
    return product


@torch.no_grad()
def _set_weights(model: nn.Module, trained, masters, machine: Machine):
    """Round the fp32 weights for the forward pass; the classifier adds what rounding took."""
    for name, parameter in trained.items():
        parameter.copy_(masters[name].float())
    if machine.in_bf16 and machine.stage > 0:
        for prefix, module in model.named_modules():
            # The classifier alone has this attribute.
            if hasattr(module, "remainders"):
                # A new one: until then all models share an empty one.
                module.remainders = {}
                for name, rounded in module.named_parameters(recurse=False):
                    lost = masters[f"{prefix}.{name}"].float() - rounded.float()
                    module.remainders[name] = lost.bfloat16()


def _mean(sums, name: str, machine: Machine) -> torch.Tensor:
    """Sum over micro-batches in fp32, mean over ranks; sums[micro, rank] are gradients."""
    micros = range(machine.accumulation)
    ranks = range(machine.ranks)
    sent_as = torch.float32
    # One rank sends nothing, and stage 0 keeps fp32 gradients.
    sends_bf16 = machine.in_bf16 and machine.stage > 0 and machine.sent_in_bf16
    if sends_bf16 and machine.ranks > 1:
        sent_as = torch.bfloat16

    def over_ranks(values):
        # Divided before the sum, which then cannot overflow; every addition rounds.
        parts = [(value.float() / len(ranks)).to(sent_as) for value in values]
        return sum(parts[1:], parts[0]).float()

    # Stages 2 and 3 send every micro-batch, the others the sum of all.
    if machine.stage >= 2:
        total = torch.zeros(())
        for micro in micros:
            total = total + over_ranks([sums[micro, rank][name] for rank in ranks])
        return total
    of_ranks = []
    for rank in ranks:
        of_ranks.append(sum(sums[micro, rank][name].float() for micro in micros))
    return over_ranks(of_ranks)


def _seed(*position: int):
    """Seed torch as the product does (a contract): dropout is a function of the position."""
    key = repr(("step", *position))
    digest = hashlib.sha256(key.encode()).digest()
    number = int.from_bytes(digest[:8], "little")
    # 63 bits, since torch's seeds have a sign.
    torch.manual_seed(number >> 1)


# ---- schedule and optimisers ---------------------------------------------------------------------


def rate_at(step: int, recipe: Recipe) -> float:
    """Dosovitskiy et al. 2021, appendix B.1: linear warm-up, then the curve down to 0."""
    if step < recipe.warmup:
        return recipe.peak * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / (recipe.total - recipe.warmup)
    if recipe.curve == "cosine":
        return recipe.peak * (1 + math.cos(math.pi * progress)) / 2
    if recipe.curve == "linear":
        return recipe.peak * (1 - progress)
    return recipe.peak


def _moved(first: float, last: float | None, step: int, recipe: Recipe) -> float:
    """Caron et al. 2021, section 3: half a cosine over all steps."""
    if last is None:
        return first
    return last + (first - last) * (1 + math.cos(math.pi * step / recipe.total)) / 2


def _is_frozen(name: str, step: int, recipe: Recipe) -> bool:
    if not name.startswith(HEADS) and step < recipe.stages[0]:
        return True
    return recipe.frozen in name and step < recipe.frozen_steps


def _layers_above(name: str, depth: int) -> int:
    """BEiT and MAE: 0 for head and last norm, depth + 1 for patches, positions and tokens."""
    if name.startswith("blocks."):
        return depth - int(name.split(".")[1])
    if name.startswith(("patch_embed.", *TOKENS)):
        return depth + 1
    return 0


def _updated(
    name: str,
    w: torch.Tensor,
    g: torch.Tensor,
    state: dict[str, Any],
    step: int,
    recipe: Recipe,
) -> torch.Tensor:
    """One step of one tensor, in fp64."""
    scale = recipe.layer_decay ** _layers_above(name, recipe.depth)
    rate = rate_at(step, recipe) * scale
    if _is_frozen(name, step, recipe):
        rate = 0.0
    if not name.startswith(HEADS):
        num_free = step - recipe.stages[0] + 1
        rate *= min(1.0, max(0, num_free) / max(1, recipe.stages[1]))
    # Biases, norms and learned tokens are not decayed.
    decay = 0.0
    if w.ndim >= 2 and name.rpartition(".")[2] not in TOKENS:
        decay = _moved(recipe.weight_decay, recipe.final_decay, step, recipe)
    # Sutskever et al. 2013, as torch: no dampening, no Nesterov.
    if recipe.optimizer == "sgd":
        g = g + decay * w
        state["v"] = 0.9 * state.get("v", 0.0) + g
        return w - rate * state["v"]

    # Kingma & Ba 2015, algorithm 1.
    b1 = 0.9
    b2 = 0.999
    t = state.get("t", 0) + 1
    state["t"] = t
    # optax, mu_dtype=bfloat16: the product is in bf16, the sum is not.
    if recipe.optimizer == "adamw bf16 momentum":
        old = state.get("m", torch.zeros(()))
        kept = torch.tensor(b1).bfloat16() * old.bfloat16()
        m = kept.double() + (1 - b1) * g
        state["m"] = m.bfloat16()
    else:
        m = b1 * state.get("m", 0.0) + (1 - b1) * g
        state["m"] = m
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    denominator = (state["v"] / (1 - b2**t)).sqrt() + recipe.eps
    direction = m / (1 - b1**t) / denominator
    # You et al. 2020, algorithm 2; undecayed tensors as in apex.
    if recipe.optimizer == "lamb":
        direction = direction + decay * w
        size = w.norm()
        change = direction.norm()
        ratio = 1.0
        if decay and size > 0 and change > 0:
            ratio = size / change
        return w - rate * ratio * direction

    # Loshchilov & Hutter 2019, algorithm 2; independent: times the schedule alone (big_vision).
    factor = rate
    if recipe.is_independent:
        factor = rate / (recipe.peak * scale)
    return w - rate * direction - factor * decay * w
