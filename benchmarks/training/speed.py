"""The sections of gpu_training that time the engine: rates, models, overhead, profile.

Owns: the rates of the GPU, compiling, whole-engine speed and memory of each model, the engine's
overhead by ZeRO stage, and a step profile.
Leaves out: correctness (`checks`), rivals, recipes and variants (`rows`), data and
checkpoints (`data`), the loops themselves (`steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.training.recipes import CONFIGS
from benchmarks.training.scale import PLAIN, Context, Trained
from benchmarks.training.steps import BareLoop, EngineLoop, Task, random_batches
from benchmarks.training.timing import (
    card_state,
    copy_rates,
    drift,
    falls,
    interleaved,
    matmul_rate,
    ratio,
    seconds_of,
    shape_rates,
    start_afresh,
    utilisation,
    warm_up,
)
from pretrain.run import PretrainRun
from vitscale.config.loader import load_run
from vitscale.models.costs import memory_estimate, train_flops_per_image

COMPARED = "L16"
STAGES = (0, 1, 2, 3)


def task_of(
    ctx: Context,
    trained: Trained,
    *,
    batch: int | None = None,
    overrides: tuple[str, ...] = (),
) -> Task:
    """Raises UserErrors for overrides that the run does not know."""
    batch = batch or trained.batch
    sizes = (f"data.global_batch={batch}", f"engine.max_micro_batch={batch}")
    given = (*PLAIN, f"engine.precision={ctx.scale.precision}", *trained.overrides, *sizes)
    path = CONFIGS / f"{trained.config}.yaml"
    return Task(
        run=load_run(PretrainRun, path, overrides=[*given, *overrides], with_site=False).run
    )


def staged(task: Task, stage: int, **engine: Any) -> PretrainRun:
    """The run of a task at another ZeRO stage. Stage 3 is never compiled."""
    settings = task.run.engine.model_copy(update={"zero_stage": stage, **engine})
    return task.run.model_copy(update={"engine": settings})


def engine_loop(ctx: Context, task: Task, *, stage: int = 1, **engine: Any) -> EngineLoop:
    return EngineLoop(staged(task, stage, **engine), ctx.world, model=task.initial())


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
    """The large product, the products and the attention of each model, copies."""
    device, scale = ctx.world.device, ctx.scale
    first = matmul_rate(device, side=scale.matmul_side)
    ctx.record(matmul={"before": first}, card=card_state())
    ctx.record(copy_bytes_per_s=copy_rates(device, mib=scale.copy_mib))
    products: dict[str, Any] = {}
    for name, trained in scale.models.items():
        task = task_of(ctx, trained)
        found = shape_rates(
            task.arch,
            batch=task.batch,
            device=device,
            seconds=scale.shape_seconds,
            deadline=ctx.deadline,
        )
        products[name] = found | {"attention": attention_rate(ctx, task)}
        ctx.record(products_flops=products)
    ctx.record(matmul=drift(first, matmul_rate(device, side=scale.matmul_side)))


def attention_rate(ctx: Context, task: Task) -> float:
    """FLOP/s of attention, forward and backward, with torch's choice of kernel."""
    arch, device = task.arch, ctx.world.device
    heads, width = arch.num_heads, arch.attention_width // arch.num_heads
    shape = (task.batch, heads, arch.num_train_tokens, width)
    dtype = torch.bfloat16 if ctx.on_gpu else torch.float32
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")

    def once() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    seconds_of(lambda: [once() for _ in range(3)], device)
    seconds = min(seconds_of(once, device) for _ in range(5))
    # Two products forward, four backward (recomputation is not counted).
    return 6 * 2 * task.batch * heads * arch.num_train_tokens**2 * width / seconds


