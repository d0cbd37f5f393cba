"""The sections of gpu_training that time training steps.

Owns: the rates of the GPU, whole-engine speed and memory of each model, the engine's overhead by
ZeRO stage, timm for comparison, the first step of a fresh process, variants, and a step profile.
Leaves out: correctness, data and checkpoints (`checks`), the loops themselves (`steps`).
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.training.scale import Context, Trained
from benchmarks.training.steps import BareLoop, EngineLoop, Task, TimmLoop, random_batches
from benchmarks.training.timing import (
    card_state,
    copy_rates,
    drift,
    falls,
    interleaved,
    matmul_rate,
    ratio,
    seconds_of,
    shape_rate,
    utilisation,
    warm_up,
)
from vitscale.engine.settings import EngineSettings
from vitscale.models.costs import memory_estimate, train_flops_per_image
from vitscale.models.vit.settings import ViTSettings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COMPARED = "L16"


def start_afresh(device: torch.device) -> None:
    """Free the memory of the previous section, and its compiled code.

    torch keeps at most eight compiled variants per function: without this, the last models would
    run uncompiled. Toy models are all alike.
    """
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def task_of(trained: Trained, *, batch: int | None = None) -> Task:
    return Task(model=ViTSettings(**trained.model), batch=batch or trained.batch)


def engine_loop(
    ctx: Context, task: Task, *, stage: int = 1, compiled: bool = True, **settings: Any
) -> EngineLoop:
    """Compiled, except ZeRO 3: torch would recompile its hooks inside the blocks at each step."""
    compiled = compiled and stage < 3
    return EngineLoop(
        task,
        ctx.world,
        settings=EngineSettings(zero_stage=stage, **settings),
        dtype=DTYPES[ctx.scale.precision],
        compiler=ctx.scale.compiler if compiled else None,
    )


def stepper(loop: Any, pool: list[Any], losses: list[torch.Tensor]) -> Callable[[int], Any]:
    """Steps over the batches of the pool in turn; keeps the losses on the device."""

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = loop.step(number, *pool[number % len(pool)])
        losses.append(loss)
        return loss

    return step


@contextmanager
def steady_rate(ctx: Context) -> Iterator[dict[str, Any]]:
    """Measure the matrix product before and after the block; both into the dict, then recorded."""
    side, device = ctx.scale.matmul_side, ctx.world.device
    found: dict[str, Any] = {"before": matmul_rate(device, side=side)}
    yield found
    found |= drift(found["before"], matmul_rate(device, side=side))
    ctx.record(matmul=found, card=card_state())


def measure_rates(ctx: Context) -> None:
    device, scale = ctx.world.device, ctx.scale
    first = matmul_rate(device, side=scale.matmul_side)
    ctx.record(copy_bytes_per_s=copy_rates(device, mib=scale.copy_mib))
    ctx.record(matmul=drift(first, matmul_rate(device, side=scale.matmul_side)))


def measure_model(ctx: Context) -> None:
    """The whole engine at ZeRO 1: FLOP/s, memory, and whether the loss falls."""
    trained, device, scale = ctx.scale.models[ctx.section], ctx.world.device, ctx.scale
    task = task_of(trained)
    products = shape_rate(task.arch, batch=task.batch, device=device, seconds=scale.shape_seconds)
    ctx.record(batch=task.batch, products_flops=products)
    start_afresh(device)
    losses: list[torch.Tensor] = []
    step = stepper(engine_loop(ctx, task), random_batches(task, ctx.world), losses)
    compile_s, first_loss = warm_up(step, steps=scale.warmup, device=device)
    ctx.record(first_step_s=compile_s, memory=memory_of(ctx, task))
    with steady_rate(ctx) as matmul:
        blocks = interleaved(
            {"engine": step},
            blocks=scale.blocks,
            steps_per_block=max(1, scale.timed // scale.blocks),
            device=device,
            start=scale.warmup,
            deadline=ctx.deadline,
        )["engine"]
    seconds = median(blocks)
    used = utilisation(
        images_per_s=task.batch / seconds,
        flops_per_image=train_flops_per_image(task.arch),
        rate=matmul["rate"],
        device=device,
    )
    values = [float(loss) for loss in losses]
    ctx.record(
        images_per_s=task.batch / seconds,
        step_s=seconds,
        block_s=blocks,
        **used,
        of_products=(used["model_tflops"] or 0.0) * 1e12 / products,
        goal=trained.goal,
        stretch_goal=trained.stretch_goal,
        losses=values,
    )
    ctx.expect(falls(values, first_loss), "the loss does not fall")


def memory_of(ctx: Context, task: Task, *, stage: int = 1) -> dict[str, float] | None:
    """Peak of the allocator against the estimate of a dry run, GiB; None on a CPU."""
    if ctx.world.device.type != "cuda":
        return None
    estimate = memory_estimate(
        task.arch,
        zero_stage=stage,
        world_size=1,
        precision=ctx.scale.precision,
        micro_batch=task.batch,
        activation_checkpointing=False,
        optimizer_bytes=task.optim.state_bytes_per_parameter,
    )
    peak = torch.cuda.max_memory_allocated(ctx.world.device)
    return {
        "peak_gib": peak / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(ctx.world.device) / 2**30,
        "estimate_gib": estimate.total / 2**30,
        "estimated_activations_gib": estimate.activations / 2**30,
        "peak_over_estimate": peak / estimate.total,
    }


def compare(
    ctx: Context, loops: Mapping[str, Callable[[], Any]], task: Task, *, share: float = 1.0
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Build the loops and run them in turn. Seconds per step by block, and all losses.

    One that fails is recorded and skipped.
    """
    device, scale = ctx.world.device, ctx.scale
    pool = random_batches(task, ctx.world)
    losses: dict[str, list[torch.Tensor]] = {}
    steps: dict[str, Any] = {}
    first_s: dict[str, float] = {}
    failed: dict[str, str] = {}
    warm = max(2, int(scale.warmup * share))
    for name, build in loops.items():
        if ctx.seconds_left() < 0:
            failed[name] = "no time left"
            continue
        try:
            losses[name] = []
            step = stepper(build(), pool, losses[name])
            first_s[name], _ = warm_up(step, steps=warm, device=device)
        except Exception as error:  # one failing loop must not end the others
            failed[name] = f"{type(error).__name__}: {error}"[:2000]
            ctx.expect(False, f"{name}: {failed[name]}")
            continue
        steps[name] = step
    ctx.record(first_step_s=first_s, failed=failed, batch=task.batch)
    blocks = interleaved(
        steps,
        blocks=scale.blocks,
        steps_per_block=max(1, int(scale.timed * share) // scale.blocks),
        device=device,
        start=warm,
        deadline=ctx.deadline,
    )
    ctx.record(
        images_per_s={name: task.batch / median(found) for name, found in blocks.items()},
        block_s=blocks,
    )
    return blocks, {name: [float(loss) for loss in losses[name]] for name in steps}


def measure_tax(ctx: Context) -> None:
    """The engine at every stage over the bare loop of the same precision, one rank.

    One rank does not communicate: this is the cost of hooks, copies and checks.
    """
    start_afresh(ctx.world.device)
    task = task_of(ctx.scale.models[COMPARED], batch=ctx.scale.compared_batch)
    compiler, exact = ctx.scale.compiler, ctx.scale.precision == "fp32"
    same = {
        0: "bare fp32" if exact else "bare autocast",
        1: "bare fp32" if exact else "bare master",
    }
    loops: dict[str, Callable[[], Any]] = {
        name: lambda name=name: BareLoop(
            task, ctx.world, precision=name.split()[1], compiler=compiler
        )
        for name in dict.fromkeys(same.values())
    }
    for stage in (1, 0, 2, 3):
        loops[f"zero {stage}"] = lambda stage=stage: engine_loop(ctx, task, stage=stage)
    blocks, losses = compare(ctx, loops, task, share=0.6)
    speed, worst = {}, {}
    for name in blocks:
        if name.startswith("bare"):
            continue
        bare = same[min(1, int(name[-1]))]
        if bare in blocks:
            # Throughput of the engine over that of the bare loop: seconds the other way round.
            speed[name] = ratio(blocks[bare], blocks[name]) | {"beside": bare}
            worst[name] = apart(losses[name], losses[bare])
            ctx.expect(worst[name] < 0.05, f"{name}: losses are {worst[name]:.3f} off {bare}")
    ctx.record(speed_over_bare=speed, losses_apart=worst, num_losses=len(losses.get("zero 1", [])))


def apart(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference of two runs' losses; NaN counts as infinite."""
    pairs = list(zip(ours, theirs, strict=False))
    gaps = [abs(a - b) / abs(b) if b else abs(a) for a, b in pairs]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=float("inf"))


def measure_timm(ctx: Context) -> None:
    start_afresh(ctx.world.device)
    trained, compiler = ctx.scale.models[COMPARED], ctx.scale.compiler
    task = task_of(trained, batch=ctx.scale.compared_batch)

    def rival(compiler: str | None) -> TimmLoop:
        return TimmLoop(
            trained.timm_name, task, ctx.world, compiler=compiler, sizes=trained.timm_sizes
        )

    loops = {
        "engine": lambda: engine_loop(ctx, task),
        "timm eager": lambda: rival(None),
        "timm compiled": lambda: rival(compiler),
    }
    blocks, losses = compare(ctx, loops, task, share=0.4)
    ctx.record(
        speed_over_timm={
            name: ratio(blocks[name], blocks["engine"])
            for name in blocks
            if name != "engine" and "engine" in blocks
        },
        last_losses={name: values[-1] for name, values in losses.items()},
    )


def measure_start(ctx: Context) -> None:
    """Seconds of the first step in fresh processes: compiled by block, again with a warm cache."""
    start_afresh(ctx.world.device)  # the GPU is needed by other processes now
    found: dict[str, Any] = {}
    toy = ctx.scale.precision == "fp32"
    runs = {
        "blocks cold": "cache-blocks",
        "blocks warm": "cache-blocks",
        "whole cold": "cache-whole",
    }
    for name, cache in runs.items():
        if toy and name != "blocks cold":
            continue
        if ctx.seconds_left() < 15:
            ctx.record(left_out=f"{name}: no time left")
            break
        folder = ctx.work / cache
        found[name] = first_step(name.split()[0], folder, timeout_s=ctx.seconds_left(), toy=toy)
        ctx.record(first_step_s=found)
    if "blocks warm" in found and "whole cold" in found:
        ctx.record(warm_over_whole=found["blocks warm"]["s"] / found["whole cold"]["s"])


def first_step(what: str, cache: Path, *, timeout_s: float, toy: bool) -> dict[str, float]:
    script = Path(__file__).parents[1] / "gpu_training.py"
    command = [sys.executable, str(script), "--first-step", what, *(["--toy"] if toy else [])]
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = subprocess.run(
        command, env=os.environ | folders, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def print_first_step(what: str, trained: Trained, *, batch: int, compiler: str, fp32: bool) -> None:
    """In a process of its own: build the bare loop, run one step, print its seconds as JSON."""
    from vitscale.distributed.world import World

    device = torch.device("cpu" if fp32 else "cuda")
    world = World(rank=0, world_size=1, local_rank=0, local_world_size=1, device=device)
    task = task_of(trained, batch=batch)
    precision = "fp32" if fp32 else "master"
    loop = BareLoop(task, world, precision=precision, compiler=compiler, whole=what == "whole")
    pool = random_batches(task, world, count=1)
    first = seconds_of(lambda: loop.step(0, *pool[0]), device)
    second = seconds_of(lambda: loop.step(1, *pool[0]), device)
    print(json.dumps({"s": first, "second_step_s": second}), flush=True)


def measure_variants(ctx: Context) -> None:
    """Other ways to train the first model, each for a few steps."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device, trained = ctx.world.device, ctx.scale.models[COMPARED]
    base = task_of(trained)
    gap = Trained(model=trained.model | {"pool": "gap"}, batch=base.batch, timm_name="")
    kinds: dict[str, tuple[Task, dict[str, Any], list[SDPBackend]]] = {
        "as it is": (base, {}, []),
        "no compiling": (base, {"compiled": False}, []),
        "half the batch": (task_of(trained, batch=max(1, base.batch // 2)), {}, []),
        "no class token": (task_of(gap), {}, []),
        "activation checkpointing": (base, {"activation_checkpointing": True}, []),
    }
    if device.type == "cuda":
        kinds["cuDNN attention"] = (base, {}, [SDPBackend.CUDNN_ATTENTION])
        kinds["flash attention"] = (base, {}, [SDPBackend.FLASH_ATTENTION])
    found: dict[str, Any] = {}
    for name, (task, options, backends) in kinds.items():
        if ctx.seconds_left() < 10 and device.type == "cuda":
            found[name] = "no time left"
            continue
        start_afresh(device)
        try:
            step = stepper(engine_loop(ctx, task, **options), random_batches(task, ctx.world), [])
            if backends:
                with sdpa_kernel(backends):
                    found[name] = few_steps(step, task, device)
            else:
                found[name] = few_steps(step, task, device)
        except Exception as error:  # a variant that does not work is a finding
            found[name] = f"{type(error).__name__}: {error}"[:500]
        ctx.record(images_per_s=found)


def few_steps(step: Callable[[int], Any], task: Task, device: torch.device) -> float:
    """Images per second of 12 steps after 8."""
    warm_up(step, steps=8, device=device)
    return 12 * task.batch / seconds_of(lambda: [step(8 + n) for n in range(12)], device)


def measure_profile(ctx: Context) -> None:
    """The kernels of a step of the first model by time; table in OUT/profile.txt."""
    from torch.profiler import ProfilerActivity, profile

    device, steps = ctx.world.device, ctx.scale.profile_steps
    start_afresh(device)
    task = task_of(ctx.scale.models[COMPARED])
    step = stepper(engine_loop(ctx, task), random_batches(task, ctx.world), [])
    warm_up(step, steps=10, device=device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        seconds_of(lambda: [step(10 + number) for number in range(steps)], device)
    wall_s = seconds_of(lambda: [step(20 + number) for number in range(steps)], device) / steps
    on_gpu = device.type == "cuda"
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if on_gpu and str(event.device_type).rpartition(".")[2] != "CUDA":
            continue  # a launch on the CPU, whose kernel has a row of its own
        if getattr(event, "is_user_annotation", False):
            continue  # spans other rows
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] = times.get(event.key, 0.0) + spent / 1e6 / steps
    top = dict(sorted(times.items(), key=lambda item: -item[1])[:40])
    busy = sum(times.values())
    ctx.record(step_s=wall_s, kernels_s=busy, idle_share=1 - busy / wall_s, top_kernels_s=top)
    lines = [f"{1000 * s:9.3f} ms {100 * s / wall_s:5.1f} %  {key}" for key, s in top.items()]
    (ctx.out / "profile.txt").write_text("\n".join(lines) + "\n")
