"""One rank of the engine's tests: trains small ViTs at every ZeRO stage, prints results as JSON.

Started by test_zero_stages.py. Compares with plain torch loops, moves the state between stages in
the middle, runs bf16, leaves out updates that are not finite, and averages weights.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from engine_training import engine_losses, equal, new_engine, reader, whole_state  # type: ignore[import-not-found]  # beside this file
from plain_training import (  # type: ignore[import-not-found]  # beside this file
    ACCUMULATION,
    ADAMW,
    HALF,
    LAMB,
    LAYERED,
    MODEL,
    SGD,
    STEPS,
    Plain,
    Recipe,
    data,
    new_model,
    train_plain,
)

from vitscale.distributed.exit import run_rank_script
from vitscale.distributed.world import World, gather_objects, process_group
from vitscale.engine.engine import Engine


def moved(
    world: World,
    *,
    source: int,
    target: int,
    recipe: Recipe,
    dtype: torch.dtype = torch.float32,
    steps: int = STEPS,
) -> dict[str, object]:
    """Train half-way at one stage, move the state to another, and finish there."""
    half = steps // 2
    first = new_engine(world, stage=source, recipe=recipe, dtype=dtype)
    losses = engine_losses(first, world, start=0, stop=half, recipe=recipe)
    tensors = whole_state(first)
    second = new_engine(world, stage=target, recipe=recipe, dtype=dtype)
    read, asked = reader(tensors), list[int]()

    def counted(name: str, start: int, count: int) -> torch.Tensor:
        asked.append(count)
        return read(name, start, count)

    second.import_state(counted, optimizer_steps=first.optimizer_steps())
    second.import_counters(first.export_counters())
    again = whole_state(second)
    losses += engine_losses(second, world, start=half, stop=steps, recipe=recipe)
    times_read = sum(gather_objects(sum(asked))) / sum(each.numel() for each in tensors.values())
    found = {"state_equal": equal(tensors, again), "tensors": len(tensors)}
    return {"losses": losses, "times_read": times_read, **found}


def left_out(world: World, *, stage: int, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """Updates that are not finite on one rank only, among good ones."""
    engine = new_engine(world, stage=stage, dtype=dtype)
    losses = engine_losses(engine, world, start=0, stop=4, spoil=True)
    before, steps = whole_state(engine), engine.optimizer_steps()
    losses += engine_losses(engine, world, start=4, stop=5, spoil=True)
    after = whole_state(engine)
    kept = {key: value for key, value in after.items() if not key.startswith("ema.")}
    same = equal(kept, {key: before[key] for key in kept}) and steps == engine.optimizer_steps()
    health = [gather_objects(engine.health())]
    losses += engine_losses(engine, world, start=5, stop=15, spoil=True)
    health.append(gather_objects(engine.health()))
    rows = [
        [(each.skipped, each.longest, each.last_step, each.bad_micro_steps) for each in ranked]
        for ranked in health
    ]
    return {"losses": losses, "nothing_changed": same, "health": rows}


def chosen_devices(world: World) -> dict[str, object]:
    """Numbers of the GPU that DeepSpeed chooses where each task sees one GPU alone."""
    chosen: list[object] = []
    accelerator, alone = get_accelerator(), replace(world, device=torch.device("cpu", 0))
    with patch.object(accelerator, "set_device", lambda device: chosen.append(str(device))):
        for stage in (0, 1, 3):
            new_engine(alone, stage=stage)
    return {
        "chosen": gather_objects(chosen),
        "local_rank": gather_objects(os.environ["LOCAL_RANK"]),
    }


def averaged(world: World, *, stage: int, plain: Plain) -> dict[str, object]:
    """The average of the weights, used by the forward pass for a while."""
    engine = new_engine(world, stage=stage)
    engine_losses(engine, world, start=0, stop=15)
    state, images = whole_state(engine), data(0)[0]
    far = max(
        (state[f"ema.{name}"] - value).abs().max().item() for name, value in plain.average.items()
    )
    engine.eval()
    with torch.no_grad():
        before = engine.logits(images).clone()
        with engine.averaged():
            shown = engine.logits(images).clone()
            features = engine.features(images).clone()
        after = engine.logits(images)
        own_features = engine.features(images)
    engine.train()
    back = torch.equal(before, after) and equal(state, whole_state(engine))
    return {
        "far": far,
        "shown_far": (shown - plain.logits).abs().max().item(),
        "differ": (shown - before).abs().max().item(),
        "back": back,
        "features_far": (features - plain.features).abs().max().item(),
        "features_differ": (features - own_features).abs().max().item(),
        "features_shape": list(features.shape),
        "losses_after": engine_losses(engine, world, start=15, stop=18),
    }


def clipped_in_bf16(world: World, *, stage: int) -> dict[str, float]:
    """The first update of SGD is the clipped gradient itself."""
    engine = new_engine(world, stage=stage, recipe=SGD, dtype=torch.bfloat16)
    engine.set_learning_rate(1.0)
    before = whole_state(engine)
    images, labels = data(0)
    for _ in range(ACCUMULATION):
        loss = torch.nn.functional.cross_entropy(engine.logits(images).float(), labels)
        engine.backward(100 * loss)
        engine.step()
    after = whole_state(engine)
    changes = [after[name] - before[name] for name in before if name.startswith("model.")]
    return {
        "norm": engine.gradient_norm(),
        "change": torch.nn.utils.get_total_norm(changes).item(),
    }


def compiled(world: World, *, stage: int, compiler: str) -> dict[str, object]:
    """Compiled blocks, activations recomputed, a pass without gradients in the middle."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = new_engine(world, stage=stage, compiler=compiler)
    losses = engine_losses(engine, world, start=0, stop=4)
    engine.eval()
    with torch.no_grad():
        engine.logits(data(0)[0][:4])
    engine.train()
    losses += engine_losses(engine, world, start=4, stop=8)
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    return {"losses": losses, "graphs": graphs, "breaks": list(counters["graph_break"])}


