"""The sections of gpu_training that check results: the smoke test, and losses.

Owns: versions; shrunk recipes at every stage and precision; a checkpoint written and restored; that
no step waits for the device; losses, clipping and activation checkpointing against a bare loop.
Leaves out: speed (`speed`), how a recipe is shrunk (`recipes`).
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save_file
from timm import create_model

from benchmarks.training.recipes import CONFIGS, RUN_TYPES, one_of_each, recipes, shrunk
from benchmarks.training.scale import Context
from benchmarks.training.speed import STAGES, engine_loop, gap, staged, stepper, task_of
from benchmarks.training.steps import BareLoop, EngineLoop, Task, random_batches, random_images
from benchmarks.training.timing import no_waits, start_afresh
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run
from vitscale.optim.settings import OptimSettings

# Largest gap to the bare loop's losses, over the first loss.
TOLERANCES = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
CLIP_NORM = 0.05
PRECISIONS = ("bf16", "fp32", "fp16")
BATCH = 4
NUM_CLASSES = 10
TEACHER = "test_efficientnet"  # timm's smallest
# Lengths and the machine; all options that a step depends on stay as they are.
SHORT = (
    *("schedule.epochs=null", "schedule.steps=100", "schedule.warmup_epochs=0"),
    *("schedule.warmup_steps=1", f"data.global_batch={BATCH}", "engine.num_threads=null"),
    *(f"engine.max_micro_batch={BATCH}", "engine.compile=false", "schedule.resolutions=null"),
)
PACKAGES = ("torch", "deepspeed", "timm", "torchvision", "triton", "numpy", "pyarrow", "pydantic")


def check_smoke(ctx: Context) -> None:
    record_versions(ctx)
    check_waits(ctx)
    check_checkpoint(ctx)
    check_recipes(ctx)


def record_versions(ctx: Context) -> None:
    found = {"python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if ctx.on_gpu:
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["gpu"] = torch.cuda.get_device_name(ctx.world.device)
    ctx.record(versions=found)


def check_waits(ctx: Context) -> None:
    """Steps of every stage, and with mixing, that must not wait for the device."""
    trained, places = ctx.scale.checked, {}
    if not ctx.on_gpu:
        ctx.leave_out("waits", "for GPUs only; the tests count calls")
    kinds: dict[str, tuple[int, tuple[str, ...]]] = {
        **{f"zero {stage}": (stage, ()) for stage in STAGES},
        "mixing": (1, ("data.mixing.mixup_alpha=0.2", "data.mixing.mode=pair")),
    }
    num = max(2, ctx.scale.waiting_steps // len(kinds))
    for name, (stage, overrides) in kinds.items():
        ctx.check_time(f"steps of {name}")
        task = task_of(ctx, trained, overrides=overrides)
        loop = EngineLoop(staged(task, stage, compile=False), ctx.world)
        images, labels = random_images(loop.arch, task.batch, device=ctx.world.device)
        for number in range(2):
            loop.step(number, images, labels)
        try:
            with no_waits(ctx.world.device, bounds_memory=stage == 3):
                for number in range(2, 2 + num):
                    loop.step(number, images, labels)
        except RuntimeError as error:
            places[name] = str(error)[:500]
            ctx.expect(False, f"{name}: a step waits for the device: {places[name]}")
        loop.close()
    if ctx.on_gpu:
        ctx.record(waits=len(places), waiting=places, steps_without_waits=num * len(kinds))


def check_checkpoint(ctx: Context) -> None:
    """State saved, read and restored into an engine of another stage is the same to the bit."""
    from vitscale.checkpoint.store import CheckpointStore
    from vitscale.training.resume import restore_engine

    ctx.check_time("the checkpoint")
    task = task_of(ctx, ctx.scale.checked)
    images, labels = random_images(task.arch, task.batch, device=ctx.world.device)
    first, second = (EngineLoop(staged(task, stage, compile=False), ctx.world) for stage in (1, 2))
    first.step(0, images, labels)
    progress = {
        "optimizer_steps": first.engine.optimizer_steps(),
        "engine": first.engine.export_counters(),
    }
    with CheckpointStore(ctx.work / "smoke", keep=1, world=ctx.world) as store:
        store.save(
            first.engine.export_state(),
            step=1,
            progress=progress,
            description={"grid": task.arch.grid},
        )
        store.wait()
        found, complaints = store.newest()
    assert found is not None, complaints
    restore_engine(second.engine, task.arch, found)
    ours, theirs = (loop.engine.export_state() for loop in (first, second))
    different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
    ctx.record(checkpoint_tensors=len(ours), checkpoint_different=different[:5])
    ctx.expect(not different, f"a checkpoint changes {len(different)} tensors")
    losses = [float(loop.step(1, images, labels)) for loop in (first, second)]
    ctx.expect(losses[0] == losses[1], f"restored, a step has another loss: {losses}")


def check_recipes(ctx: Context) -> None:
    """One recipe of each kind in its own stage and precision first, then in every other."""
    done: dict[str, float] = {}
    own, others = [], []
    for name in one_of_each():
        run = recipes()[name]
        precision = "bf16" if ctx.on_gpu or run.engine.precision != "auto" else "fp32"
        for kind in combinations(ctx):
            (own if kind == (run.engine.zero_stage, precision) else others).append((name, *kind))
    num_left = 0
    for name, stage, precision in own + others:
        what = f"{name} zero {stage} {precision}"
        if ctx.seconds_left() < 0:
            num_left += 1
            continue
        try:
            done[what] = two_steps(ctx, name, stage=stage, precision=precision)
        except UserError as error:
            # Refused, such as LAMB above stage 0.
            ctx.leave_out(what, str(error)[:200])
            is_own = (name, stage, precision) in own
            ctx.expect(not is_own, f"{what}: {error}"[:500])
        except Exception as error:  # the other recipes must run
            ctx.expect(False, f"{what}: {type(error).__name__}: {error}"[:500])
        else:
            ctx.expect(math.isfinite(done[what]), f"{what}: loss {done[what]}")
    ctx.record(steps_taken=len(done), steps_left=num_left, losses=done)


def combinations(ctx: Context) -> Iterator[tuple[int, str]]:
    for precision in PRECISIONS:
        for stage in STAGES:
            if precision != "fp16" or (ctx.on_gpu and stage > 0):
                yield stage, precision


def two_steps(ctx: Context, name: str, *, stage: int, precision: str) -> float:
    """The loss of the second step of a shrunk recipe."""
    run = recipes()[name]
    overrides = [*SHORT, *shrunk(run), f"engine.zero_stage={stage}"]
    if run.objective.name == "distillation":
        overrides += random_teacher(ctx)
    # The settings refuse bf16 on a CPU that is asked for, not on one that is found.
    overrides += ["engine.device=auto", f"engine.precision={precision}"]
    if run.make_objective().trains_classifier:
        overrides.append(f"model.num_classes={NUM_CLASSES}")
    path = CONFIGS / f"{name}.yaml"
    loaded = load_run(RUN_TYPES, path, overrides=overrides, with_site=False).run
    loop = EngineLoop(loaded, ctx.world)
    images, labels = random_images(loop.arch, loop.plan.micro_batch, device=ctx.world.device)
    loss = [float(loop.step(number, images, labels)) for number in range(2)][-1]
    loop.close()
    return loss


def random_teacher(ctx: Context) -> list[str]:
    """Overrides that give a recipe a small teacher with random weights."""
    path = ctx.work / "teacher.safetensors"
    if not path.exists():
        save_file(create_model(TEACHER, num_classes=NUM_CLASSES).state_dict(), path)
    return [f"objective.teacher.model={TEACHER}", f"objective.teacher.weights={path}"]


def check_losses(ctx: Context) -> None:
    """The first losses of every stage, in fp32, bf16 and fp16, against the bare loop's."""
    start_afresh(ctx.world.device)
    task = task_of(ctx, ctx.scale.checked)
    check_clipping(ctx, task)
    check_activation_checkpointing(ctx, task)
    found: dict[str, float] = {}
    for precision in ("fp32", "bf16", "fp16") if ctx.on_gpu else ("fp32",):
        kinds = ["fp32"] if precision == "fp32" else ["autocast", "master"]
        bare = {
            kind: run_losses(ctx, BareLoop(task, ctx.world, precision=kind), task) for kind in kinds
        }
        ctx.record(**{f"bare_losses_{kind}": [v[0], v[-1]] for kind, v in bare.items()})
        fell = all(values[-1] < values[0] for values in bare.values())
        ctx.expect(fell, f"{precision}: the loss does not fall")
        compiled = [(1, True)] if ctx.on_gpu else []
        for stage, is_compiled in [(stage, False) for stage in STAGES] + compiled:
            if precision == "fp16" and stage == 0:
                continue  # not offered
            name = f"{precision} zero {stage}{' compiled' if is_compiled else ''}"
            if ctx.seconds_left() < 0:
                ctx.leave_out(name, "no time left")
                continue
            kind = precision if precision == "fp32" else ("master" if stage else "autocast")
            compare_losses(ctx, name, task, stage, precision, is_compiled, bare[kind], found)


