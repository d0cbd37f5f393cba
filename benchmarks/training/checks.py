"""The sections of gpu_training that check results, and those that need data or a disk.

Owns: losses of the engine against the bare loop at every stage and precision, clipping, fp16,
activation checkpointing; real shards against synthetic batches; the stall of a checkpoint.
Leaves out: speed (`speed`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from pydantic import ValidationError

from benchmarks.corpora.photo_folder import noise_photos, write_photo_folder
from benchmarks.faults.process_runs import run_command
from benchmarks.sharding.contenders import make_shards_command
from benchmarks.training.scale import Context
from benchmarks.training.speed import (
    COMPARED,
    DTYPES,
    apart,
    engine_loop,
    start_afresh,
    stepper,
    task_of,
)
from benchmarks.training.steps import BareLoop, EngineLoop, Task, random_batches
from benchmarks.training.timing import seconds_of, synchronize
from vitscale.engine.settings import EngineSettings
from vitscale.optim.settings import OptimSettings

# Largest relative difference of a loss from the bare loop's, over all steps compared.
TOLERANCES = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
STAGES = (0, 1, 2, 3)


def check_engine(ctx: Context) -> None:
    start_afresh(ctx.world.device)
    task = task_of(ctx.scale.checked)
    check_losses(ctx, task)
    check_clipping(ctx, task)
    check_activation_checkpointing(ctx, task)
    check_fp16(ctx, task)


def run_losses(ctx: Context, loop: Any, task: Task, *, steps: int) -> list[float]:
    losses: list[torch.Tensor] = []
    step = stepper(loop, random_batches(task, ctx.world), losses)
    for number in range(steps):
        step(number)
    return [float(loss) for loss in losses]


def own_loop(
    ctx: Context, task: Task, *, stage: int, precision: str, compiled: bool = False, **more: Any
) -> EngineLoop:
    settings = EngineSettings(zero_stage=stage, precision=precision, **more)
    compiler = ctx.scale.compiler if compiled else None
    return EngineLoop(
        task, ctx.world, settings=settings, dtype=DTYPES[precision], compiler=compiler
    )


def check_losses(ctx: Context, task: Task) -> None:
    """The first losses of every stage, bf16 and fp32, against the bare loop's."""
    steps, found = ctx.scale.checked_steps, {}
    precisions = ("fp32", "bf16") if ctx.world.device.type == "cuda" else ("fp32",)
    for precision in precisions:
        bare = {
            kind: run_losses(ctx, BareLoop(task, ctx.world, precision=kind), task, steps=steps)
            for kind in (("fp32",) if precision == "fp32" else ("autocast", "master"))
        }
        ctx.record(**{f"bare_losses_{kind}": [v[0], v[-1]] for kind, v in bare.items()})
        kinds = [(stage, False) for stage in STAGES] + [(1, True)]
        for stage, compiled in kinds:
            name = f"{precision} zero {stage}{' compiled' if compiled else ''}"
            kind = precision if precision == "fp32" else ("master" if stage else "autocast")
            loop = own_loop(ctx, task, stage=stage, precision=precision, compiled=compiled)
            found[name] = apart(run_losses(ctx, loop, task, steps=steps), bare[kind])
            ctx.record(losses_apart=found, num_losses=steps)
            what = f"{name}: losses differ by {found[name]:.2e} from the bare loop's"
            ctx.expect(found[name] < TOLERANCES[precision], what)
        fell = all(values[-1] < values[0] for values in bare.values())
        ctx.expect(fell, f"{precision}: the loss does not fall")


