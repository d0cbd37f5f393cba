"""The engine on one rank, for every layout in which DeepSpeed keeps weights.

Its numbers: test_reference. On two ranks, compiled, in fp16: test_golden_curves.
"""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime import torch_autocast

from benchmarks.training_loops import BareLoop, Calls, EngineLoop, Task
from pretrain.run import PretrainRun
from tests.support.engine.engine_checks import (
    IMAGES,
    STAGES,
    far_model,
    keeps_the_head_in_fp32,
    moved,
    state_moves_in_the_middle,
)
from tests.support.engine.reference_cases import (
    MODEL,
    SECTIONS,
    TASKS,
    Training,
    new_engine,
    new_model,
    train_reference,
    whole_state,
)
from tests.support.ranks.fault_runs import wait_all
from tests.support.ranks.warm_ranks import ROOT
from tests.support.reference_training import HEADS, Machine, rate_at
from tests.support.tables import every, refused, rows
from vitscale.config.errors import RankError
from vitscale.engine import deepspeed_parts, gradients
from vitscale.engine.deepspeed_parts import PartitionedLayout
from vitscale.engine.layouts import FlatLayout, PlainLayout
from vitscale.evaluation.trained_model import InferenceModel, Preprocessing
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model

# The stages with a layout of their own: weights as they are, one flat array, and shards.
LAYOUTS = {0: PlainLayout, 1: FlatLayout, 3: PartitionedLayout}


@pytest.fixture(autouse=True)
def original_linear():
    """An engine at ZeRO 3 that is not closed leaves its own in the process."""
    yield
    torch.nn.functional.linear = torch._C._nn.linear


# Each layout is left once and entered once.
@rows("""
- [source, target]
- [0, 1]
- [1, 3]
- [3, 0]
""")
def test_a_training_goes_on_at_another_stage(world, source, target):
    """Clipping, skipped updates, the average of the weights, and all counters are the same."""
    state_moves_in_the_middle(world, source=source, target=target)


@pytest.mark.distributed
def test_every_rank_resumes_with_what_the_others_read(warm_starter, tmp_path):
    # The first half ends at one stage, the second begins at another.
    checks = [f"frozen moves from ZeRO {move}" for move in ("0 to 3", "3 to 1")]
    script = [ROOT / "tests/support/engine/engine_checks.py", *checks]
    ranks = warm_starter.start(script, num_ranks=2, folder=tmp_path)
    wait_all(ranks)
    for rank in ranks:
        output = rank.output()
        assert output.count("passed: ") == len(checks), output[-3000:]


def test_the_head_of_a_bf16_model_is_in_fp32(world):
    keeps_the_head_in_fp32(world, stage=1)


@torch.no_grad()
def test_a_trained_model_is_evaluated_as_in_training(world):
    """In bf16 to the bit; its last layer keeps the digits that the engine's remainders lack."""
    machine = Machine(stage=1, precision="bf16")
    engine = new_engine("adamw", machine, world, model=far_model())
    engine.eval()
    loaded = InferenceModel(
        far_model(),
        pixels=Preprocessing(image_size=8),
        world=world,
        dtype=torch.bfloat16,
    )

    # The features come from the layers, the logits from the head.
    features = loaded.forward(IMAGES, "features")
    assert torch.equal(features, engine.forward(IMAGES, "features"))
    logits = loaded.logits(IMAGES)
    torch.testing.assert_close(logits, engine.logits(IMAGES), atol=1e-4, rtol=0)


def test_bf16_rounds_more_of_a_deep_model_where_weights_are_sharded(world):
    """Relative to the spread of the logits; autocast keeps weights, norms and residuals in fp32."""
    deep = MODEL | {
        "depth": 32,
        "width": 48,
        "image_size": 32,
    }
    arch = ViTSettings(**deep).resolved(num_classes=7)
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(
        0, 256, (16, 3, 32, 32), dtype=torch.uint8, generator=generator
    )

    @torch.no_grad()
    def logits(stage, precision):
        model = build_model(arch, seed=0)

        # A new head gives zeros, whatever comes before it.
        generator = torch.Generator().manual_seed(1)
        torch.nn.init.normal_(model.head.weight, std=0.1, generator=generator)
        machine = Machine(stage=stage, precision=precision)
        engine = new_engine("adamw", machine, world, model=model)
        return engine.logits(images).float()

    exact = logits(0, "fp32")
    spread = (exact - exact.mean(0)).norm()
    off = []
    for stage in LAYOUTS:
        error = logits(stage, "bf16") - exact
        off.append((error.norm() / spread).item())
    assert 0 < off[0] < 0.03
    assert off[0] < off[1] < 0.06

    # At ZeRO 3 a product is rounded once more, before its bias is added.
    assert off[2] == pytest.approx(off[1], rel=0.15)


@every(stage=LAYOUTS)
def test_buffers_are_saved_and_move_with_the_state(world, stage):
    """Buffers that are not persistent are computed."""
    engines = []
    for value in (torch.tensor([1.5, -2.0]), torch.zeros(2)):
        model = new_model("adamw")
        model.head.register_buffer("mean", value)
        model.register_buffer("computed", torch.ones(1), persistent=False)
        engines.append(new_engine("adamw", Machine(stage=stage), world, model=model))

    first, second = engines
    assert type(first._layout) is LAYOUTS[stage]
    state = whole_state(first)
    assert state["model.head.mean"].tolist() == [1.5, -2.0]
    assert not any("computed" in name for name in state)

    # The second one has other values, which the state replaces.
    moved(first, second)


def test_another_release_of_deepspeed_is_refused(world, monkeypatch):
    # Its private parts are used, which another release may have changed.
    monkeypatch.setattr(deepspeed, "__version__", "0.19.9")
    with refused(r"DeepSpeed 0.19.9 is installed.*\n  allowed: deepspeed=="):
        new_engine("adamw", Machine(stage=1), world)


def calls_of(loop):
    """Of the third update; the first ones fill tables."""
    images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
    labels = torch.zeros(2, dtype=torch.long)
    for step in range(2):
        loop.step(step, images, labels)
    with Calls() as calls:
        loop.step(2, images, labels)
    return calls.count


@rows("""
- [stage, precision]
- [0, autocast]
- [1, master]
""")
def test_an_update_asks_little_more_of_the_host_than_a_plain_loop(
    world, stage, precision
):
    """In bf16, at the depth of B/16; a group for each layer costs what it costs in torch."""

    model = {
        "preset": "B/16",
        "width": 32,
        "num_heads": 2,
        "mlp_width": 64,
        "image_size": 32,
        "num_classes": 10,
    }

    def task(**optim):
        run = {
            "stage": "pretrain",
            "name": "calls",
            "data": {"path": "none", "global_batch": 2},
            "model": model,
            "optim": {"lr": 1e-3, "weight_decay": 0.1, "clip_norm": 1.0} | optim,
            "schedule": {"steps": 10},
            "engine": {"precision": "bf16", "zero_stage": stage, "device": "cpu"},
        }
        return Task(run=PretrainRun.model_validate(run), device=world.device)

    def counts(make):
        """Calls with one rate for all layers, and with one for each."""
        return [calls_of(make(task(**optim))) for optim in ({}, {"layer_decay": 0.75})]

    plain = counts(partial(BareLoop, precision=precision, compiled=False))
    ours = counts(partial(EngineLoop, world=world, stage=stage))
    for num_ours, num_plain in zip(ours, plain, strict=True):
        assert num_ours < 1.1 * num_plain
    one_rate, by_layers = ours
    assert by_layers < 1.08 * one_rate

    # Not fused: whether to update is chosen for each tensor.
    for optim in ({"momentum_dtype": "bf16"}, {"name": "lamb"}):
        if stage == 0 or "name" not in optim:
            loop = EngineLoop(task(**optim), world, stage=stage)
            assert calls_of(loop) < 1.55 * plain[0]


def test_autocast_ends_with_its_engine(world):
    """DeepSpeed remembers it for all later engines, which sum gradients in another precision."""
    new_engine("adamw", Machine(precision="bf16"), world)
    assert torch_autocast.is_autocast_initialized()
    new_engine("adamw", Machine(stage=1), world)
    assert not torch_autocast.is_autocast_initialized()


@pytest.fixture
def seen_gpu():
    """DeepSpeed believes that this machine has a GPU, which nothing can use."""
    before = get_accelerator()
    set_accelerator(CUDA_Accelerator())
    yield
    set_accelerator(before)


@every(precision="fp32, bf16", stage=STAGES)
def test_a_cpu_is_used_beside_gpus(world, seen_gpu, stage, precision):
    assert get_accelerator().device_name() == "cuda"
    training = Training("adamw", Machine(stage=stage, precision=precision), world)
    training.train(2)

    # bf16 rounds, fp32 hardly: the CPU computes in the precision asked for.
    right = train_reference("adamw", Machine())
    assert training.result.losses == pytest.approx(right.losses[:2], rel=2e-2)
    state = training.engine.export_state()
    assert {part.device.type for part in state.values()} == {"cpu"}
    training.engine.close()


@every(stage="2, 3")
def test_a_loss_that_leaves_out_other_parameters_is_refused(world, stage, monkeypatch):
    """As one of two ranks, whose gradients DeepSpeed would add to those of other parameters."""
    two = replace(world, world_size=2)
    images = IMAGES[:4]

    def started(unused_by_the_other):
        engine = new_engine("adamw", Machine(stage=stage), world)
        engine._layout._world = two

        # Each rank tells the other what its loss does not use.
        def gather(unused):
            return [unused, unused_by_the_other]

        monkeypatch.setattr(deepspeed_parts, "gather_objects", gather)
        return engine

    engine = started(frozenset({"head.bias"}))
    with refused("does not use head.bias: rank 0 has 0 such .*, rank 1 1"):
        engine.backward(engine.logits(images).sum())

    # A second loss that uses less than the first: no gradient would come for the rest.
    engine = started(frozenset())
    engine.backward(engine.logits(images).sum())
    engine.step()
    engine.logits(images)
    message = r"the loss does not use blocks\.0\.attn\.proj\.bias"
    with pytest.raises(RankError, match=message):
        engine.backward(engine._engine.module.head.bias.sum())


@every(stage=STAGES)
def test_a_parameter_that_no_loss_uses_is_decayed_alike(world, stage):
    """Its gradient is zero, on one rank without ZeRO too: AdamW would leave out what has none."""
    model = new_model("adamw")
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3, 2)))
    training = Training("adamw", Machine(stage=stage), world, model=model)
    training.train(1)

    # What one step of decoupled decay leaves of ones.
    recipe = TASKS["adamw"].recipe
    kept = 1 - rate_at(0, recipe) * recipe.weight_decay
    state = whole_state(training.engine)
    unused = state["model.unused"].flatten()
    assert unused.tolist() == pytest.approx([kept] * 6)


# Optimisers that decay and that take norms, each with another layout; heads of an objective.
@rows("""
- [task, stage]
- [adamw, 1]
- [bf16 momentum, 2]
- [sgd, 3]
- [lamb, 0]
- [layer decay, 2]
- [dino, 3]
""")
def test_a_frozen_backbone_keeps_its_bits(world, monkeypatch, task, stage):
    section = SECTIONS.get(task, {})
    schedule = {**section.get("schedule", {}), "freeze_backbone_steps": 3}
    monkeypatch.setitem(SECTIONS, task, {**section, "schedule": schedule})
    training = Training(task, Machine(stage=stage), world)

    def bits():
        state = whole_state(training.engine).items()
        return {
            name.partition(".")[2]: tensor.view(torch.int32).clone()
            for name, tensor in state
            if name.startswith("model.") and tensor.dtype == torch.float32
        }

    def moved(before):
        after = bits()
        return {name for name in before if not torch.equal(before[name], after[name])}

    start = bits()
    training.train(3)
    # All of the heads moves but DINO's prototypes, which are frozen for longer.
    assert moved(start) == {
        name for name in start if name.startswith(HEADS) and "prototypes" not in name
    }
    # At the next step all of it moves.
    thawed = bits()
    training.train(4)
    assert {name for name in moved(thawed) if not name.startswith(HEADS)} == {
        name for name in start if not name.startswith(HEADS)
    }


@every(stage="0, 1")
def test_a_closed_engine_watches_its_model_no_more(world, stage):
    """On several ranks it would send its own sums between those of the next engine."""
    model = new_model("adamw")
    parameters = list(model.parameters())

    # As a rank of two makes them, which watch when each gradient is there.
    with patch.object(gradients.dist, "get_world_size", return_value=2):
        sums = gradients.GradientSums(
            [parameters],
            starts=[0],
            size=sum(parameter.numel() for parameter in parameters),
            forward_order=parameters,
            bucket_elements=1,
            sent_as=torch.float32,
            is_last=lambda: True,
        )
    engine = new_engine("adamw", Machine(stage=stage), world, model=model)
    engine._layout._sums = sums

    def num_watched():
        hooks = [parameter._post_accumulate_grad_hooks for parameter in parameters]
        return sum(map(bool, hooks))

    assert num_watched()
    engine.close()
    assert num_watched() == 0


def test_an_update_whose_norm_is_minus_one_is_skipped():
    """DeepSpeed's for a norm that overflows."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    guard = gradients.UpdateGuard(
        optimizer,
        clip_norm=1.0,
        norm=lambda: -1.0,
        accumulation=1,
        device=weight.device,
    )
    weight.grad = torch.ones(2)
    optimizer.step()
    guard.finish()
    assert not weight.any()
    assert guard.health().skipped == 1
