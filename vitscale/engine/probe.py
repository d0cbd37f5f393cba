"""Check at the start that an update with a NaN in one gradient is skipped.

The guard trusts the norm of gradients that DeepSpeed measures. Before 0.19.8 a NaN in one parameter
group gave a finite norm, and all weights became NaN without a word.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from vitscale.config.errors import UserError
from vitscale.distributed.world import World, gather_objects
from vitscale.engine.engine import Engine

VERSIONS = ">=0.19.8,<0.20"


def check_nan_is_skipped(config: dict[str, Any], *, world: World, dtype: torch.dtype) -> None:
    """Train a tiny model with a NaN in the gradient of one of two groups, on the last rank only.

    config: DeepSpeed's, of the engine to come. Collective; takes 0.1 s, at ZeRO 3 a second.
    Raises UserError on all ranks if the weights change.
    """
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    groups = [{"params": list(layer.parameters())} for layer in (first, second)]
    micro_batch = config["train_micro_batch_size_per_gpu"]
    small = {
        "train_batch_size": micro_batch * world.world_size,
        "gradient_accumulation_steps": 1,
        "zero_optimization": config["zero_optimization"] | {"reduce_bucket_size": 100},
    }
    engine = Engine(
        nn.Sequential(nn.Flatten(), first, second).to(world.device),
        optimizer=torch.optim.AdamW(groups, lr=1.0, fused=True),
        optimizer_name="adamw",
        config=config | small,
        world=world,
        dtype=dtype,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
    )
    if world.rank == world.world_size - 1:
        first.bias.register_hook(lambda gradient: gradient * torch.nan)
    before = {name: part.clone() for name, part in engine.export_state().items()}
    images = torch.zeros(micro_batch, 3, 1, 1, dtype=torch.uint8, device=world.device)
    # DeepSpeed would report the skipped update; the engine to come sets the level again.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    engine.backward(engine.logits(images).float().sum())
    engine.step()
    after = engine.export_state()
    is_same = all(torch.equal(part, after[name]) for name, part in before.items())
    engine.close()
    if not all(gather_objects(is_same)):
        raise UserError(
            f"DeepSpeed {version('deepspeed')} updates weights although a gradient is NaN",
            where="engine",
            allowed=f"deepspeed{VERSIONS}",
            next_step=f"pip install 'deepspeed{VERSIONS}'",
        )