def check_clipping(ctx: Context, task: Task) -> None:
    """SGD's first update is the learning rate times the clipped gradient, so its norm is known."""
    clip, found = 0.05, {}
    optim = OptimSettings(name="sgd", lr=1.0, clip_norm=clip)
    task = replace(task, optim=optim)
    for stage in (0, 1):
        loop = own_loop(ctx, task, stage=stage, precision=ctx.scale.precision)
        before = {key: value.clone() for key, value in loop.engine.export_state().items()}
        images, labels = random_batches(task, ctx.world, count=1)[0]
        loop.step(0, images, labels)
        after, norm = loop.engine.export_state(), loop.engine.gradient_norm()
        moved = sum(
            float((after[key].double() - before[key].double()).square().sum())
            for key in after
            if key.startswith("model.")
        )
        share = moved**0.5 / (task.rate(0) * clip)
        found[f"zero {stage}"] = {"gradient_norm": norm, "update_over_allowed": share}
        ctx.record(clipping=found)
        ctx.expect(norm > clip, f"zero {stage}: a norm of {norm} leaves nothing to clip")
        ctx.expect(abs(share - 1) < 0.02, f"zero {stage}: update is {share:.3f} of what clips to")


def check_activation_checkpointing(ctx: Context, task: Task) -> None:
    device, losses, peaks = ctx.world.device, {}, {}
    for on in (False, True):
        start_afresh(device)
        loop = own_loop(ctx, task, stage=1, precision="fp32", activation_checkpointing=on)
        losses[on] = run_losses(ctx, loop, task, steps=5)
        if device.type == "cuda":
            peaks[on] = torch.cuda.max_memory_allocated(device)
    gap = apart(losses[True], losses[False])
    ctx.record(activation_checkpointing_apart=gap)
    ctx.expect(gap < 1e-4, f"activation checkpointing changes losses by {gap:.2e}")
    if peaks:
        ctx.record(activation_checkpointing_memory=peaks[True] / peaks[False])
        ctx.expect(peaks[True] < peaks[False], "activation checkpointing saves no memory")


def check_fp16(ctx: Context, task: Task) -> None:
    """fp16 scales its loss and may skip the first updates, so only the fall is compared."""
    if ctx.world.device.type != "cuda":
        ctx.record(fp16="for GPUs only")
        return
    try:
        EngineSettings(precision="fp16")
    except ValidationError:
        ctx.record(fp16="the engine has no fp16")
        return
    for stage in (0, 1):
        loop = own_loop(ctx, task, stage=stage, precision="fp16")
        losses = run_losses(ctx, loop, task, steps=ctx.scale.checked_steps)
        ctx.record(**{f"fp16 zero {stage}": [losses[0], losses[-1]]})
        ctx.expect(losses[-1] < losses[0], f"fp16 zero {stage}: the loss does not fall")