def measure_compiling(ctx: Context) -> None:
    """The first step in a fresh process; fills the cache for the sections after this one.

    The section's own model first, then the one that most sections compare with.
    """
    name, scale, device = ctx.section.removeprefix("compile_"), ctx.scale, ctx.world.device
    found: dict[str, float] = {}
    kinds = [(each, scale.models[each].batch) for each in dict.fromkeys((name, COMPARED))]
    for each, batch in [*kinds, (COMPARED, scale.compared_batch)]:
        ctx.check_time(f"{each} at batch {batch}")
        task = task_of(ctx, scale.models[each], batch=batch)
        loop = engine_loop(ctx, task)
        step = stepper(loop, random_batches(task, ctx.world, count=1), [])
        found[f"{each} batch {batch}"], _ = warm_up(step, steps=2, device=device)
        ctx.record(first_step_s=found)
        loop.close()
        start_afresh(device)


def measure_model(ctx: Context) -> None:
    """The whole engine at ZeRO 1: FLOP/s, memory, and whether the loss falls."""
    trained, device, scale = ctx.scale.models[ctx.section], ctx.world.device, ctx.scale
    task = task_of(ctx, trained)
    products = shape_rates(task.arch, batch=task.batch, device=device, seconds=scale.shape_seconds)
    ctx.record(batch=task.batch, products_flops=products)
    start_afresh(device)
    losses: list[torch.Tensor] = []
    loop = engine_loop(ctx, task)
    step = stepper(loop, random_batches(task, ctx.world), losses)
    first_s, first_loss = warm_up(step, steps=scale.warmup, device=device, deadline=ctx.deadline)
    ctx.record(first_step_s=first_s, wrapper=loop.wrapper, memory=memory_of(ctx, task))
    ctx.check_time("timed steps")
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
    rate = task.batch / seconds
    used = utilisation(
        images_per_s=rate,
        flops_per_image=train_flops_per_image(task.arch),
        rate=matmul["rate"],
        device=device,
    )
    of_products = (used["model_tflops"] or 0.0) * 1e12 / products["all"]
    ctx.record(images_per_s=rate, step_s=seconds, block_s=blocks, **used, of_products=of_products)
    values = [float(loss) for loss in losses]
    ctx.record(losses=values)
    ctx.expect(falls(values, first_loss), "the loss does not fall")