def full_precision(world: World, *, stage: int) -> dict[str, Any]:
    """bf16: original weights from the start, and the head after a few updates."""
    recipe = replace(ADAMW, model=MODEL.model_copy(update={"head_bias": -10.0}))
    given = {f"model.{name}": each for name, each in new_model(recipe).named_parameters()}
    engine = new_engine(world, stage=stage, recipe=recipe, dtype=torch.bfloat16)
    started = whole_state(engine)
    engine_losses(engine, world, start=0, stop=3, recipe=recipe)
    engine.eval()
    with torch.no_grad():
        far, logits = distance_of_logits(engine)
        with engine.averaged():
            far_averaged, _ = distance_of_logits(engine)
    gaps = logits.flatten().sort().values.diff()
    return {
        "start_is_exact": all(torch.equal(started[name], given[name]) for name in given),
        "rounding": max((each - each.bfloat16()).abs().max().item() for each in given.values()),
        "dtype": str(logits.dtype),
        "far": far,
        "far_averaged": far_averaged,
        "near": logits.mean().item(),
        "smallest_gap": gaps[gaps > 0].min().item(),
    }


def distance_of_logits(engine: Engine) -> tuple[float, torch.Tensor]:
    """(largest distance from a product with the fp32 weights, logits)."""
    images = data(0)[0]
    logits, features = engine.logits(images), engine.features(images)
    state = whole_state(engine)  # inside `averaged` the average is in `model`
    wanted = features.float() @ state["model.head.weight"].T + state["model.head.bias"]
    return (logits - wanted).abs().max().item(), logits


def loss_scaled(world: World) -> dict[str, object]:
    """fp16 overflows until its loss scale is low enough; the state is moved before that.

    DeepSpeed refuses fp16 on CPUs without fast kernels for it; slow ones exist.
    """
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    first = new_engine(world, stage=1, dtype=torch.float16)
    engine_losses(first, world, start=0, stop=4)
    second = new_engine(world, stage=1, dtype=torch.float16)
    second.import_state(reader(whole_state(first)), optimizer_steps=first.optimizer_steps())
    second.import_counters(first.export_counters())
    uninterrupted = engine_losses(first, world, start=4, stop=10)
    again = engine_losses(second, world, start=4, stop=10)
    return {
        "alike": uninterrupted == again and first.export_counters() == second.export_counters(),
        "skipped": first.health().skipped,
        "scale": first.loss_scale,
    }


def main() -> None:
    results: dict[str, object] = {}
    with process_group(device="cpu", timeout_min=5, num_threads=1) as world:
        compiler = sys.argv[1] if len(sys.argv) > 1 else "aot_eager"
        for stage in (0, 2):
            results[f"compiled {stage}"] = compiled(world, stage=stage, compiler=compiler)
        for name, recipe, stages in (
            ("adamw", ADAMW, (0, 1, 2, 3)),
            ("sgd", SGD, (1,)),
            ("lamb", LAMB, (0,)),
            ("layered", LAYERED, (1, 3)),
        ):
            plain = train_plain(recipe)
            results[f"plain {name}"] = plain.losses
            results[f"plain norms {name}"] = plain.norms
            for stage in stages:
                engine = new_engine(world, stage=stage, recipe=recipe)
                results[f"zero {stage} {name}"] = engine_losses(
                    engine, world, start=0, stop=STEPS, recipe=recipe
                )
                results[f"norm {stage} {name}"] = engine.gradient_norm()
        for source, target in ((0, 3), (3, 1), (1, 2), (2, 0), (1, 1)):
            results[f"moved {source} to {target}"] = moved(
                world, source=source, target=target, recipe=ADAMW
            )
        results["plain half"] = train_plain(HALF).losses
        results["moved half"] = moved(world, source=1, target=3, recipe=HALF)
        results["moved sgd"] = moved(world, source=1, target=3, recipe=SGD)
        results["plain left out"] = train_plain(ADAMW, steps=15, left_out=(3, 4, 8)).losses
        short = train_plain(ADAMW, steps=15)
        for stage in (0, 1, 2, 3):
            results[f"bf16 {stage}"] = moved(
                world, source=stage, target=stage, recipe=ADAMW, dtype=torch.bfloat16, steps=20
            )
            results[f"left out {stage}"] = left_out(world, stage=stage)
            results[f"clipped {stage}"] = clipped_in_bf16(world, stage=stage)
            results[f"averaged {stage}"] = averaged(world, stage=stage, plain=short)
        for stage in (1, 2):  # DeepSpeed has other wrappers there than in fp32
            results[f"left out bf16 {stage}"] = left_out(world, stage=stage, dtype=torch.bfloat16)
        for stage in (0, 1, 2, 3):
            results[f"full {stage}"] = full_precision(world, stage=stage)
        results["devices"] = chosen_devices(world)
        results["fp16"] = loss_scaled(world)
        if world.is_first:
            print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    run_rank_script(main)
