"""The same training with the engine, at every ZeRO stage, and its whole state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Beside this file, which is run as a script.
from plain_training import (  # type: ignore[import-not-found]  # beside this file
    ACCUMULATION,
    ADAMW,
    BATCH,
    CLIP,
    Recipe,
    data,
    new_model,
    new_optimizer,
)

from vitscale.checkpoint.tensors import SLICE
from vitscale.distributed.world import World, gather_objects, sum_over_ranks
from vitscale.engine.configuration import deepspeed_config
from vitscale.engine.engine import Engine, ReadPart
from vitscale.engine.settings import EngineSettings
from vitscale.models.vit import (
    checkpoint_activations,
    compile_blocks,
)


def new_engine(
    world: World,
    *,
    stage: int,
    recipe: Recipe = ADAMW,
    dtype: torch.dtype = torch.float32,
    compiler: str | None = None,
) -> Engine:
    vit = new_model(recipe)
    if compiler is not None:
        checkpoint_activations(vit)
        compile_blocks(vit, backend=compiler)
    config = deepspeed_config(
        EngineSettings(zero_stage=stage),  # type: ignore[arg-type]  # 0 to 3
        micro_batch=BATCH // ACCUMULATION // world.world_size,
        accumulation=ACCUMULATION,
        world_size=world.world_size,
        largest_parameter=max(each.numel() for each in vit.parameters()),
        clip_norm=CLIP,
        dtype=dtype,
        raw={},
    )
    return Engine(
        vit,
        optimizer=new_optimizer(vit, recipe),
        optimizer_name=recipe.optim.name,
        config=config,
        world=world,
        dtype=dtype,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        ema=recipe.optim.ema,
    )


def spoiled(loss: torch.Tensor, logits: torch.Tensor, step: int, part: int, rank: int) -> None:
    """Make rank 1's loss NaN at step 3, rank 0's infinite at 4, rank 1's gradient NaN at 8."""
    if (step, part, rank) == (3, 0, 1):
        loss *= torch.nan
    if (step, part, rank) == (4, 1, 0):
        loss += torch.inf
    if (step, part, rank) == (8, 1, 1):
        logits.register_hook(lambda gradient: gradient * torch.nan)


def engine_losses(
    engine: Engine,
    world: World,
    *,
    start: int,
    stop: int,
    recipe: Recipe = ADAMW,
    spoil: bool = False,
) -> list[float]:
    losses = []
    for step in range(start, stop):
        images, labels = data(step)
        engine.set_learning_rate(recipe.rate(step))
        total = torch.zeros(1)
        for part in range(ACCUMULATION):
            each = BATCH // ACCUMULATION // world.world_size
            first = (part * world.world_size + world.rank) * each
            rows = slice(first, first + each)
            logits = engine.logits(images[rows])
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[rows])
            total += loss.detach()
            if spoil:
                spoiled(loss, logits, step, part, world.rank)
            engine.backward(loss)
            engine.step()
        losses.append(sum_over_ranks(total).item() / ACCUMULATION / world.world_size)
    return losses


def whole_state(engine: Engine) -> dict[str, torch.Tensor]:
    """The tensors of all ranks, put together of their slices."""
    found: dict[str, torch.Tensor] = {}
    for share in gather_objects(engine.export_state()):
        for key, part in share.items():
            if piece := SLICE.fullmatch(key):
                shape = [int(size) for size in piece["shape"].split("x") if size]
                whole = found.setdefault(piece["name"], torch.empty(shape, dtype=part.dtype))
                whole.view(-1)[int(piece["start"]) :][: part.numel()] = part
            else:
                found[key] = part
    return found


def reader(tensors: Mapping[str, torch.Tensor]) -> ReadPart:
    """Reads parts of whole tensors in memory, as an engine does from a checkpoint."""
    return lambda name, start, count: tensors[name].flatten()[start : start + count]


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
