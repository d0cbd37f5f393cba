"""Measure how long training stops for a checkpoint, compared with a blocking torch.save.

    python benchmarks/checkpoint_stall.py --work /disk/to/measure --json results.json

Ours and torch.save take turns in the same processes, on the state of a real ViT under the engine
(ZeRO 1, AdamW, fp32); all dirty pages are flushed before each. Ours gives two numbers. Stall: the
loop starts a save, and waits before the next update until the state is copied. Added: the whole
first step after the save, less a step without a save; it includes the processor time that the copy
takes from training. torch.save writes clones that were made in advance, and flushes nothing. With
several ranks each saves its own part, and the slowest counts. The committed checkpoint is read back
and compared at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

import torch

from benchmarks.measuring import ROOT, Failed, parser_of, ratio, run_benchmark, spread
from benchmarks.training_loops import EngineLoop, Task
from pretrain.run import PretrainRun
from vitscale.checkpoint.folders import read_checkpoint
from vitscale.checkpoint.store import SLICE, CheckpointStore, read_tensors
from vitscale.config.loader import load_run
from vitscale.distributed.processes import run_rank_script
from vitscale.distributed.world import World, gather_objects, process_group

# 5 tokens an image, so 160 a step: far fewer than a GPU takes for the same weights.
BATCH = 32
# width, depth, MLP width: about this many MB of weights and both moments.
SIZES = {
    1: (64, 2, 128),
    50: (512, 1, 2560),
    500: (768, 6, 3072),
    1000: (1024, 7, 4096),
}
RESULT = "RESULT "
SETTINGS = (
    *(
        "engine.device=cpu",
        "engine.zero_stage=1",
        "engine.num_threads=null",
        "model.num_heads=8",
    ),
    *(
        "model.image_size=32",
        "model.patch_size=16",
        "model.num_classes=10",
        "optim.ema=null",
    ),
)
# Ratios of rows of the same round: the disk's speed changes between rounds, and cancels out.
RATIOS = (
    ("stall", "torch.save"),
    ("stall, processor", "torch.save, processor"),
    ("added", "torch.save"),
)


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--mb", type=int, nargs="+", choices=SIZES, default=[50, 500])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    # Only defaults change, so `--toy --rounds 2` still gives two rounds.
    if parser.parse_args().toy:
        parser.set_defaults(mb=[1], ranks=[2], rounds=1)
    options = parser.parse_args()

    # This script is also what it starts, once for each rank.
    if options.worker:
        run_rank_script(
            lambda: save_often(options.work, options.mb[0], rounds=options.rounds)
        )
    else:
        run_benchmark(options, lambda work: measure(work, options), "torch")


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    results = []
    for size in options.mb:
        for num_ranks in options.ranks:
            folder = Path(tempfile.mkdtemp(dir=work))
            result = run_ranks(folder, size, num_ranks=num_ranks, rounds=options.rounds)
            results.append(result)
            # At once: a measurement of 1000 MB takes minutes, and a later one may fail.
            print(table(result), flush=True)
    return {"measurements": results}


def run_ranks(work: Path, size: int, *, num_ranks: int, rounds: int) -> dict[str, Any]:
    """Start the ranks and return rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [
        sys.executable,
        __file__,
        "--worker",
        f"--work={work}",
        f"--mb={size}",
        f"--rounds={rounds}",
    ]

    # Without the launcher: nothing but the ranks should use the cores that are measured.
    processes = []
    for rank in range(num_ranks):
        own_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = subprocess.Popen(
            command,
            env=os.environ | world | own_variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)

    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise Failed(f"{size} MB on {num_ranks} ranks:\n" + "\n".join(outputs))

    # Libraries print lines of their own, so the result is the one that is marked.
    line = next(line for line in outputs[0].splitlines() if line.startswith(RESULT))
    result: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return result


def save_often(work: Path, size: int, *, rounds: int) -> None:
    """One rank's part; rank 0 prints the result."""
    with process_group(device="cpu", timeout_min=10, num_threads=None) as world:
        loop = loop_of(world, size)
        seconds: dict[str, list[float]] = {}
        with CheckpointStore(work, keep=1, world=world) as store:
            # The first steps allocate gradients and buffers, which no later step does.
            for _ in range(3):
                train_step(loop, store)

            state: dict[str, torch.Tensor] = {}
            for number in range(rounds + 1):
                # Cloned outside the clock: torch.save is not charged for what makes it safe.
                state = cloned(loop.engine.export_state())
                row = timed_torch_save(state, work / f"plain-{world.rank}.pt")
                row |= timed_our_save(store, loop, step=number + 1)
                for name, value in row.items():
                    key = name
                    # The first save allocates the memory of the copy.
                    if number == 0:
                        key = f"first {name}"
                    seconds.setdefault(key, []).append(value)

            check_last_save(store, loop, step=rounds + 2)

            # ZeRO 1 splits the moments, so the size of the state is the sum over the ranks.
            own_bytes = sum(tensor.nbytes for tensor in state.values())
            num_bytes = sum(gather_objects(own_bytes))

        if world.is_first:
            result = {
                "state_mb": num_bytes / 1e6,
                "ranks": world.world_size,
                "seconds": seconds,
            }
            print(RESULT + json.dumps(result), flush=True)