def memory_of(ctx: Context, task: Task, *, stage: int = 1) -> dict[str, float] | None:
    """Peak of the allocator against the estimate of a dry run, GiB; None on a CPU."""
    if not ctx.on_gpu:
        return None
    objective = task.run.make_objective()
    estimate = memory_estimate(
        task.arch,
        zero_stage=stage,
        world_size=1,
        precision=ctx.scale.precision,
        micro_batch=task.batch,
        accumulation=task.plan.accumulation,
        reduces_in_fp32=task.run.engine.reduce_precision == "fp32",
        bucket_elements=task.run.engine.reduce_bucket_elements,
        activation_checkpointing=task.run.engine.activation_checkpointing,
        optimizer_bytes=task.run.optim.state_bytes_per_parameter,
        costs=objective,
        frozen_bytes=objective.frozen_bytes(),
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
    wrappers: dict[str, str] = {}
    warm = max(2, int(scale.warmup * share))
    for name, build in loops.items():
        # A quarter of the time is for the blocks.
        if ctx.seconds_left() < 0.25 * ctx.section_seconds:
            ctx.leave_out(name, "no time left")
            continue
        try:
            losses[name], loop = [], build()
            step = stepper(loop, pool, losses[name])
            first_s[name], _ = warm_up(step, steps=warm, device=device, deadline=ctx.deadline)
        except Exception as error:  # one failing loop must not end the others
            ctx.expect(False, f"{name}: {type(error).__name__}: {error}"[:2000])
            continue
        steps[name] = step
        wrappers[name] = getattr(loop, "wrapper", type(loop).__name__)
        ctx.record(first_step_s=first_s, wrappers=wrappers, batch=task.batch)
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


def bare_loops(ctx: Context, task: Task) -> tuple[dict[int, str], dict[str, Callable[[], Any]]]:
    """The bare loop of the same precision of each stage, and how to build each."""
    exact = ctx.scale.precision == "fp32"
    same = {
        stage: "bare fp32" if exact else ("bare master" if stage else "bare autocast")
        for stage in STAGES
    }
    compiler = "inductor" if ctx.on_gpu else None

    def build(name: str) -> BareLoop:
        return BareLoop(task, ctx.world, precision=name.split()[1], compiler=compiler)

    return same, {name: lambda name=name: build(name) for name in dict.fromkeys(same.values())}


def measure_tax(ctx: Context) -> None:
    """The engine at every stage over the bare loop of the same precision, one rank.

    One rank does not communicate: this is the cost of hooks, copies and checks.
    """
    start_afresh(ctx.world.device)
    task = task_of(ctx, ctx.scale.models[COMPARED], batch=ctx.scale.compared_batch)
    same, loops = bare_loops(ctx, task)
    order = (1, 0, 2, 3)
    loops = {same[1]: loops[same[1]]} | loops
    for stage in order:
        loops[f"zero {stage}"] = lambda stage=stage: engine_loop(ctx, task, stage=stage)
    blocks, losses = compare(ctx, loops, task, share=0.6)
    speed, gaps, steps = {}, {}, ctx.scale.compared_steps
    for name in blocks:
        if name.startswith("bare"):
            continue
        bare = same[int(name[-1])]
        if bare in blocks:
            # Throughput of the engine over that of the bare loop: seconds the other way round.
            speed[name] = ratio(blocks[bare], blocks[name]) | {"beside": bare}
            gaps[name] = gap(losses[name][:steps], losses[bare][:steps])
            what = f"{name}: losses are {gaps[name]:.3f} of the first one off {bare}"
            ctx.expect(gaps[name] < 0.05, what)
    ctx.record(speed_over_bare=speed, loss_gaps=gaps)


def gap(ours: list[float], theirs: list[float]) -> float:
    """Largest difference of two runs' losses, over the first loss; NaN counts as infinite.

    Not over each loss: near zero, harmless differences would be large.
    """
    gaps = [abs(a - b) / abs(theirs[0]) for a, b in zip(ours, theirs, strict=False)]
    return max((each if each == each else 1e9 for each in gaps), default=1e9)


def measure_profile(ctx: Context) -> None:
    """The kernels of a step of the first model by time; table in OUT/profile.txt."""
    from torch.profiler import ProfilerActivity, profile

    device, steps = ctx.world.device, ctx.scale.profile_steps
    start_afresh(device)
    task = task_of(ctx, ctx.scale.models[COMPARED])
    step = stepper(engine_loop(ctx, task), random_batches(task, ctx.world), [])
    warm_up(step, steps=10, device=device, deadline=ctx.deadline)
    activities = [ProfilerActivity.CPU]
    if ctx.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        seconds_of(lambda: [step(10 + number) for number in range(steps)], device)
    wall_s = seconds_of(lambda: [step(20 + number) for number in range(steps)], device) / steps
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        if ctx.on_gpu and str(event.device_type).rpartition(".")[2] != "CUDA":
            continue  # a launch on the CPU, whose kernel has a row of its own
        if getattr(event, "is_user_annotation", False):
            continue  # spans other rows
        spent = event.self_device_time_total if ctx.on_gpu else event.self_cpu_time_total
        times[event.key] = times.get(event.key, 0.0) + spent / 1e6 / steps
    top = dict(sorted(times.items(), key=lambda item: -item[1])[:40])
    busy = sum(times.values())
    ctx.record(step_s=wall_s, kernels_s=busy, idle_share=1 - busy / wall_s, top_kernels_s=top)
    lines = [f"{1000 * s:9.3f} ms {100 * s / wall_s:5.1f} %  {key}" for key, s in top.items()]
    (ctx.out / "profile.txt").write_text("\n".join(lines) + "\n")