def compare_losses(
    ctx: Context,
    name: str,
    task: Task,
    stage: int,
    precision: str,
    compiled: bool,
    bare: list[float],
    found: dict[str, float],
) -> None:
    """Record one kind of engine; an error in it must not end the others."""
    try:
        loop = engine_loop(ctx, task, stage=stage, precision=precision, compile=compiled)
        losses = run_losses(ctx, loop, task)
    except Exception as error:
        ctx.expect(False, f"{name}: {type(error).__name__}: {error}"[:2000])
        return
    if precision == "fp16":
        # Its loss scale may skip the first updates, so only the fall is compared.
        ctx.expect(losses[-1] < losses[0], f"{name}: the loss does not fall")
        return
    found[name] = gap(losses, bare)
    ctx.record(loss_gaps=found, num_losses=len(losses))
    what = f"{name}: losses differ by {found[name]:.2e} of the first one from the bare loop's"
    ctx.expect(found[name] < TOLERANCES[precision], what)


def run_losses(ctx: Context, loop: Any, task: Task, *, steps: int | None = None) -> list[float]:
    losses: list[torch.Tensor] = []
    step = stepper(loop, random_batches(task, ctx.world), losses)
    for number in range(steps or ctx.scale.compared_steps):
        step(number)
    return [float(loss) for loss in losses]


