"""Check the engine on several ranks, beside a plain torch loop in one process.

    zero_checks.py [resumes]    (one rank; started by test_golden_curves.py and test_engine.py)

Owns: recipes for small ViTs, the slow loop without DeepSpeed, the same training with the engine,
and CHECKS and RESUMES: those asked for run one after another and print `passed: NAME`. The first
that fails ends the run. test_engine.py runs some of CHECKS in one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from vitscale.checkpoint.store import SLICE
from vitscale.config.errors import UserError
from vitscale.distributed.processes import run_rank_script
from vitscale.distributed.world import World, gather_objects, process_group, sum_over_ranks
from vitscale.engine.engine import Engine, deepspeed_config
from vitscale.engine.settings import EngineSettings
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import (
    build_model,
    checkpoint_activations,
    compile_blocks,
    decayed,
    layers_above,
)
from vitscale.optim.optimizers import build_optimizer, optimizer_groups
from vitscale.optim.settings import EmaSettings, OptimSettings, ScheduleSettings, learning_rate

STEPS, HALF, BATCH, ACCUMULATION, CLIP = 50, 25, 16, 2, 0.5
# Steps whose update is skipped, see `spoiled`.
SKIPPED = (3, 4, 8, 30)
# R3 requires 1e-5 relative between layouts over 50 steps in fp32.
CLOSE = 1e-5
BF16 = torch.bfloat16
EMA = EmaSettings(decay=0.6)
# No size is a multiple of the number of ranks everywhere: slices end inside of tensors.
MODEL = ViTSettings(
    image_size=8, patch_size=4, width=30, depth=2, num_heads=2, mlp_width=44, num_classes=7
)
# Every option of the model that has no randomness of its own.
OPTIONS = {"width": 32, "pool": "gap", "num_registers": 2, "positions": "sincos2d"}
OPTIONS |= {"layer_scale": 0.1, "representation_layer": True, "gelu": "erf", "head_bias": -1.0}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    optim: OptimSettings
    model: ViTSettings = MODEL
    decay: str = "cosine"
    frozen: str | None = None
    """Start of the names of parameters that are not trained."""

    def rate(self, step: int) -> float:
        schedule = ScheduleSettings(decay=self.decay)
        return learning_rate(step, schedule, peak=1e-3, warmup_steps=5, total_steps=STEPS)


LAYERS = OptimSettings(
    lr=1e-3, weight_decay=1e-4, weight_decay_mode="independent", layer_decay=0.75
)
RECIPES = {
    "adamw": Recipe(optim=OptimSettings(lr=1e-3, weight_decay=0.1, ema=EMA)),
    "sgd": Recipe(optim=OptimSettings(name="sgd", lr=1e-3)),
    "lamb": Recipe(optim=OptimSettings(name="lamb", lr=1e-3, weight_decay=0.05), decay="constant"),
    "bf16 momentum": Recipe(
        optim=OptimSettings(lr=1e-3, weight_decay=0.1, ema=EMA, momentum_dtype="bf16")
    ),
    "layered": Recipe(optim=LAYERS, model=MODEL.model_copy(update=OPTIONS), decay="linear"),
}
ADAMW = RECIPES["adamw"]
FROZEN = Recipe(optim=OptimSettings(lr=1e-3, weight_decay=0.1), frozen="blocks.0.")
# The head works between -8 and -16, where bf16 has steps of 0.0625.
FAR_HEAD = replace(ADAMW, model=MODEL.model_copy(update={"head_bias": -10.0}))


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The second half sees the batches of the first again: lost state would change the losses."""
    random = torch.Generator().manual_seed(step % HALF)
    images = torch.randint(0, 256, (BATCH, 3, 8, 8), generator=random, dtype=torch.uint8)
    return images, torch.randint(0, 7, (BATCH,), generator=random)


