"""The sections of gpu_training that need data, a disk or fresh processes.

Owns: real shards against synthetic batches, the loader alone, the stall of a checkpoint, the first
step of a fresh process.
Leaves out: rates and speed of the model itself (`speed`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.corpora.photo_folder import noise_photos, write_photo_folder
from benchmarks.faults.process_runs import run_command
from benchmarks.sharding.commands import make_shards_command
from benchmarks.training.scale import Context
from benchmarks.training.speed import COMPARED, engine_loop, stepper, task_of
from benchmarks.training.steps import BareLoop, Task, random_batches
from benchmarks.training.timing import seconds_of, start_afresh, synchronize
from vitscale.engine.device_batches import DeviceBatches

FASTEST_DECODER = "region"
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def measure_data(ctx: Context) -> None:
    """Training on shards of JPEGs over training on batches that are on the device.

    The real batches are measured after the prefetched ones are used up, between two measurements
    on synthetic batches.
    """
    from vitscale.data.loader import open_loader, training_batches
    from vitscale.data.settings import DataSettings
    from vitscale.data.training_set import open_training_set
    from vitscale.images.decoders import resolve_decoder

    scale, device = ctx.scale, ctx.world.device
    start_afresh(device)
    make_shards(ctx)
    workers = max(1, len(os.sched_getaffinity(0)) - 2) if ctx.on_gpu else 1
    task = task_of(ctx, scale.models[COMPARED])
    settings = DataSettings(
        path=str(ctx.work / "shards"),
        val_split=None,
        global_batch=task.batch,
        num_workers=workers,
        timeout_s=60,
    )
    decoder = resolve_decoder(settings.decoder)
    ctx.record(workers=workers, decoder=decoder)
    what = f"the {decoder} decoder is used: the extension of the {FASTEST_DECODER} one is missing"
    ctx.expect(decoder == FASTEST_DECODER, what)
    loader = training_batches(
        open_training_set(settings, seed=0),
        settings=settings,
        image_size=task.arch.image_size,
        seed=0,
        start=0,
        stop=10_000 * task.batch,
        rank=0,
        world_size=1,
        micro_batch=task.batch,
        pin_memory=ctx.on_gpu,
    )
    step = engine_loop(ctx, task).step
    pool = random_batches(task, ctx.world)
    with open_loader(loader) as batches:
        prefetched = 2 * workers + 2
        alone = loader_rate(batches, skip=prefetched, count=max(2, scale.data_steps // 2))
        ctx.record(
            loader_images_per_s=alone * task.batch,
            loader_images_per_s_and_worker=alone * task.batch / workers,
        )
        ctx.check_time("training on real batches")
        on_device = DeviceBatches(batches, device)
        compare_data(ctx, task, step, on_device, pool, prefetched=prefetched)


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
    batches: DeviceBatches[Any],
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
            step(number, batch.images, batch.labels)
            start = time.perf_counter()
            batches.prefetch()
            waited += time.perf_counter() - start

    synthetic(min(20, num))
    # Both are to fit into the time that is left, with what is prefetched.
    one_s = seconds_of(lambda: synthetic(2), device) / 2
    num = max(2, min(num, int(ctx.seconds_left() / one_s / 4)))
    before = seconds_of(lambda: synthetic(num), device)
    real(prefetched)
    synchronize(device)
    waited = 0.0
    between = seconds_of(lambda: real(num), device)
    after = seconds_of(lambda: synthetic(num), device)
    ctx.record(
        steps=num,
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
    task = task_of(ctx, ctx.scale.models[COMPARED], batch=ctx.scale.compared_batch)
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
    ctx.record(torch_save_s=plain_s)
    del tensors
    stalls, totals = [], []
    with CheckpointStore(ctx.work / "run", keep=1, world=ctx.world) as store:
        loop.before_update = store.wait_for_host_copy
        for number in range(3):
            if number >= 2 and ctx.seconds_left() < 2 * max(totals):
                break
            quiet_s = seconds_of(lambda number=number: step(5 + 2 * number), device)
            start = time.perf_counter()
            store.save(loop.engine.export_state(), step=number + 1, progress={}, description={})
            step(6 + 2 * number)
            synchronize(device)
            stalls.append(max(0.0, time.perf_counter() - start - quiet_s))
            store.wait()
            totals.append(time.perf_counter() - start)
            ctx.record(stall_s=stalls, until_committed_s=totals)
    host = torch.empty(min(num_bytes, 2**28), dtype=torch.uint8, device=device)
    pinned = torch.empty(host.shape, dtype=torch.uint8, pin_memory=ctx.on_gpu)
    pinned.copy_(host)
    to_host_s = seconds_of(lambda: pinned.copy_(host), device)
    # The first save allocates the memory of the host.
    ctx.record(
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


def measure_start(ctx: Context) -> None:
    """Seconds of the first step in fresh processes: compiled by block, again with a warm cache."""
    start_afresh(ctx.world.device)  # the GPU is needed by other processes now
    found: dict[str, Any] = {}
    runs = {
        "blocks cold": "cache-blocks",
        "blocks warm": "cache-blocks",
        "whole cold": "cache-whole",
    }
    for name, cache in runs.items():
        if ctx.seconds_left() < 10:
            ctx.leave_out(name, "no time left")
            continue
        try:
            found[name] = first_step(ctx, name.split()[0], ctx.work / cache)
        except subprocess.TimeoutExpired:
            ctx.leave_out(name, "not done in the time left")
        ctx.record(first_step_s=found)
    if "blocks warm" in found and "whole cold" in found:
        ctx.record(warm_over_whole=found["blocks warm"]["s"] / found["whole cold"]["s"])


def first_step(ctx: Context, what: str, cache: Path) -> dict[str, float]:
    script = Path(__file__).parents[1] / "gpu_training.py"
    command = [sys.executable, str(script), "--first-step", what]
    command += ["--toy"] if not ctx.on_gpu else []
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    # This process is a rank of its own group: the new one opens another.
    alone = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    start = time.perf_counter()
    done = subprocess.run(
        command,
        env=alone | folders,
        capture_output=True,
        text=True,
        timeout=max(5.0, ctx.seconds_left()),
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result | {"process_s": time.perf_counter() - start}


def run_first_step(ctx: Context, what: str) -> None:
    """In a process of its own: build the bare loop, run one step, print its seconds as JSON."""
    device = ctx.world.device
    task = task_of(ctx, ctx.scale.models[COMPARED], batch=ctx.scale.compared_batch)
    precision = "master" if ctx.on_gpu else "fp32"
    loop = BareLoop(
        task, ctx.world, precision=precision, compiler="inductor", whole=what == "whole"
    )
    pool = random_batches(task, ctx.world, count=1)
    first = seconds_of(lambda: loop.step(0, *pool[0]), device)
    second = seconds_of(lambda: loop.step(1, *pool[0]), device)
    print(json.dumps({"s": first, "second_step_s": second}), flush=True)
