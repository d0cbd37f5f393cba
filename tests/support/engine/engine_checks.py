"""Check on several ranks what a training from start to end in one place does not show.

    engine_checks.py [NAME ...]    (one rank; started by test_golden_curves.py and test_engine.py)

Owns CHECKS: all, or those named, run one after another and print `passed: NAME`. The first that
fails ends the run. test_engine.py runs some of them in one process. What is trained, and what is
right, is in `reference_cases`.
"""

import os
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.support.engine.reference_cases import (
    FP16_POWER,
    STEPS,
    TASKS,
    Training,
    check,
    new_engine,
    new_model,
    samples,
    train_reference,
    whole_state,
)
from tests.support.reference_training import Machine, normalized
from tests.support.tables import refused
from vitscale.distributed.processes import run_rank_script
from vitscale.distributed.world import World, gather_objects, process_group
from vitscale.engine.engine import Engine
from vitscale.models.vit import checkpoint_activations, compile_blocks

HALF = STEPS // 2
IMAGES, _ = samples(np.arange(16))


def machine_of(world: World, stage: int, precision: str = "fp32") -> Machine:
    return Machine(
        ranks=world.world_size,
        # Two, so that what happens once a micro-batch and once an update are told apart.
        accumulation=2,
        stage=stage,
        precision=precision,
    )


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    if ours.keys() != theirs.keys():
        return False
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def moved(first: Engine, second: Engine):
    """Give the second engine the state of the first."""
    tensors = whole_state(first)
    num_read = 0

    def read(name, start, count):
        nonlocal num_read
        num_read += count
        return tensors[name].flatten()[start : start + count]

    second.import_state(read, optimizer_steps=first.optimizer_steps())
    second.import_counters(first.export_counters())
    assert equal(whole_state(second), tensors)

    # The average of what is not trained is the same, and is read as that.
    num_elements = 0
    for name, tensor in tensors.items():
        kind, _, parameter = name.partition(".")
        if kind != "ema" or f"exp_avg.{parameter}" in tensors:
            num_elements += tensor.numel()
    # More would cost every restart on many ranks the time of reading the whole state.
    read_by_all = sum(gather_objects(num_read))
    assert read_by_all == num_elements, "read once by all ranks together"


def continued(first: Training, machine: Machine) -> Training:
    """In an engine with other weights: a rank that gets none of the others' goes on with these."""
    model = new_model(first.task)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
    second = Training(
        first.task,
        machine,
        first.world,
        before=first.result,
        model=model,
    )
    moved(first.engine, second.engine)
    return second


def health(training: Training) -> tuple[int, int, int | None, int | None]:
    health = training.engine.health()
    return health.skipped, health.longest, health.last_step, health.bad_micro_step


# --- the checks ----------------------------------------------------------------------------------


def state_moves_in_the_middle(
    world: World,
    *,
    source: int,
    target: int,
    task: str = "skipped",
    precision: str = "fp32",
):
    """Half of the steps at one stage, the others at another: the training is the reference's."""
    machine = machine_of(world, source, precision)
    is_exact = precision == "fp32"
    is_spoiled = TASKS[task].spoiled
    first = Training(task, machine, world)

    # `spoil` names the updates that are skipped: by step 5 the first two, in a row. The rank knows
    # its own bad micro-batch: of update 5 (number 4) that is micro + rank = 1.
    first.train(5)
    if is_spoiled:
        assert health(first) == (2, 2, 5, 1 - world.rank)
    # One more, whose gradient alone is not finite: no micro-batch has a bad loss.
    first.train(HALF)
    if is_spoiled:
        assert health(first) == (3, 1, 10, None)
    if TASKS[task].recipe.average is not None:
        atol = 0.1
        if is_exact:
            atol = 1e-4
        uses_the_average(first, atol=atol)

    # The last two in a row are on both sides of the move: the counters must move, too.
    second = continued(first, replace(machine, stage=target))
    second.train(STEPS)
    if is_spoiled:
        assert health(second) == (4, 2, 11, 0 if world.is_first else None)
    check(task, second.finish(), train_reference(task, machine), exact=is_exact)


