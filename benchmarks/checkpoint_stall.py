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
    if parser.parse_args().toy:
        parser.set_defaults(mb=[1], ranks=[2], rounds=1)
    options = parser.parse_args()
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
            results.append(
                run_ranks(folder, size, num_ranks=num_ranks, rounds=options.rounds)
            )
            print(table(results[-1]), flush=True)
    return {"measurements": results}


def run_ranks(work: Path, size: int, *, num_ranks: int, rounds: int) -> dict[str, Any]:
    """Start the ranks and return rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--worker", f"--work={work}", f"--mb={size}"]
    processes = [
        subprocess.Popen(
            [*command, f"--rounds={rounds}"],
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise Failed(f"{size} MB on {num_ranks} ranks:\n" + "\n".join(outputs))
    line = next(line for line in outputs[0].splitlines() if line.startswith(RESULT))
    found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return found


def save_often(work: Path, size: int, *, rounds: int) -> None:
    """One rank's part; rank 0 prints the result."""
    with process_group(device="cpu", timeout_min=10, num_threads=None) as world:
        loop = loop_of(world, size)
        seconds: dict[str, list[float]] = {}
        with CheckpointStore(work, keep=1, world=world) as store:
            for _ in range(3):
                train_step(loop, store)
            state: dict[str, torch.Tensor] = {}
            for number in range(rounds + 1):
                state = {
                    name: each.clone()
                    for name, each in loop.engine.export_state().items()
                }
                row = timed_torch_save(state, work / f"plain-{world.rank}.pt")
                row |= timed_our_save(store, loop, step=number + 1)
                for name, value in row.items():
                    # The first save allocates the memory of the copy.
                    key = f"first {name}" if number == 0 else name
                    seconds.setdefault(key, []).append(value)
            check_last_save(store, loop, step=rounds + 2)
            num_bytes = sum(gather_objects(sum(each.nbytes for each in state.values())))
        if world.is_first:
            found = {
                "state_mb": num_bytes / 1e6,
                "ranks": world.world_size,
                "seconds": seconds,
            }
            print(RESULT + json.dumps(found), flush=True)


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
    given = [*SETTINGS, *sizes, *batch]
    run = load_run(PretrainRun, config, overrides=given, with_site=False).run
    return EngineLoop(
        Task(run=run, device=world.device, world_size=world.world_size), world
    )


def train_step(loop: EngineLoop, store: CheckpointStore) -> tuple[float, float, float]:
    """One step on noise: seconds of all, of waiting for the copy, and its processor seconds."""
    waited, busy = 0.0, 0.0

    def wait() -> None:
        nonlocal waited, busy
        before, before_busy = time.perf_counter(), time.thread_time()
        store.wait_for_host_copy()
        waited, busy = time.perf_counter() - before, time.thread_time() - before_busy

    loop.before_update = wait
    start = time.perf_counter()
    loop.step(0, *loop.task.pool[0])
    return time.perf_counter() - start, waited, busy


def slowest(seconds: float) -> float:
    return max(gather_objects(seconds))


def flush_disk() -> None:
    os.sync()
    gather_objects(None)


def timed_torch_save(state: dict[str, torch.Tensor], path: Path) -> dict[str, float]:
    """Seconds of torch.save alone, and with the fsync that makes it durable."""
    flush_disk()
    start, busy = time.perf_counter(), time.thread_time()
    torch.save(state, path)
    plain, busy = time.perf_counter() - start, time.thread_time() - busy
    for each in (path, path.parent):
        fd = os.open(each, os.O_RDONLY)
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
    flush_disk()
    quiet = median(train_step(loop, store)[0] for _ in range(5))
    flush_disk()
    start, busy = time.perf_counter(), time.thread_time()
    store.save(loop.engine.export_state(), step=step, progress={}, description={})
    stall, busy = time.perf_counter() - start, time.thread_time() - busy
    first, waited, waited_busy = train_step(loop, store)
    added, meanwhile = slowest(stall + first - quiet), []
    while not all(gather_objects(not is_saving())):
        meanwhile.append(train_step(loop, store)[0])
    committed = slowest(time.perf_counter() - start)
    store.wait()
    return {
        "stall": slowest(stall + waited),
        "stall, processor": slowest(busy + waited_busy),
        "added": added,
        "step": quiet,
        "committed": committed,
        "step ratio": median(meanwhile) / quiet if meanwhile else float("nan"),
    }


def is_saving() -> bool:
    return any(thread.name == "save" for thread in threading.enumerate())


def check_last_save(store: CheckpointStore, loop: EngineLoop, *, step: int) -> None:
    """The committed state is that of the save, although training continued."""
    own = {name: part.clone() for name, part in loop.engine.export_state().items()}
    store.save(loop.engine.export_state(), step=step, progress={}, description={})
    train_step(loop, store)
    committed = store.wait()
    assert committed is not None
    saved = read_tensors(read_checkpoint(committed.folder).files)
    is_same = True
    for key, part in own.items():
        piece = SLICE.fullmatch(key)
        name, start = (piece["name"], int(piece["start"])) if piece else (key, 0)
        found = saved[name].flatten()[start : start + part.numel()]
        is_same &= torch.equal(found, part.flatten().cpu())
    assert all(gather_objects(is_same)), "not what was saved"


def table(found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    lines = [f"\n{found['state_mb']:.0f} MB of state, {found['ranks']} rank(s)"]
    lines.append(f"{'seconds':26} min / median / max")
    lines += [f"{name:26} {spread(values, '.4f')}" for name, values in seconds.items()]
    lines += [f"{a} / {b}: {ratio(seconds[a], seconds[b], '.4f')}" for a, b in RATIOS]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
