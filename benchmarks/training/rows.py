"""The sections of gpu_training with rows of a table: timm, recipes, variants.

Owns: timm's training step, the shipped recipes with all their options, changes of one thing, and
attention by kernel.
Leaves out: the plain models (`speed`), which changes there are (`plan`).
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.training.plan import RECIPES, VARIANTS, Recipe, Variant
from benchmarks.training.recipes import CONFIGS
from benchmarks.training.scale import Context
from benchmarks.training.speed import (
    COMPARED,
    compare,
    engine_loop,
    memory_of,
    steady_rate,
    stepper,
    task_of,
)
from benchmarks.training.steps import EngineLoop, Task, TimmLoop, random_batches
from benchmarks.training.timing import (
    interleaved,
    ratio,
    seconds_of,
    start_afresh,
    synchronize,
    warm_up,
)
from pretrain.run import PretrainRun
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run
from vitscale.models.costs import train_flops_per_image

# Seconds that a row needs at least, with its compiling; less are not started.
ROW_S = 12
Warm = tuple[EngineLoop, Callable[[int], Any]]
KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


def measure_timm(ctx: Context) -> None:
    """The engine beside timm's training step, eager and compiled."""
    start_afresh(ctx.world.device)
    trained = ctx.scale.models[COMPARED]
    task = task_of(ctx, trained, batch=ctx.scale.compared_batch)

    def rival(compiler: str | None) -> TimmLoop:
        return TimmLoop(
            trained.timm_name, task, ctx.world, compiler=compiler, sizes=trained.timm_sizes
        )

    loops = {
        "engine": lambda: engine_loop(ctx, task),
        "timm compiled": lambda: rival("inductor" if ctx.on_gpu else "eager"),
        "timm eager": lambda: rival(None),
    }
    blocks, losses = compare(ctx, loops, task, share=0.6)
    ctx.record(
        speed_over_timm={
            name: ratio(blocks[name], blocks["engine"])
            for name in blocks
            if name != "engine" and "engine" in blocks
        },
        last_losses={name: values[-1] for name, values in losses.items()},
    )


def measure_recipes(ctx: Context) -> None:
    """Shipped recipes as they are: dropout, 21,843 classes, their loss, their micro-batch."""
    rows: dict[str, Any] = {}
    with steady_rate(ctx) as matmul:
        for recipe in RECIPES:
            name = " ".join((recipe.config, *recipe.overrides))
            if ctx.seconds_left() < ROW_S and rows:
                ctx.leave_out(name, "no time left")
                continue
            start_afresh(ctx.world.device)
            try:
                rows[name] = measure_recipe(ctx, recipe, rate=matmul["before"])
            except Exception as error:  # the other recipes must run
                ctx.expect(False, f"{name}: {type(error).__name__}: {error}"[:1000])
            ctx.record(rows=rows)