def new_model(recipe: Recipe) -> torch.nn.Module:
    vit = build_model(recipe.model.resolved(num_classes=7), seed=0)
    head = vit.head[-1] if recipe.model.representation_layer else vit.head
    torch.nn.init.normal_(head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    for name, parameter in vit.named_parameters():
        if recipe.frozen is not None and name.startswith(recipe.frozen):
            parameter.requires_grad_(False)
    return vit


def new_optimizer(vit: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    arch = recipe.model.resolved(num_classes=7)
    groups = optimizer_groups(
        vit.named_parameters(),
        settings=recipe.optim,
        decayed=decayed,
        layers_above=lambda name: layers_above(name, arch),
    )
    return build_optimizer(groups, settings=recipe.optim)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """One process, no DeepSpeed: the slow, independent version."""

    losses: list[float]
    norms: list[float]
    averages: list[dict[str, torch.Tensor]]
    """Averages of the weights, after each step."""
    logits: torch.Tensor
    """Logits of the average after the first half, on the images of step 0."""
    features: torch.Tensor
    """Features of the same."""


@cache
def train_plain(recipe: Recipe) -> Plain:
    vit = new_model(recipe)
    optimizer, named = new_optimizer(vit, recipe), dict(vit.named_parameters())
    average = {name: value.detach().clone() for name, value in named.items()}
    losses, norms, averages = [], [], []
    for step in range(STEPS):
        images, labels = data(step)
        loss = torch.nn.functional.cross_entropy(vit(normalized(images)), labels)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(vit.parameters(), CLIP).item())
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step) * group["lr_scale"]
        if step not in SKIPPED:
            optimizer.step()
        kept = min(0.6, (2 + step) / (11 + step))
        average = {k: kept * average[k] + (1 - kept) * value.detach() for k, value in named.items()}
        averages.append(average)
        losses.append(loss.item())
    with torch.no_grad():
        vit.load_state_dict(averages[HALF - 1], strict=False)
        pixels = normalized(data(0)[0])
        features = vit.forward_head(vit.forward_features(pixels), pre_logits=True)
        return Plain(
            losses=losses, norms=norms, averages=averages, logits=vit(pixels), features=features
        )


def normalized(images: torch.Tensor) -> torch.Tensor:
    return (images.float() / 255 - 0.5) / 0.5


def engine_config(
    world: World,
    *,
    stage: int,
    dtype: torch.dtype = torch.float32,
    raw: dict[str, Any] | None = None,
) -> Any:
    config = deepspeed_config(
        EngineSettings(zero_stage=stage),  # type: ignore[arg-type]  # 0 to 3
        micro_batch=BATCH // ACCUMULATION // world.world_size,
        accumulation=ACCUMULATION,
        world_size=world.world_size,
        largest_parameter=2000,
        clip_norm=CLIP,
        dtype=dtype,
        raw=raw or {},
    )
    # One rank of its own does not get stage 1, which has nothing to shard.
    config["zero_optimization"]["stage"] = stage
    return config


def new_engine(
    world: World,
    *,
    stage: int,
    recipe: Recipe = ADAMW,
    dtype: torch.dtype = torch.float32,
    compiled: bool = False,
    vit: torch.nn.Module | None = None,
    raw: dict[str, Any] | None = None,
) -> Engine:
    vit = vit or new_model(recipe)
    if compiled:
        checkpoint_activations(vit)
        compile_blocks(vit, backend="aot_eager")
    return Engine(
        vit,
        optimizer=new_optimizer(vit, recipe),
        optimizer_name=recipe.optim.name,
        config=engine_config(world, stage=stage, dtype=dtype, raw=raw),
        world=world,
        dtype=dtype,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        ema=recipe.optim.ema,
    )


def spoiled(loss: torch.Tensor, logits: torch.Tensor, step: int, part: int, world: World) -> None:
    """Make the last rank's loss NaN at step 3, rank 0's infinite at 4 and 30, the last rank's
    gradient NaN at 8."""
    is_last = world.rank == world.world_size - 1
    if (step, part) == (3, 0) and is_last:
        loss *= torch.nan
    if (step, part) in ((4, 1), (30, 1)) and world.is_first:
        loss += torch.inf
    if (step, part) == (8, 1) and is_last:
        logits.register_hook(lambda gradient: gradient * torch.nan)


def train(engine: Engine, start: int, stop: int, *, recipe: Recipe = ADAMW) -> list[float]:
    losses, world = [], engine.world
    for step in range(start, stop):
        images, labels = data(step)
        engine.set_learning_rate(recipe.rate(step))
        total = torch.zeros(1)
        for part in range(ACCUMULATION):
            each = BATCH // ACCUMULATION // world.world_size
            first = (part * world.world_size + world.rank) * each
            logits = engine.logits(images[first : first + each])
            loss = torch.nn.functional.cross_entropy(logits.float(), labels[first : first + each])
            total += loss.detach()
            spoiled(loss, logits, step, part, world)
            engine.backward(loss)
            engine.step()
        losses.append(sum_over_ranks(total).item() / ACCUMULATION / world.world_size)
    return losses