@torch.no_grad()
def uses_the_average(training: Training, *, atol: float):
    """The average is used for a while, and leaves no trace."""
    engine = training.engine
    state = whole_state(engine)
    # What is right: a model outside the engine, with the exported average as its weights.
    plain = new_model(training.task)
    for name, parameter in plain.named_parameters():
        parameter.copy_(state[f"ema.{name}"])
    pixels = normalized(IMAGES)
    tokens = plain.forward_features(pixels)
    features = plain.forward_head(tokens, pre_logits=True)
    right = torch.cat([plain(pixels), features], dim=1)

    def outputs():
        logits = engine.logits(IMAGES).float()
        features = engine.forward(IMAGES, "features").float()
        return torch.cat([logits, features], dim=1)

    engine.eval()
    before = outputs()
    with engine.averaged():
        shown = outputs()
    after = outputs()
    engine.train()
    torch.testing.assert_close(shown, right, rtol=0, atol=atol)
    # Otherwise the weights themselves would pass as the average.
    assert (shown - before).abs().max() > atol
    assert torch.equal(before, after)
    assert equal(state, whole_state(engine))


def far_model() -> nn.Module:
    """Its head works between -8 and -16, where bf16 has steps of 0.0625."""
    model = new_model("average")
    # As ViT on ImageNet-21k starts, with a loss of a sigmoid for each class.
    nn.init.constant_(model.head.bias, -10.0)
    return model


@torch.no_grad()
def keeps_the_head_in_fp32(world: World, *, stage: int):
    """In bf16 training starts from the unrounded weights, and logits are those of fp32 heads."""
    machine = machine_of(world, stage, "bf16")
    training = Training("average", machine, world, model=far_model())
    engine = training.engine
    started = whole_state(engine)
    # A start from weights that were rounded to bf16 once would show here.
    for name, value in far_model().named_parameters():
        assert torch.equal(started[f"model.{name}"], value)

    def logits():
        logits = engine.logits(IMAGES)
        state = whole_state(engine)  # inside `averaged` the average is in `model`
        features = engine.forward(IMAGES, "features").float()
        # The head written out in fp32, on the engine's own features.
        right = features @ state["model.head.weight"].T + state["model.head.bias"]
        torch.testing.assert_close(logits, right, rtol=0, atol=1e-4)
        return logits

    with torch.enable_grad():
        training.train(3)
    engine.eval()
    shown = logits()
    with engine.averaged():
        logits()
    # Values of bf16 would be 0.0625 apart, or equal.
    gaps = shown[shown < -8].sort().values.diff()
    assert gaps[gaps > 0].min() < 0.0625 / 32