def cloned(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def loop_of(world: World, size: int) -> EngineLoop:
    width, depth, mlp_width = SIZES[size]
    sizes = (
        f"model.width={width}",
        f"model.depth={depth}",
        f"model.mlp_width={mlp_width}",
    )
    batch = (
        f"data.global_batch={BATCH * world.world_size}",
        f"engine.max_micro_batch={BATCH}",
    )
    config = ROOT / "configs/digits/pretrain.yaml"
    overrides = [*SETTINGS, *sizes, *batch]
    # Without the site's file: a result must not depend on the defaults of one cluster.
    run = load_run(PretrainRun, config, overrides=overrides, with_site=False).run
    task = Task(run=run, device=world.device, world_size=world.world_size)
    return EngineLoop(task, world)


def train_step(loop: EngineLoop, store: CheckpointStore) -> tuple[float, float, float]:
    """One step on noise: seconds of all, of waiting for the copy, and its processor seconds."""
    waited = 0.0
    busy = 0.0

    def wait() -> None:
        nonlocal waited, busy
        start = time.perf_counter()
        # This thread's own clock: the thread that copies is busy meanwhile, and not counted here.
        start_busy = time.thread_time()
        store.wait_for_host_copy()
        waited = time.perf_counter() - start
        busy = time.thread_time() - start_busy

    loop.before_update = wait
    start = time.perf_counter()
    loop.step(0, *loop.task.pool[0])
    return time.perf_counter() - start, waited, busy


def slowest(seconds: float) -> float:
    return max(gather_objects(seconds))


def flush_disk() -> None:
    """Let every save start with the same empty queue of the disk."""
    os.sync()
    # A barrier: no rank may start its clock while another one's pages are still written.
    gather_objects(None)


def timed_torch_save(state: dict[str, torch.Tensor], path: Path) -> dict[str, float]:
    """Seconds of torch.save alone, and with the fsync that makes it durable."""
    flush_disk()
    start = time.perf_counter()
    start_busy = time.thread_time()
    torch.save(state, path)
    plain = time.perf_counter() - start
    busy = time.thread_time() - start_busy

    # The folder too: without it power loss takes the file's name, and so the file.
    for flushed_path in (path, path.parent):
        fd = os.open(flushed_path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    flushed = time.perf_counter() - start
    return {
        "torch.save": slowest(plain),
        "torch.save, processor": slowest(busy),
        "torch.save and fsync": slowest(flushed),
    }


def timed_our_save(
    store: CheckpointStore, loop: EngineLoop, *, step: int
) -> dict[str, float]:
    """Seconds: stall; until committed, while training continues; a step during the save."""
    # The step without a save, measured in this round: the machine may be slower in the next one.
    flush_disk()
    quiet = median(train_step(loop, store)[0] for _ in range(5))

    flush_disk()
    start = time.perf_counter()
    start_busy = time.thread_time()
    store.save(loop.engine.export_state(), step=step, progress={}, description={})
    stall = time.perf_counter() - start
    busy = time.thread_time() - start_busy
    first, waited, waited_busy = train_step(loop, store)
    added = slowest(stall + first - quiet)

    # All ranks must agree to take another step: one alone would wait for ever in its collectives.
    meanwhile = []
    while not all(gather_objects(not is_saving())):
        meanwhile.append(train_step(loop, store)[0])
    committed = slowest(time.perf_counter() - start)
    store.wait()

    # A small state may be committed before the first step has ended.
    step_ratio = float("nan")
    if meanwhile:
        step_ratio = median(meanwhile) / quiet
    return {
        "stall": slowest(stall + waited),
        "stall, processor": slowest(busy + waited_busy),
        "added": added,
        "step": quiet,
        "committed": committed,
        "step ratio": step_ratio,
    }


def is_saving() -> bool:
    """Whether the store's thread runs, without asking the store: `wait` would block."""
    return any(thread.name == "save" for thread in threading.enumerate())


def check_last_save(store: CheckpointStore, loop: EngineLoop, *, step: int) -> None:
    """The committed state is that of the save, although training continued."""
    expected = cloned(loop.engine.export_state())
    store.save(loop.engine.export_state(), step=step, progress={}, description={})
    # This step changes the weights in place: a store that copied too late would save the new ones.
    train_step(loop, store)
    committed = store.wait()
    assert committed is not None

    saved = read_tensors(read_checkpoint(committed.folder).files)
    is_same = True
    for key, part in expected.items():
        name = key
        start = 0
        # A rank holds only a slice of each moment; its key says where the slice starts.
        piece = SLICE.fullmatch(key)
        if piece:
            name = piece["name"]
            start = int(piece["start"])
        saved_part = saved[name].flatten()[start : start + part.numel()]
        is_same &= torch.equal(saved_part, part.flatten().cpu())
    assert all(gather_objects(is_same)), "not what was saved"


def table(result: dict[str, Any]) -> str:
    seconds = result["seconds"]
    lines = [f"\n{result['state_mb']:.0f} MB of state, {result['ranks']} rank(s)"]
    lines.append(f"{'seconds':26} min / median / max")
    lines += [f"{name:26} {spread(values, '.4f')}" for name, values in seconds.items()]
    lines += [f"{a} / {b}: {ratio(seconds[a], seconds[b], '.4f')}" for a, b in RATIOS]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