def whole_state(engine: Engine) -> dict[str, torch.Tensor]:
    """The tensors of all ranks, put together of their slices."""
    found: dict[str, torch.Tensor] = {}
    for share in gather_objects(engine.export_state()):
        for key, part in share.items():
            if piece := SLICE.fullmatch(key):
                shape = [int(size) for size in piece["shape"].split("x") if size]
                whole = found.setdefault(piece["name"], torch.empty(shape, dtype=part.dtype))
                whole.view(-1)[int(piece["start"]) :][: part.numel()] = part
            else:
                found[key] = part.clone()
    return found


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)


def moved(first: Engine, second: Engine) -> None:
    tensors, asked = whole_state(first), []

    def read(name: str, start: int, count: int) -> torch.Tensor:
        asked.append(count)
        return tensors[name].flatten()[start : start + count]

    second.import_state(read, optimizer_steps=first.optimizer_steps())
    second.import_counters(first.export_counters())
    assert equal(whole_state(second), tensors)
    once = sum(each.numel() for each in tensors.values())
    assert sum(gather_objects(sum(asked))) == once, "the ranks together read every element once"


# --- the checks ----------------------------------------------------------------------------------


def trains_as_plain_torch(
    world: World,
    *,
    source: int,
    target: int,
    name: str = "adamw",
    dtype: torch.dtype = torch.float32,
    rel: float = CLOSE,
) -> None:
    """Half of the steps at one stage, the others at another; the norm is that before clipping."""
    recipe = RECIPES[name]
    plain, engine = train_plain(recipe), new_engine(world, stage=source, recipe=recipe, dtype=dtype)
    losses = train(engine, 0, 4, recipe=recipe)
    before, steps = whole_state(engine), engine.optimizer_steps()
    losses += train(engine, 4, 5, recipe=recipe)
    kept = {k: value for k, value in whole_state(engine).items() if not k.startswith("ema.")}
    assert equal(kept, {k: before[k] for k in kept}) and steps == engine.optimizer_steps()
    assert health(engine) == (2, 2, 5, 1 if world.is_first else None)
    losses += train(engine, 5, HALF, recipe=recipe)
    assert health(engine) == (3, 1, 9, None)
    if recipe.optim.ema is not None:
        uses_the_average(engine, plain, atol=1e-3 if dtype == torch.float32 else 0.1)
    other = new_engine(world, stage=target, recipe=recipe, dtype=dtype)
    moved(engine, other)
    losses += train(other, HALF, STEPS, recipe=recipe)
    assert health(other) == (4, 1, 31, 1 if world.is_first else None)
    if recipe.optim.ema is not None and dtype == torch.float32:
        holds_the_average(whole_state(other), plain.averages[-1])
    assert losses == pytest.approx(plain.losses, rel=rel)
    assert other.gradient_norm() == pytest.approx(plain.norms[-1], rel=max(1e-4, 10 * rel))
    assert max(plain.norms) > CLIP, "clipping has to act"
    assert name != "bf16 momentum" or plain.losses != train_plain(ADAMW).losses


def resumes_on_every_rank(world: World, *, source: int, target: int) -> None:
    """In an engine with other weights: a rank that gets none of the others' goes on with these."""
    engine, vit = new_engine(world, stage=source, recipe=FROZEN), new_model(FROZEN)
    losses = train(engine, 0, 2, recipe=FROZEN)
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.fill_(0.3)
    other = new_engine(world, stage=target, recipe=FROZEN, vit=vit)
    moved(engine, other)
    losses += train(other, 2, 8, recipe=FROZEN)
    assert losses == pytest.approx(train_plain(FROZEN).losses[:8], rel=CLOSE)


def health(engine: Engine) -> tuple[int, int, int | None, int | None]:
    found = engine.health()
    return found.skipped, found.longest, found.last_step, found.bad_micro_step


def holds_the_average(
    state: dict[str, torch.Tensor], average: dict[str, torch.Tensor], *, atol: float = 1e-3
) -> None:
    for name, value in average.items():
        torch.testing.assert_close(state[f"ema.{name}"], value, rtol=0, atol=atol)