def measure_data(ctx: Context) -> None:
    """Training on shards of JPEGs over training on batches that are on the device.

    The real batches are measured after the prefetched ones are used up, between two measurements
    on synthetic batches.
    """
    from vitscale.data.loader import open_loader, training_batches
    from vitscale.data.settings import DataSettings
    from vitscale.data.training_set import open_training_set

    scale, device = ctx.scale, ctx.world.device
    start_afresh(device)
    make_shards(ctx)
    workers = max(1, len(os.sched_getaffinity(0)) - 2) if device.type == "cuda" else 1
    task = task_of(scale.models[COMPARED])
    settings = DataSettings(
        path=str(ctx.work / "shards"),
        val_split=None,
        global_batch=task.batch,
        num_workers=workers,
        timeout_s=60,
    )
    data = open_training_set(settings, seed=0)
    task = replace(task, num_classes=max(2, len(data.classes)))
    loader = training_batches(
        data,
        settings=settings,
        image_size=task.arch.image_size,
        seed=0,
        start=0,
        stop=10_000 * task.batch,
        rank=0,
        world_size=1,
        micro_batch=task.batch,
        pin_memory=device.type == "cuda",
    )
    step = engine_loop(ctx, task).step
    pool = random_batches(task, ctx.world)
    with open_loader(loader) as batches:
        prefetched = 2 * workers + 2
        alone = loader_rate(batches, skip=prefetched, count=max(2, scale.data_steps // 2))
        ctx.record(workers=workers, loader_images_per_s=alone * task.batch)
        compare_data(ctx, task, step, batches, pool, prefetched=prefetched)


def make_shards(ctx: Context) -> None:
    """Noise photographs of several sizes, about 100 kB each, in shards as training reads them."""
    start = time.perf_counter()
    photos = [photo for kind in ctx.scale.photos for photo in noise_photos(**kind)]
    source = write_photo_folder(
        ctx.work / "photos", photos, total_bytes=int(ctx.scale.photo_mib * 2**20)
    )
    shards = ctx.work / "shards"
    run_command(make_shards_command(source.root, shards, shard_mib=ctx.scale.shard_mib))
    mean = source.num_bytes / len(source.digests)
    ctx.record(photos=len(source.digests), photo_bytes=mean, making_s=time.perf_counter() - start)


def loader_rate(batches: Iterator[Any], *, skip: int, count: int) -> float:
    """Batches per second, unused, after the prefetched ones."""
    list(islice(batches, skip))
    start = time.perf_counter()
    list(islice(batches, count))
    return count / (time.perf_counter() - start)


def compare_data(
    ctx: Context,
    task: Task,
    step: Callable[..., Any],
    batches: Iterator[Any],
    pool: list[Any],
    *,
    prefetched: int,
) -> None:
    device, num, waited = ctx.world.device, ctx.scale.data_steps, 0.0

    def synthetic(count: int) -> None:
        for number in range(count):
            step(number, *pool[number % len(pool)])

    def real(count: int) -> None:
        nonlocal waited
        for number in range(count):
            start = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - start
            on_device = batch.to(device)
            step(number, on_device.images, on_device.labels)

    synthetic(min(20, num))
    before = seconds_of(lambda: synthetic(num), device)
    real(prefetched)
    synchronize(device)
    waited = 0.0
    between = seconds_of(lambda: real(num), device)
    after = seconds_of(lambda: synthetic(num), device)
    ctx.record(
        synthetic_images_per_s=2 * num * task.batch / (before + after),
        real_images_per_s=num * task.batch / between,
        real_over_synthetic=(before + after) / 2 / between,
        data_wait=waited / between,
    )


def measure_checkpoint(ctx: Context) -> None:
    """How long training stops for a save, compared with a plain torch.save of the same state."""
    from vitscale.checkpoint.store import CheckpointStore

    device = ctx.world.device
    start_afresh(device)
    task = task_of(ctx.scale.models[COMPARED], batch=ctx.scale.compared_batch)
    loop = engine_loop(ctx, task)
    step = stepper(loop, random_batches(task, ctx.world), [])
    for number in range(5):
        step(number)
    synchronize(device)
    start = time.perf_counter()
    tensors = loop.engine.export_state()
    export_s = time.perf_counter() - start
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    ctx.record(state_bytes=num_bytes, export_s=export_s)
    plain_s = plain_save(ctx, tensors)
    del tensors
    stalls, totals = [], []
    with CheckpointStore(ctx.work / "run", keep=1, world=ctx.world) as store:
        loop.before_update = store.wait_for_host_copy
        for number in range(2):
            quiet_s = seconds_of(lambda number=number: step(5 + 2 * number), device)
            start = time.perf_counter()
            store.save(loop.engine.export_state(), step=number + 1, progress={}, description={})
            step(6 + 2 * number)
            synchronize(device)
            stalls.append(max(0.0, time.perf_counter() - start - quiet_s))
            store.wait()
            totals.append(time.perf_counter() - start)
    host = torch.empty(min(num_bytes, 2**28), dtype=torch.uint8, device=device)
    pinned = torch.empty(host.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pinned.copy_(host)
    to_host_s = seconds_of(lambda: pinned.copy_(host), device)
    ctx.record(
        torch_save_s=plain_s,
        stall_s=stalls,
        until_committed_s=totals,
        stall_over_torch_save=min(stalls[1:]) / plain_s,
        stall_over_copy=min(stalls[1:]) / (num_bytes * to_host_s / host.nbytes),
    )


def plain_save(ctx: Context, tensors: dict[str, torch.Tensor]) -> float:
    """Seconds of torch.save and a flush to the disk."""
    path = ctx.work / "plain.pt"
    start = time.perf_counter()
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds
