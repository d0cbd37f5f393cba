"""One rank of the engine's tests: trains small ViTs at every ZeRO stage, prints results as JSON.

Started by test_zero_stages.py. Compares with plain torch loops, moves the state between stages in
the middle, runs bf16, leaves out updates that are not finite, and averages weights.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any, Literal
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from engine_training import engine_losses, equal, new_engine, reader, whole_state  # type: ignore[import-not-found]  # beside this file
from gradient_checks import full_precision, gradient_path, peak_memory  # type: ignore[import-not-found]  # beside this file

# Beside this file, which is run as a script.
from host_waits import cuda_branches, host_waits  # type: ignore[import-not-found]  # see above
from plain_training import (  # type: ignore[import-not-found]  # beside this file
    ACCUMULATION,
    ADAMW,
    BATCH,
    HALF,
    LAMB,
    LAYERED,
    SGD,
    STEPS,
    Plain,
    Recipe,
    data,
    train_plain,
)

from vitscale.data.loader import Batch
from vitscale.data.mixing import mix_batch
from vitscale.data.settings import MixingSettings
from vitscale.distributed.failures.ending import run_rank_script
from vitscale.distributed.world import World, gather_objects, process_group
from vitscale.engine.engine import Engine
from vitscale.engine.layouts import initialize_deepspeed
from vitscale.training.losses import softmax_loss
from vitscale.training.meters import IntervalMeter

# Raw keys of DeepSpeed.
SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}

# Kinds of engines whose memory is counted.
PEAKS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1, "accumulation": 2, "overlap": True},
    "2": {"stage": 2, "accumulation": 2, "overlap": True},
    "3": {"stage": 3, "accumulation": 1, "overlap": False},
}


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
        [(each.skipped, each.consecutive, each.last_step, each.bad_micro_steps) for each in ranked]
        for ranked in health
    ]
    return {"losses": losses, "nothing_changed": same, "health": rows}


def waits(
    world: World,
    *,
    stage: int,
    recipe: Recipe,
    dtype: torch.dtype = torch.bfloat16,
    reduce_to: Literal["all", "owners"] = "all",
) -> list[str]:
    """Where two steps, as the training loop makes them, wait for the device."""
    meter = IntervalMeter(world.device)
    with cuda_branches():
        engine = new_engine(
            world, stage=stage, recipe=recipe, dtype=dtype, overlap=True, reduce_to=reduce_to
        )
        mixed_steps(engine, world, meter, start=0, stop=2)
        with host_waits(leave_out=os.path.dirname(__file__)) as places:
            mixed_steps(engine, world, meter, start=2, stop=4)
    return places


def mixed_steps(
    engine: Engine, world: World, meter: IntervalMeter, *, start: int, stop: int
) -> None:
    """Steps with Mixup and CutMix, pair by pair, and the meter of a log interval."""
    each = BATCH // ACCUMULATION // world.world_size
    mixing = MixingSettings(mixup_alpha=0.8, cutmix_alpha=1.0, mode="pair")
    for step in range(start, stop):
        engine.set_learning_rate(1e-3)
        images, labels = data(step)
        for part in range(ACCUMULATION):
            first = (part * world.world_size + world.rank) * each
            rows = slice(first, first + each)
            batch = Batch(images[rows], labels[rows], torch.ones(each)).to(world.device)
            mixed = mix_batch(batch, mixing, seed=0, step=step, first_position=first)
            loss = softmax_loss(
                engine.logits(mixed.images),
                mixed.labels,
                0.1,
                mixed_labels_B=mixed.mixed_labels,
                mix_lambda_B=mixed.mix_lambda,
            )
            engine.backward(loss)
            engine.step()
            meter.add_loss(loss)


def probed_operators() -> bool:
    """Whether starting DeepSpeed on a GPU asks which of its operators can be compiled."""
    asked: list[object] = []

    class Operators(dict[str, bool]):
        def __setitem__(self, name: str, value: bool) -> None:
            asked.append(name)

    accelerator, ops = get_accelerator(), deepspeed.ops
    model = torch.nn.Linear(1, 1)
    with (
        patch.object(accelerator, "device_name", lambda *_: "cuda"),
        patch.object(ops, "__compatible_ops__", Operators()),
        patch.object(deepspeed, "initialize", side_effect=KeyboardInterrupt),
        suppress(KeyboardInterrupt),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        initialize_deepspeed(model, optimizer=optimizer, config={}, dtype=torch.float32)
    return bool(asked)


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


def compiled(world: World, *, stage: int, compiler: str, whole: bool = False) -> dict[str, object]:
    """Compiled blocks or model, activations recomputed, a pass without gradients in the middle."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = new_engine(world, stage=stage, compiler=compiler, whole=whole)
    losses = engine_losses(engine, world, start=0, stop=4)
    engine.eval()
    with torch.no_grad():
        engine.logits(data(0)[0][:4])
    engine.train()
    losses += engine_losses(engine, world, start=4, stop=8)
    counters = torch._dynamo.utils.counters
    graphs = counters["stats"]["unique_graphs"]
    return {"losses": losses, "graphs": graphs, "breaks": list(counters["graph_break"])}


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


def group_timeouts() -> list[float]:
    """The time-out of every process group that exists, s."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [each.options._timeout.total_seconds() for each in backends]


def gradient_paths(world: World) -> dict[str, object]:
    """Before any engine with autocast, which DeepSpeed remembers for all later ones."""
    results: dict[str, object] = {}
    for stage, accumulation in ((1, 1), (1, 4), (2, 4), (3, 1)):
        results[f"path {stage} {accumulation}"] = gradient_path(
            world, stage=stage, accumulation=accumulation
        )
    sums = gradient_path(world, stage=1, accumulation=2, raw=SUMS_IN_FP32)
    owners = gradient_path(world, stage=1, accumulation=2, reduce_to="owners")
    results |= {"path fp32 sums": sums, "path to owners": owners}
    for name, kind in PEAKS.items():
        results[f"peak {name}"] = peak_memory(world, **kind)
    results["path wide"] = gradient_path(world, stage=1, accumulation=1, reduce_precision="fp32")
    return results


def main() -> None:
    results: dict[str, object] = {}
    with process_group(device="cpu", timeout_min=5, num_threads=1) as world:
        results |= gradient_paths(world)
        compiler = sys.argv[1] if len(sys.argv) > 1 else "aot_eager"
        for stage in (0, 2):
            results[f"compiled {stage}"] = compiled(world, stage=stage, compiler=compiler)
        results["compiled 1 whole"] = compiled(world, stage=1, compiler=compiler, whole=True)
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
        for stage in (0, 1, 2, 3):
            results[f"waits {stage} adamw"] = waits(world, stage=stage, recipe=ADAMW)
        results["waits 1 half"] = waits(world, stage=1, recipe=HALF)
        results["waits 2 owners"] = waits(world, stage=2, recipe=ADAMW, reduce_to="owners")
        results["waits 0 lamb"] = waits(world, stage=0, recipe=LAMB)
        results["waits 1 fp32"] = waits(world, stage=1, recipe=ADAMW, dtype=torch.float32)
        results["probed operators"] = probed_operators()
        for stage in (1, 2):  # DeepSpeed has other wrappers there than in fp32
            results[f"left out bf16 {stage}"] = left_out(world, stage=stage, dtype=torch.bfloat16)
        for stage in (1, 3):
            offloaded = new_engine(world, stage=stage, offload=True)
            results[f"offloaded {stage}"] = engine_losses(offloaded, world, start=0, stop=10)
        for stage in (0, 1, 2, 3):
            results[f"full {stage}"] = full_precision(world, stage=stage)
        results["fp16"] = loss_scaled(world)
        results["timeouts"] = group_timeouts()
        if world.is_first:
            print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    run_rank_script(main)