def uses_the_average(engine: Engine, plain: Plain, *, atol: float) -> None:
    """The average is that of plain torch; it is used for a while, and leaves no trace."""
    images, state = data(0)[0], whole_state(engine)
    holds_the_average(state, plain.averages[HALF - 1], atol=atol)
    engine.eval()
    with torch.no_grad():
        before, own = engine.logits(images).clone(), engine.forward(images, "features").clone()
        with engine.averaged():
            shown = engine.logits(images).float().clone()
            features = engine.forward(images, "features").float().clone()
        after = engine.logits(images)
    engine.train()
    torch.testing.assert_close(shown, plain.logits, rtol=0, atol=atol)
    torch.testing.assert_close(features, plain.features, rtol=0, atol=atol)
    assert (shown - before).abs().max() > atol and (features - own).abs().max() > atol
    assert torch.equal(before, after) and equal(state, whole_state(engine))


def keeps_the_head_in_fp32(world: World, *, stage: int) -> None:
    """In bf16 training starts from the unrounded weights, and logits are those of fp32 heads."""
    given = {f"model.{name}": each for name, each in new_model(FAR_HEAD).named_parameters()}
    assert max((each - each.bfloat16()).abs().max().item() for each in given.values()) > 1e-4
    engine, images = new_engine(world, stage=stage, recipe=FAR_HEAD, dtype=BF16), data(0)[0]
    started = whole_state(engine)
    assert all(torch.equal(started[name], given[name]) for name in given)
    train(engine, 0, 3, recipe=FAR_HEAD)
    engine.eval()

    def logits() -> torch.Tensor:
        found, features = engine.logits(images), engine.forward(images, "features")
        state = whole_state(engine)  # inside `averaged` the average is in `model`
        wanted = features.float() @ state["model.head.weight"].T + state["model.head.bias"]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        return found

    with torch.no_grad():
        found = logits()
        with engine.averaged():
            logits()
    gaps = found.flatten().sort().values.diff()
    assert -11 < found.mean() < -9 and gaps[gaps > 0].min() < 0.0625 / 32


def compiles_without_graph_breaks(world: World, *, stage: int) -> None:
    """All blocks share their graphs: forward and backward passes in training, and one without."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = new_engine(world, stage=stage, compiled=True)
    losses = train(engine, 0, 6)
    engine.eval()
    with torch.no_grad():
        engine.logits(data(0)[0][:4])
    engine.train()
    losses += train(engine, 6, 8)
    counters = torch._dynamo.utils.counters
    assert losses == pytest.approx(train_plain(ADAMW).losses[:8], rel=CLOSE)
    assert not counters["graph_break"] and 1 <= counters["stats"]["unique_graphs"] <= 4


def sends_gradients_in_the_backward_pass(world: World, *, stage: int, dtype: torch.dtype) -> None:
    """In buckets, once an update, from sums of the micro-batches in fp32."""
    raw: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 2000}}
    raw |= {} if dtype == torch.float32 else {"data_types": {"grad_accum_dtype": "fp32"}}
    engine, sizes = new_engine(world, stage=stage, dtype=dtype, raw=raw), list[int]()
    send = dist.all_reduce

    def recorded(tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # autograd runs
            sizes.append(tensor.numel())
        return send(tensor, *given, **options)

    with patch.object(dist, "all_reduce", recorded):
        losses = train(engine, 0, 3)
    rel = CLOSE if dtype == torch.float32 else 2e-2
    assert losses == pytest.approx(train_plain(ADAMW).losses[:3], rel=rel)
    num_parameters = sum(each.numel() for each in new_model(ADAMW).parameters())
    assert len(sizes) >= 3 * 4 and max(sizes) < num_parameters / 3
    assert sum(sizes) == pytest.approx(3 * num_parameters, rel=0.01)  # with padding


def resumes_the_loss_scale(world: World) -> None:
    """fp16 overflows until its loss scale is low enough; the state is moved before that.

    DeepSpeed refuses fp16 on CPUs without fast kernels for it; slow ones exist.
    """
    get_accelerator().is_fp16_supported = lambda: True
    first, second = (new_engine(world, stage=1, dtype=torch.float16) for _ in range(2))
    train(first, 0, 4)
    moved(first, second)
    assert train(first, 4, 10) == train(second, 4, 10)
    assert first.export_counters() == second.export_counters()
    # It did overflow, the skips are counted, and the scale halved for all but the first.
    skipped = first.health().skipped
    assert skipped >= 2 + len(SKIPPED) and first.loss_scale == 2.0 ** (17 - skipped)


def takes_the_gpu_that_a_task_sees(world: World) -> None:
    """DeepSpeed took the local rank for its number: 1 on the second rank, which has GPU 0 alone."""
    chosen: list[str] = []
    alone = replace(world, device=torch.device("cpu", 0))
    with patch.object(get_accelerator(), "set_device", lambda device: chosen.append(str(device))):
        for stage in (0, 1, 3):
            new_engine(alone, stage=stage).close()
    assert torch.nn.functional.linear is torch._C._nn.linear  # ZeRO 3 had replaced it
    assert chosen == ["0", "0", "0", "cpu"] and os.environ["LOCAL_RANK"] == str(world.rank)


def refuses_other_graphs(world: World, *, stage: int) -> None:
    """Ranks whose losses use other parameters, from the start or later, get no wrong gradients."""
    for first_loss in (True, False):
        engine = new_engine(world, stage=stage)
        images, _ = data(0)
        if not first_loss:
            engine.backward(engine.logits(images[:4]).sum())
            engine.step()
        logits = engine.logits(images[:4])
        loss = logits.sum()
        if not world.is_first:
            loss = engine._engine.module.head.bias.sum()  # no other parameter
        text = "does not use" if not world.is_first or first_loss else None
        if text is None:
            # The others see that this rank is gone.
            dist.barrier()
        else:
            with pytest.raises(UserError, match=text):
                engine.backward(loss)
            if not first_loss:
                dist.barrier()
        engine.close()


STAGES = (0, 1, 2, 3)
# Each stage comes first and second.
MOVES = [("adamw", 0, 3), ("adamw", 3, 1), ("adamw", 1, 2), ("adamw", 2, 0), ("sgd", 1, 3)]
MOVES += [("lamb", 0, 0), ("layered", 1, 3), ("layered", 3, 0)]
CHECKS: dict[str, Callable[[World], None]] = {
    **{
        f"{name}, ZeRO {source} to {target}, equals plain torch": partial(
            trains_as_plain_torch, source=source, target=target, name=name
        )
        for name, source, target in MOVES
    },
    # One bit in fp32 may change how the kept moment rounds.
    "bf16 momentum, ZeRO 1 to 3, equals plain torch": partial(
        trains_as_plain_torch, source=1, target=3, name="bf16 momentum", rel=1e-3
    ),
    # DeepSpeed has other wrappers in bf16 than in fp32.
    **{
        f"ZeRO {stage} in {dtype} sends in the backward pass": partial(
            sends_gradients_in_the_backward_pass, stage=stage, dtype=dtype
        )
        for stage, dtype in ((0, torch.float32), (1, torch.float32), (1, BF16))
    },
    **{
        f"bf16 at ZeRO {stage} keeps fp32 states": partial(
            trains_as_plain_torch, source=stage, target=stage, dtype=BF16, rel=2e-2
        )
        for stage in STAGES
    },
    **{f"head at ZeRO {stage}": partial(keeps_the_head_in_fp32, stage=stage) for stage in STAGES},
    **{
        f"compiled at ZeRO {stage}": partial(compiles_without_graph_breaks, stage=stage)
        for stage in (0, 2)
    },
    **{
        f"other graphs at ZeRO {stage}": partial(refuses_other_graphs, stage=stage)
        for stage in (2, 3)
    },
    "fp16": resumes_the_loss_scale,
    "one GPU": takes_the_gpu_that_a_task_sees,
}

# These are fast.
RESUMES: dict[str, Callable[[World], None]] = {
    f"frozen layers, ZeRO {source} to {target}": partial(
        resumes_on_every_rank, source=source, target=target
    )
    for source, target in ((1, 0), (2, 1), (3, 2), (0, 3))
}


def main() -> None:
    checks = RESUMES if sys.argv[1:] == ["resumes"] else CHECKS
    with process_group(device="cpu", timeout_min=5, num_threads=1) as world:
        for name, check in checks.items():
            check(world)
            print(f"passed: {name}", flush=True)


if __name__ == "__main__":
    run_rank_script(main)
