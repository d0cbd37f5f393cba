"""The engine on one rank, for every layout in which DeepSpeed keeps weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero import stage3, stage_1_and_2

from vitscale.config.errors import UserError
from vitscale.distributed.world import World, process_group
from vitscale.engine.configuration import deepspeed_config
from vitscale.engine.engine import Engine, ReadPart
from vitscale.engine.layouts import FlatLayout, PartitionedLayout, PlainLayout
from vitscale.engine.probe import check_nan_is_skipped
from vitscale.engine.settings import EngineSettings
from vitscale.optim.settings import EmaSettings

LAYOUTS = {0: PlainLayout, 1: FlatLayout, 3: PartitionedLayout}
MEAN, STD = (0.5, 0.25, 0.75), (0.5, 1.0, 0.25)
EMA = EmaSettings(decay=0.75, warmup=False)
WARM_EMA = EmaSettings(decay=0.3, warmup=True)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    before = dict(os.environ)
    with process_group(device="cpu", timeout_min=1, num_threads=1) as joined:
        yield joined
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(params=LAYOUTS)
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class Model(torch.nn.Module):
    """Two layers; features are the input of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)
        random = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, generator=random)

    def forward(self, images: torch.Tensor, *, output: str = "logits") -> torch.Tensor:
        hidden = self.trunk(images.mean(dim=(2, 3)))
        return hidden if output == "features" else self.head(hidden)


def deepspeed_settings(
    stage: int, *, accumulation: int = 1, clip_norm: float | None = None
) -> dict[str, Any]:
    config = deepspeed_config(
        EngineSettings(zero_stage=0),
        micro_batch=2,
        accumulation=accumulation,
        world_size=1,
        largest_parameter=1,
        clip_norm=clip_norm,
        dtype=torch.float32,
        raw={},
    )
    # One rank of its own does not get stage 1, which has nothing to shard.
    config["zero_optimization"]["stage"] = stage
    return config


def new_engine(
    world: World,
    stage: int,
    *,
    optimizer: str = "sgd",
    clip_norm: float | None = None,
    accumulation: int = 1,
    ema: EmaSettings | None = None,
    model: Model | None = None,
) -> Engine:
    config = deepspeed_settings(stage, accumulation=accumulation, clip_norm=clip_norm)
    model = model or Model()
    groups: list[dict[str, Any]] = [
        {"params": list(model.trunk.parameters()), "lr_scale": 0.5},
        {"params": list(model.head.parameters()), "lr_scale": 1.0},
    ]
    if optimizer == "sgd":
        built: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.0, fused=True)
    else:
        built = torch.optim.AdamW(groups, lr=1.0, weight_decay=0.1, fused=True)
    engine = Engine(
        model,
        optimizer=built,
        optimizer_name=optimizer,
        config=config,
        world=world,
        dtype=torch.float32,
        mean=MEAN,
        std=STD,
        ema=ema,
    )
    assert type(engine._layout) is LAYOUTS[stage]
    return engine


IMAGES = torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2) * 10


def update(engine: Engine, *, scale: float = 1.0, lr: float = 0.1) -> None:
    engine.set_learning_rate(lr)
    engine.backward(engine.logits(IMAGES).square().sum() * scale)
    engine.step()


def weights(engine: Engine, kind: str = "model") -> dict[str, torch.Tensor]:
    """A copy of one kind of state by the name of the parameter."""
    prefix = f"{kind}."
    state = engine.export_state()
    return {k.removeprefix(prefix): v.clone() for k, v in state.items() if k.startswith(prefix)}


def distances(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[float]:
    return [(after[name] - before[name]).norm().item() for name in before]


def test_pixels_are_normalised_by_channel(world: World, stage: int) -> None:
    engine, plain = new_engine(world, stage), Model()
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    normalised = (IMAGES.float() / 255 - mean) / std
    with torch.no_grad():
        torch.testing.assert_close(engine.logits(IMAGES), plain(normalised))
        torch.testing.assert_close(
            engine.forward(IMAGES, "features"), plain(normalised, output="features")
        )


def test_update_is_clipped_to_the_norm(world: World, stage: int) -> None:
    engine = new_engine(world, stage, clip_norm=0.01)
    before = weights(engine)
    update(engine, lr=1.0)
    moved = distances(before, weights(engine))
    # lr_scale 0.5 halves the part of the trunk.
    unscaled = [2 * moved[0], 2 * moved[1], *moved[2:]]
    assert math.hypot(*unscaled) == pytest.approx(0.01, rel=1e-4)
    assert engine.gradient_norm() > 1


def test_update_that_is_not_finite_is_skipped(world: World, stage: int) -> None:
    engine = new_engine(world, stage, optimizer="adamw", clip_norm=1.0)
    update(engine)
    before, moments = weights(engine), weights(engine, "exp_avg")
    update(engine, scale=math.inf)
    assert distances(before, weights(engine)) == [0.0] * 4
    assert distances(moments, weights(engine, "exp_avg")) == [0.0] * 4
    health = engine.health()
    assert (health.skipped, health.longest, health.last_step) == (1, 1, 2)
    assert health.bad_micro_steps == (0,)
    update(engine)
    assert min(distances(before, weights(engine))) > 0
    health = engine.health()
    assert (health.skipped, health.longest) == (1, 0)
    assert engine.optimizer_steps() == 2


def test_a_nan_in_a_gradient_is_seen(world: World, stage: int) -> None:
    config = deepspeed_settings(stage, accumulation=2)
    check_nan_is_skipped(config, world=world, dtype=torch.float32)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_release_that_hides_a_nan_is_refused(
    world: World, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.19.8 a group with a NaN had a norm of -1, and the norm of all was finite."""

    def combined(norms: list[torch.Tensor], **_: Any) -> torch.Tensor:
        return torch.stack(norms).norm()

    for module in (stage_1_and_2, stage3):
        monkeypatch.setattr(module, "is_invalid_grad_norm", lambda norm: False)
        monkeypatch.setattr(module, "combine_grad_norm_groups", combined)
    with pytest.raises(UserError, match=r"DeepSpeed .* updates weights although a gradient is NaN"):
        check_nan_is_skipped(deepspeed_settings(stage), world=world, dtype=torch.float32)


def test_autocast_ends_with_its_engine(world: World) -> None:
    """DeepSpeed remembers it for all later engines, which sum gradients in another precision."""
    config = deepspeed_settings(0) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    check_nan_is_skipped(config, world=world, dtype=torch.bfloat16)
    assert torch_autocast.is_autocast_initialized()
    new_engine(world, 1)
    assert not torch_autocast.is_autocast_initialized()


@pytest.mark.parametrize("ema, decays", [(EMA, [0.75] * 4), (WARM_EMA, [2 / 11, 3 / 12, 0.3, 0.3])])
def test_average_decays_at_every_step(
    world: World, stage: int, ema: EmaSettings, decays: list[float]
) -> None:
    engine = new_engine(world, stage, ema=ema)
    slow = weights(engine)
    for decay, scale in zip(decays, (1.0, 1.0, math.nan, 1.0), strict=True):
        update(engine, scale=scale, lr=0.01)
        now = weights(engine)
        slow = {name: decay * slow[name] + (1 - decay) * now[name] for name in slow}
    torch.testing.assert_close(weights(engine, "ema"), slow)


def reader(tensors: Mapping[str, torch.Tensor]) -> ReadPart:
    return lambda name, start, count: tensors[name].flatten()[start : start + count]


@pytest.mark.parametrize("target", LAYOUTS)
def test_state_moves_by_name(world: World, stage: int, target: int) -> None:
    """Training continues as without the move."""
    first = new_engine(world, stage, optimizer="adamw", ema=EMA)
    for scale in (1.0, math.nan, 1.0):
        update(first, scale=scale)
    state = {name: tensor.clone() for name, tensor in first.export_state().items()}
    names = [name for name, _ in Model().named_parameters()]
    kinds = ("model", "exp_avg", "exp_avg_sq", "ema")
    assert set(state) == {f"{kind}.{name}" for kind in kinds for name in names}
    second = new_engine(world, target, optimizer="adamw", ema=EMA)
    second.import_state(reader(state), optimizer_steps=first.optimizer_steps())
    second.import_counters(first.export_counters())
    assert second.optimizer_steps() == 2
    moved = second.export_state()
    assert all(torch.equal(state[name], moved[name]) for name in state)
    for engine in (first, second):
        update(engine)
    assert second.export_counters() == first.export_counters()
    torch.testing.assert_close(second.export_state(), first.export_state())


def test_buffers_are_saved_and_move_with_the_state(world: World, stage: int) -> None:
    """Those that are not persistent are computed."""

    class WithBuffers(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head.register_buffer("mean", torch.zeros(2))
            self.register_buffer("computed", torch.ones(1), persistent=False)

    model = WithBuffers()
    model.head.mean.copy_(torch.tensor([1.5, -2.0]))  # type: ignore[operator]  # a buffer
    first, second = (new_engine(world, stage, model=each) for each in (model, WithBuffers()))
    state = {name: tensor.clone() for name, tensor in first.export_state().items()}
    assert state["model.head.mean"].tolist() == [1.5, -2.0]
    assert not any("computed" in name for name in state)
    second.import_state(reader(state), optimizer_steps=0)
    assert torch.equal(second.export_state()["model.head.mean"], state["model.head.mean"])


def test_average_and_micro_steps_continue_after_a_resume(world: World) -> None:
    first = new_engine(world, 0, accumulation=2, ema=WARM_EMA)
    for _ in range(2):
        update(first)
    second = new_engine(world, 0, accumulation=2, ema=WARM_EMA)
    second.import_state(reader(first.export_state()), optimizer_steps=first.optimizer_steps())
    second.import_counters(first.export_counters())
    for engine in (first, second):
        update(engine)
        update(engine)
    torch.testing.assert_close(second.export_state(), first.export_state())
    update(second)
    update(second, scale=math.nan)
    health = second.health()
    assert (health.last_step, health.bad_micro_steps) == (3, (1,))