def check_clipping(ctx: Context, task: Task) -> None:
    """SGD's first update is the learning rate times the clipped gradient, so its norm is known."""
    found = {}
    optim = OptimSettings(name="sgd", lr=1.0, clip_norm=CLIP_NORM)
    task = replace(task, run=task.run.model_copy(update={"optim": optim}))
    for stage in (0, 1):
        ctx.check_time("clipping")
        loop = engine_loop(ctx, task, stage=stage, compile=False)
        before = {key: value.clone() for key, value in loop.engine.export_state().items()}
        images, labels = random_batches(task, ctx.world, count=1)[0]
        loop.step(0, images, labels)
        after, norm = loop.engine.export_state(), loop.engine.gradient_norm()
        moved = sum(
            float((after[key].double() - before[key].double()).square().sum())
            for key in after
            if key.startswith("model.")
        )
        share = moved**0.5 / (task.rate(0) * CLIP_NORM)
        found[f"zero {stage}"] = {"gradient_norm": norm, "update_over_allowed": share}
        ctx.record(clipping=found)
        ctx.expect(norm > CLIP_NORM, f"zero {stage}: a norm of {norm} leaves nothing to clip")
        ctx.expect(abs(share - 1) < 0.02, f"zero {stage}: update is {share:.3f} of what clips to")


def check_activation_checkpointing(ctx: Context, task: Task) -> None:
    device, losses, peaks = ctx.world.device, {}, {}
    for on in (False, True):
        ctx.check_time("activation checkpointing")
        start_afresh(device)
        loop = engine_loop(ctx, task, precision="fp32", compile=False, activation_checkpointing=on)
        losses[on] = run_losses(ctx, loop, task, steps=5)
        if ctx.on_gpu:
            peaks[on] = torch.cuda.max_memory_allocated(device)
    apart = gap(losses[True], losses[False])
    ctx.record(activation_checkpointing_gap=apart)
    ctx.expect(apart < 1e-4, f"activation checkpointing changes losses by {apart:.2e}")
    if peaks:
        ctx.record(activation_checkpointing_memory=peaks[True] / peaks[False])
        ctx.expect(peaks[True] < peaks[False], "activation checkpointing saves no memory")