def compiles_without_graph_breaks(world: World, *, stage: int):
    """All blocks share their graphs: forward and backward passes in training, and one without."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    model = new_model("adamw")
    checkpoint_activations(model)
    # Without inductor, which compiles C++ for minutes: breaks show in the graphs alone.
    compile_blocks(model, backend="aot_eager")
    machine = machine_of(world, stage)
    training = Training("adamw", machine, world, model=model)

    # An evaluation in the middle, as in a run: other batch, no gradients, and back.
    training.train(HALF)
    training.engine.eval()
    with torch.no_grad():
        training.engine.logits(IMAGES[:4])
    training.engine.train()
    training.train(STEPS)
    right = train_reference("adamw", machine)
    check("adamw", training.finish(), right, exact=True)
    assert not counters["graph_break"]
    # 0 would mean that nothing was compiled; one for each block, that none is shared.
    assert 1 <= counters["stats"]["unique_graphs"] <= 4


def sends_gradients_in_the_backward_pass(world: World, *, stage: int, precision: str):
    """In buckets, once an update."""
    machine = machine_of(world, stage, precision)
    training = Training("adamw", machine, world)
    sizes = []
    send = dist.all_reduce

    def recorded(tensor, *arguments, **options):
        if torch._C._current_graph_task_id() != -1:  # autograd runs
            sizes.append(tensor.numel())
        return send(tensor, *arguments, **options)

    with patch.object(dist, "all_reduce", recorded):
        training.train(3)
    parameters = new_model("adamw").parameters()
    num_elements = sum(parameter.numel() for parameter in parameters)
    # Three updates, of several buckets each: one large one could not be sent meanwhile.
    assert len(sizes) >= 3 * 4
    assert max(sizes) < num_elements / 3
    # Twice as many would mean that each micro-batch sends.
    assert sum(sizes) == pytest.approx(3 * num_elements, rel=0.01)  # with padding


def resumes_the_loss_scale(world: World):
    """fp16 halves it at the second overflow; the state moves between the first and the second.

    DeepSpeed refuses fp16 on CPUs without fast kernels for it, and so do we; slow ones exist.
    """
    get_accelerator().is_fp16_supported = lambda: True
    machine = machine_of(world, 1, "fp16")
    resolve_precision = "vitscale.training.session.resolve_precision"
    with patch(resolve_precision, lambda *settings: torch.float16):
        first = Training("skipped", machine, world)
        # DeepSpeed tolerates one overflow; the count of those, too, must move.
        first.train(4)
        second = continued(first, machine)
    second.train(STEPS)

    # All skipped updates but the first halved the scale.
    assert second.engine.health().skipped == 4
    assert second.engine.loss_scale == 2.0 ** (FP16_POWER - 3)
    right = train_reference("skipped", machine)
    check("skipped", second.finish(), right, exact=False)


def takes_the_gpu_that_a_task_sees(world: World):
    """DeepSpeed took the local rank for its number: 1 on the second rank, which has GPU 0 alone."""
    devices = []
    alone = replace(world, device=torch.device("cpu", 0))

    def record(device):
        devices.append(str(device))

    with patch.object(get_accelerator(), "set_device", record):
        for stage in (0, 1, 3):
            new_engine("adamw", machine_of(world, stage), alone).close()
    assert torch.nn.functional.linear is torch._C._nn.linear  # ZeRO 3 had replaced it
    # Each engine sets it once; the partitioning of ZeRO 3 sets it again, and names it otherwise.
    assert devices == "0 0 0 cpu".split()
    # What other libraries and our own messages call the rank stays as the launcher set it.
    assert os.environ["LOCAL_RANK"] == str(world.rank)


def refuses_other_graphs(world: World, *, stage: int):
    """Ranks whose losses use other parameters, from the start or later, get no wrong gradients."""
    for is_first_loss in (True, False):
        engine = new_engine("adamw", machine_of(world, stage), world)
        loss = engine.logits(IMAGES[:4]).sum()
        # The first graph of a rank is compared with the other ranks', later ones with its own.
        if not is_first_loss:
            engine.backward(loss)
            engine.step()
            loss = engine.logits(IMAGES[:4]).sum()
        if not world.is_first:
            loss = engine._engine.module.head.bias.sum()  # no other parameter

        # Later the rank whose own graph changes ends, and the others see that it is gone.
        if is_first_loss or not world.is_first:
            with refused("does not use"):
                engine.backward(loss)
        # Only one rank was refused: the other must not close the engine while that one works.
        if not is_first_loss:
            dist.barrier()
        engine.close()


STAGES = (0, 1, 2, 3)
# Each stage comes first and second.
MOVES = yaml.safe_load("""
skipped: [[0, 3], [3, 1], [1, 2], [2, 0]]
sgd: [[1, 3]]
lamb: [[0, 0]]
bf16 momentum: [[1, 3]]
layer decay: [[1, 3], [3, 0]]
frozen: [[0, 3], [3, 1], [1, 2], [2, 0]]
""")
CHECKS = {
    **{
        f"{task} moves from ZeRO {source} to {target}": partial(
            state_moves_in_the_middle, source=source, target=target, task=task
        )
        for task, moves in MOVES.items()
        for source, target in moves
    },
    # DeepSpeed has other wrappers in bf16 than in fp32.
    **{
        f"{precision} at ZeRO {stage} sends in the backward pass": partial(
            sends_gradients_in_the_backward_pass, stage=stage, precision=precision
        )
        for stage, precision in ((0, "fp32"), (1, "fp32"), (1, "bf16"))
    },
    **{
        f"bf16 moves at ZeRO {stage}": partial(
            state_moves_in_the_middle, source=stage, target=stage, precision="bf16"
        )
        for stage in STAGES
    },
    **{
        f"head at ZeRO {stage}": partial(keeps_the_head_in_fp32, stage=stage)
        for stage in STAGES
    },
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


def main():
    with process_group(device="cpu", timeout_min=5, num_threads=1) as world:
        # All in one group of processes: starting one takes longer than most checks.
        for name in sys.argv[1:] or CHECKS:
            CHECKS[name](world)
            print(f"passed: {name}", flush=True)


if __name__ == "__main__":
    run_rank_script(main)
