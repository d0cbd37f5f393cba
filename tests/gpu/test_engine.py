"""The engine on a GPU beside the reference trainer, plain kernels, and the dry run's memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.training_loops import EngineLoop, Task
from pretrain.run import PretrainRun
from tests.support.engine.reference_cases import (
    ALL,
    EXACT,
    STEPS,
    Training,
    check,
    fast_cases,
    name_of,
    train_reference,
)
from tests.support.tables import every
from vitscale.checkpoint.store import CheckpointStore, read_tensors
from vitscale.data.loader import Batch
from vitscale.distributed.processes import free_port
from vitscale.distributed.world import World, process_group
from vitscale.engine.device_batches import DeviceBatches
from vitscale.engine.settings import BUCKET_ELEMENTS
from vitscale.models.costs import memory_estimate
from vitscale.models.settings import ViTSettings
from vitscale.models.vit import build_model
from vitscale.training.session import restore_engine

SMALL = yaml.safe_load("""
image_size: 32
patch_size: 8
width: 96
depth: 2
num_heads: 3
mlp_width: 192
num_classes: 10
""")
# Cycles of a GPU, more than a second.
LONG = 3_000_000_000


def task(world: World, *, batch: int = 32, model=SMALL, **sections) -> Task:
    """A training on random images; `engine`: its precision and whether it is compiled."""
    engine = {
        "device": world.device.type,
        "compile": False,
        "max_micro_batch": batch,
    }
    values = yaml.safe_load("""
    stage: pretrain
    name: gpu
    schedule: {steps: 100, warmup_steps: 2}
    optim: {lr: 0.003, weight_decay: 0.1, clip_norm: 1.0}
    """)
    values |= {
        "data": {"path": "none", "global_batch": batch},
        "model": model,
        **sections,
        "engine": engine | sections.get("engine", {}),
    }
    return Task(run=PretrainRun.model_validate(values), device=world.device)


def losses(loop: EngineLoop, start: int, stop: int) -> list[float]:
    # Read at the end: reading a loss waits for the device.
    pool = loop.task.pool
    steps = range(start, stop)
    on_device = [loop.step(number, *pool[number % len(pool)]) for number in steps]
    return [float(loss) for loss in on_device]


BF16 = {"engine": {"precision": "bf16"}}
COMPILED = {"engine": {"precision": "bf16", "compile": True}}


def reference_cases() -> Iterator[Any]:
    """The fast cases on one rank, and AdamW at all stages and accumulations, also recomputed.

    Those in bf16 also in fp16, and compiled in fp32.

    Compiled kernels round less in bf16 than the reference, which rounds after every operation.
    """
    seen = set()
    grid = [
        (task_name, machine)
        for task_name, machine in ALL.values()
        if task_name in ("adamw", "activation checkpointing")
    ]
    for task_name, machine in [*map(ALL.__getitem__, fast_cases()), *grid]:
        alone = replace(machine, ranks=1, sent_in_bf16=True)
        chosen = [(alone, False)]
        if alone.in_bf16 and alone.stage > 0:
            chosen.append((replace(alone, precision="fp16"), False))
        if alone.in_bf16 and alone.stage < 3:
            chosen.append((replace(alone, precision="fp32"), True))
        for variant, compiled in chosen:
            name = name_of(task_name, variant) + ", compiled" * compiled

            if name not in seen:
                seen.add(name)
                yield pytest.param(task_name, variant, compiled, id=name)


@pytest.mark.parametrize(("task_name", "machine", "compiled"), reference_cases())
def test_a_training_is_that_of_the_reference(world, task_name, machine, compiled):
    training = Training(task_name, machine, world, compiled=compiled)
    training.train(STEPS)
    ours = training.finish()
    is_exact = machine.precision == "fp32"
    check(task_name, ours, train_reference(task_name, machine), exact=is_exact)

    # Within the tolerance of bf16 a training in fp32 would pass, too.
    if not is_exact:
        exact = train_reference(task_name, replace(machine, precision="fp32"))
        assert ours.losses != pytest.approx(exact.losses, rel=EXACT), "computed in fp32"


@every(stage="0, 1, 3")
def test_a_save_waits_for_no_kernel_and_moves_bit_for_bit(world, tmp_path, stage):
    """What a resumed training computes from the same bits may differ in the last ones."""
    first, second = (EngineLoop(task(world, **BF16), world, stage=stage) for _ in "ab")
    engine = first.engine
    losses(first, 0, 3)
    with CheckpointStore(tmp_path, keep=1, world=world) as store:
        first.before_update = store.wait_for_host_copy
        for step in (3, 4):  # the first save pins its memory
            store.wait()
            saved = {
                name: tensor.clone() for name, tensor in engine.export_state().items()
            }
            counters = engine.export_counters()
            progress = {
                "optimizer_steps": engine.optimizer_steps(),
                "engine": counters,
            }

            # The device is busy for more than a second; a save that waits returns after it.
            torch.cuda._sleep(LONG)
            kernels = torch.cuda.current_stream().record_event()
            store.save(
                engine.export_state(),
                step=step,
                progress=progress,
                description={},
            )
            assert step == 3 or not kernels.query(), "the save waited for the kernels"

            # Training goes on while the copy is made: the copy must not see its updates.
            expected = losses(first, step, step + 3 if step == 4 else 4)
        assert store._host_copy._buffer.is_pinned()
        store.wait()
        checkpoint, _ = store.newest()
    assert checkpoint.step == 4

    # The same bits on the disk and in another engine.
    stored = read_tensors(checkpoint.files)
    restore_engine(second.engine, checkpoint)
    state = second.engine.export_state()
    for name, tensor in saved.items():
        assert torch.equal(stored[name], tensor.cpu()), name
        assert torch.equal(state[name], tensor), name
    assert second.engine.export_counters() == counters
    assert losses(second, 4, 7) == pytest.approx(expected, rel=1e-3)
    for loop in (first, second):
        loop.engine.close()


def test_peak_memory_is_that_of_the_dry_run(world):
    """Of B/16 in bf16, compiled, within 10 %; docs/benchmarks.md has larger models."""
    chosen = {"preset": "B/16", "num_classes": 1000}
    loop = EngineLoop(task(world, batch=128, model=chosen, **COMPILED), world)

    # Compiling and the first steps take memory that a training does not need later.
    losses(loop, 0, 3)
    torch.cuda.reset_peak_memory_stats()
    losses(loop, 3, 6)
    run = loop.run
    estimate = memory_estimate(
        loop.task.arch,
        costs=run.make_objective(),
        zero_stage=1,
        world_size=1,
        precision="bf16",
        micro_batch=128,
        activation_checkpointing=False,
        bucket_elements=BUCKET_ELEMENTS,
        optimizer_bytes=run.optim.state_bytes_per_parameter,
    )
    assert torch.cuda.max_memory_allocated() == pytest.approx(estimate.total, rel=0.1)
    loop.engine.close()


def test_a_task_that_sees_one_gpu_uses_it(device, monkeypatch):
    """As number 0, also as its node's second rank; DeepSpeed takes LOCAL_RANK for the number."""
    # A launcher that gives each task one GPU, and numbers the tasks of a node.
    place = yaml.safe_load("""
    RANK: "0"
    WORLD_SIZE: "1"
    LOCAL_RANK: "1"
    LOCAL_WORLD_SIZE: "2"
    MASTER_ADDR: 127.0.0.1
    SLURM_PROCID: "1"
    """)
    place["MASTER_PORT"] = str(free_port())
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with process_group(
        device=device,
        timeout_min=5,
        num_threads=1,
    ) as world:
        for stage in (0, 1, 3):
            loop = EngineLoop(task(world), world, stage=stage)
            losses(loop, 0, 2)
            assert torch.cuda.current_device() == world.device.index
            loop.engine.close()


KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_attention_kernels_equal_the_formula(device, kernel):
    """Features and gradients in bf16, beside fp32 without a fused kernel."""
    arch = ViTSettings.model_validate(SMALL).resolved(num_classes=10)
    random = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 32, 32, generator=random).to(device)
    results = []
    for backend, dtype in ((SDPBackend.MATH, torch.float32), (kernel, torch.bfloat16)):
        model = build_model(arch, seed=0).to(device, dtype)
        with sdpa_kernel(backend):
            # Which kernels there are depends on the generation of the device.
            try:
                features = model(images.to(dtype), output="features")
            except RuntimeError as error:
                pytest.skip(f"not on this device: {error}")
            # Half of the features: the sum of all is fixed by the last norm.
            features.float()[:, ::2].sum().backward()
        gradient = model.get_parameter("blocks.0.attn.qkv.weight").grad
        results.append((features.float().detach(), gradient.float()))

    # Not equal, so it did compute in bf16; and no further off than its rounding.
    for exact, half in zip(*results, strict=True):
        assert 0 < (half - exact).norm() < 0.05 * exact.norm()


def test_batches_are_copied_beside_the_kernels_and_stay_until_used(device):
    is_pinned = device == "cuda"
    sums = []
    copied = []

    # Each copy takes a millisecond longer, and notes its end.
    class Slow(Batch):
        def to(self, device):
            torch.cuda._sleep(LONG // 1000)
            batch = super().to(device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            copied.append(event)
            return batch

    given = []
    for number in range(1, 13):
        shape = (16, 3, 224, 224)
        images = torch.full(shape, number, dtype=torch.uint8, pin_memory=is_pinned)
        labels, weights = (torch.ones(16, pin_memory=is_pinned) for _ in "ab")
        given.append(Slow(images, labels, weights))

    ahead = DeviceBatches(iter(given), torch.device(device))
    for number in range(11):
        batch = next(ahead)
        if number:  # the first batch is used as soon as it is asked for
            torch.cuda._sleep(LONG // 100)
        sums.append(batch.images.sum(dtype=torch.int64))
        kernels = torch.cuda.Event(enable_timing=True)
        kernels.record()

        # Its memory is free for the next copy while kernels may still read it.
        del batch
        ahead.prefetch()
        torch.cuda.synchronize()
        if number > 5:  # by then no memory is allocated, for which CUDA itself waits
            assert copied[-1].elapsed_time(kernels) > 0, "copied after the kernels"

    # A batch that was written over too early has another sum.
    num_values = given[0].images.numel()
    expected = [number * num_values for number in range(1, 12)]
    assert [int(total) for total in sums] == expected