def measure_recipe(ctx: Context, recipe: Recipe, *, rate: float) -> dict[str, Any]:
    path, device = CONFIGS / f"{recipe.config}.yaml", ctx.world.device
    given = [f"engine.precision={ctx.scale.precision}", *ctx.scale.recipe_overrides]
    run = load_run(PretrainRun, path, overrides=[*given, *recipe.overrides], with_site=False).run
    # As on enough ranks that nothing is accumulated.
    data = run.data.model_copy(update={"global_batch": run.engine.max_micro_batch})
    task = Task(run=run.model_copy(update={"data": data}))
    loop = EngineLoop(task.run, ctx.world)
    step = stepper(loop, random_batches(task, ctx.world), [])
    first_s, loss = warm_up(step, steps=ctx.scale.warmup // 2, device=device, deadline=ctx.deadline)
    blocks = interleaved(
        {"recipe": step},
        blocks=3,
        steps_per_block=max(1, ctx.scale.timed // 6),
        device=device,
        start=ctx.scale.warmup,
        deadline=ctx.deadline,
    )["recipe"]
    per_s, memory = task.batch / median(blocks), memory_of(ctx, task)
    loop.close()
    return {
        "micro_batch": task.batch,
        "images_per_s": per_s,
        "of_matmul": per_s * train_flops_per_image(task.arch) / rate,
        "first_step_s": first_s,
        "first_loss": loss,
        "memory": memory,
    }


def measure_variants(ctx: Context) -> None:
    """Each change of one thing, in turn with the model as it is."""
    # Every variant is a further version of the same block.
    torch._dynamo.config.recompile_limit = 64
    rows: dict[str, Any] = {}
    bases: dict[tuple[str, tuple[str, ...]], Warm] = {}
    for variant in VARIANTS:
        name = f"{variant.model} {variant.what}"
        if ctx.seconds_left() < ROW_S and rows:
            ctx.leave_out(name, "no time left")
            continue
        key = (variant.model, variant.base)
        try:
            if key not in bases:
                for loop, _ in bases.values():
                    loop.close()
                bases.clear()
                start_afresh(ctx.world.device)
                bases[key] = warm_loop(ctx, variant, overrides=variant.base)
            rows[name] = measure_variant(ctx, variant, bases[key])
        except UserError as error:
            ctx.leave_out(name, f"no such setting yet: {str(error)[:300]}")
        except Exception as error:  # a variant that does not work is a finding
            ctx.leave_out(name, f"{type(error).__name__}: {error}"[:500])
        ctx.record(rows=rows)


def warm_loop(
    ctx: Context, variant: Variant, *, overrides: tuple[str, ...], share: float = 1.0
) -> Warm:
    """The variant's model with `overrides`, on `share` of its batch, and its steps."""
    trained = ctx.scale.models[variant.model]
    batch = max(1, int(trained.batch * share))
    task = task_of(ctx, trained, batch=batch, overrides=overrides)
    loop = engine_loop(ctx, task)
    step = stepper(loop, random_batches(task, ctx.world), [])
    warm_up(step, steps=8, device=ctx.world.device, deadline=ctx.deadline)
    return loop, step


def measure_variant(ctx: Context, variant: Variant, base: Warm) -> dict[str, Any]:
    device = ctx.world.device
    loop, step = warm_loop(ctx, variant, overrides=variant.overrides, share=variant.batch_share)
    # Closing the variant before this one has discarded the compiled code.
    warm_up(base[1], steps=3, device=device)

    def changed(number: int) -> Any:
        for _ in range(2 * variant.waits):
            synchronize(device)
        return step(number)

    blocks = interleaved(
        {"as it is": base[1], "changed": changed},
        blocks=6,
        steps_per_block=5 if ctx.on_gpu else 1,
        device=device,
        start=8,
        deadline=ctx.deadline,
    )
    loop.close()
    start_afresh(device)
    # Per image, where the batch differs.
    as_it_is = [seconds * variant.batch_share for seconds in blocks["as it is"]]
    speed = ratio(as_it_is, blocks["changed"])
    return {"speed_over_base": speed, "predicted": variant.predicted, "block_s": blocks}


def measure_attention(ctx: Context) -> None:
    """Attention by kernel and number of tokens: seconds of a block, and the error of gradients.

    Kernels are not compared inside the compiled model: torch does not compile anew for another one.
    """
    rows: dict[str, Any] = {}
    dtype = torch.bfloat16 if ctx.on_gpu else torch.float32
    for name in ("L16", "H14"):
        arch = task_of(ctx, ctx.scale.models[name]).arch
        width, batch = arch.attention_width // arch.num_heads, ctx.scale.models[name].batch
        for tokens in (arch.num_train_tokens, arch.num_train_tokens - 1):  # without class token
            shape = (batch, arch.num_heads, tokens, width)
            exact = gradients_of(ctx, (2, *shape[1:]), torch.float32, SDPBackend.MATH)
            for kernel in KERNELS:
                key = f"{name} {tokens} tokens {kernel}"
                ctx.check_time(key)
                try:
                    rows[key] = measure_kernel(ctx, shape, dtype, kernel, exact)
                except RuntimeError as error:
                    ctx.leave_out(key, str(error)[:200])
                ctx.record(rows=rows)


def measure_kernel(
    ctx: Context, shape: tuple[int, ...], dtype: torch.dtype, kernel: str, exact: torch.Tensor
) -> dict[str, float]:
    device, backend = ctx.world.device, getattr(SDPBackend, kernel)
    found = gradients_of(ctx, (2, *shape[1:]), dtype, backend)
    error = float((found.float() - exact).norm() / exact.norm())
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in "qkv")

    def once() -> None:
        with sdpa_kernel([backend]):
            F.scaled_dot_product_attention(q, k, v).backward(torch.ones_like(q))

    seconds_of(lambda: [once() for _ in range(3)], device)
    return {"s": min(seconds_of(once, device) for _ in range(5)), "gradient_error": error}


def gradients_of(
    ctx: Context, shape: tuple[int, ...], dtype: torch.dtype, backend: SDPBackend
) -> torch.Tensor:
    """Gradients of q, k and v, [3, *shape], the same numbers for every kernel."""
    rng = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=rng).bfloat16().to(ctx.world.device) for _ in range(4)]
    q, k, v = (each.to(dtype).requires_grad_() for each in values[:3])
    with sdpa_kernel([backend]):
        F.scaled_dot_product_attention(q, k, v).backward(values[3].to(dtype))
    return torch.stack([q.grad, k.grad, v.grad])  # type: ignore[list-item]  # they have gradients
