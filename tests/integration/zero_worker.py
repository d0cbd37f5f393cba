"""One rank of the ZeRO comparison: trains a small ViT at every stage, prints losses as JSON.

Started by test_zero_stages.py. Also moves the state between stages in the middle, and runs bf16.
"""

from __future__ import annotations

import json

import torch

from vitscale.checkpoint.tensors import whole_tensors
from vitscale.distributed import Ranks, gather_objects, process_group, sum_over_ranks
from vitscale.engine.engine import Engine, deepspeed_config
from vitscale.engine.settings import EngineSettings
from vitscale.errors import run_rank_script
from vitscale.models.settings import Architecture, ModelSettings, architecture
from vitscale.models.vit import build_vit, decayed
from vitscale.optim.optimizer import build_optimizer, parameter_groups
from vitscale.optim.settings import OptimSettings
from vitscale.schedules import learning_rate

STEPS, BATCH, ACCUMULATION, CLIP = 50, 16, 2, 0.5
MODEL = ModelSettings(
    image_size=8, patch_size=4, width=30, depth=2, num_heads=2, mlp_width=44, num_classes=7
)


def arch() -> Architecture:
    return architecture(MODEL, num_classes=7)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step % 25)
    images = torch.randint(0, 256, (BATCH, 3, 8, 8), generator=random, dtype=torch.uint8)
    return images, torch.randint(0, 7, (BATCH,), generator=random)


def rate(step: int) -> float:
    return learning_rate(
        step, peak=1e-3, final=0.0, warmup_steps=5, total_steps=STEPS, decay="cosine"
    )


def model() -> torch.nn.Module:
    vit = build_vit(MODEL, arch(), seed=0)
    torch.nn.init.normal_(vit.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return vit


def optim(name: str) -> OptimSettings:
    return OptimSettings(name=name, lr=1e-3, weight_decay=0.1 if name == "adamw" else 0.0)


def plain_losses(name: str) -> tuple[list[float], list[float]]:
    """One process, no DeepSpeed: the slow, independent version. (losses, gradient norms)."""
    vit = model()
    groups = parameter_groups(
        vit.named_parameters(), weight_decay=optim(name).weight_decay, decayed=decayed
    )
    optimizer = build_optimizer(groups, settings=optim(name), device=torch.device("cpu"))
    losses, norms = [], []
    for step in range(STEPS):
        images, labels = data(step)
        x = (images.float() / 255 - 0.5) / 0.5
        loss = torch.nn.functional.cross_entropy(vit(x), labels)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(vit.parameters(), CLIP).item())
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def new_engine(ranks: Ranks, *, stage: int, name: str, dtype: torch.dtype) -> Engine:
    vit = model()
    groups = parameter_groups(
        vit.named_parameters(), weight_decay=optim(name).weight_decay, decayed=decayed
    )
    config = deepspeed_config(
        EngineSettings(zero_stage=stage),
        micro_batch=BATCH // ACCUMULATION // ranks.world_size,
        accumulation=ACCUMULATION,
        world_size=ranks.world_size,
        clip_norm=CLIP,
        dtype=dtype,
        raw={},
    )
    return Engine(
        vit,
        optimizer=build_optimizer(groups, settings=optim(name), device=ranks.device),
        optimizer_name=name,
        config=config,
        ranks=ranks,
        dtype=dtype,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def engine_losses(engine: Engine, ranks: Ranks, *, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        images, labels = data(step)
        engine.set_learning_rate(rate(step))
        total = torch.zeros(1)
        for part in range(ACCUMULATION):
            each = BATCH // ACCUMULATION // ranks.world_size
            first = (part * ranks.world_size + ranks.rank) * each
            rows = slice(first, first + each)
            logits = engine.logits(images[rows])
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[rows])
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        losses.append(sum_over_ranks(total).item() / ACCUMULATION / ranks.world_size)
    return losses


def whole_state(engine: Engine) -> dict[str, torch.Tensor]:
    shares = gather_objects(engine.export_state())
    return whole_tensors(piece for share in shares for piece in share.items())


def moved(
    ranks: Ranks, *, source: int, target: int, name: str, dtype: torch.dtype
) -> dict[str, object]:
    """Train half-way at one stage, move the state to another, and finish there."""
    half = STEPS // 2
    first = new_engine(ranks, stage=source, name=name, dtype=dtype)
    losses = engine_losses(first, ranks, start=0, stop=half)
    tensors = whole_state(first)
    second = new_engine(ranks, stage=target, name=name, dtype=dtype)
    second.import_state(tensors, optimizer_steps=first.optimizer_steps())
    again = whole_state(second)
    equal = all(torch.equal(tensors[key], again[key]) for key in tensors)
    losses += engine_losses(second, ranks, start=half, stop=STEPS)
    return {"losses": losses, "state_equal": equal, "tensors": len(tensors)}


def main() -> None:
    results: dict[str, object] = {}
    with process_group(device="cpu", timeout_min=2, num_threads=1) as ranks:
        for name in ("adamw", "sgd"):
            losses, norms = plain_losses(name)
            results[f"plain {name}"] = losses
            results[f"plain norm {name}"] = norms[-1]
            results[f"plain largest norm {name}"] = max(norms)
            for stage in (0, 1, 2, 3) if name == "adamw" else (1,):
                engine = new_engine(ranks, stage=stage, name=name, dtype=torch.float32)
                results[f"zero {stage} {name}"] = engine_losses(engine, ranks, start=0, stop=STEPS)
                results[f"norm {stage} {name}"] = engine.gradient_norm()
        for source, target in ((0, 3), (3, 1), (1, 2), (2, 0), (1, 1)):
            results[f"moved {source} to {target}"] = moved(
                ranks, source=source, target=target, name="adamw", dtype=torch.float32
            )
        results["moved sgd"] = moved(ranks, source=1, target=3, name="sgd", dtype=torch.float32)
        for stage in (0, 1, 2, 3):
            results[f"bf16 {stage}"] = moved(
                ranks, source=stage, target=stage, name="adamw", dtype=torch.bfloat16
            )
        if ranks.is_first:
            print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    run_rank_script(main)
