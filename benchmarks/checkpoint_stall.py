"""Measure how long training stops for a checkpoint, compared with a blocking torch.save.

    python benchmarks/checkpoint_stall.py --work /disk/to/measure --json results.json

Owns: the measurement. Ours and torch.save take turns in the same processes, on the state of a real
ViT under the engine (ZeRO-1, AdamW, fp32); all dirty pages are flushed before each. Ours gives two
numbers. Stall: the loop starts a save, and waits before the next update until the state is copied.
Added: the whole first step after the save, less a step without a save; it includes the processor
time that the copy takes from training. torch.save writes clones that were made in advance, and
flushes nothing. With several ranks each saves its own part, and the slowest counts. The committed
checkpoint is read back and compared at the end.
Leaves out: the cost of writing and training on the same cores, except for one number: the time of a
training step while the save is written, over that of a step without.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    import torch

    from vitscale.checkpoint.folders import read_checkpoint
    from vitscale.checkpoint.store import CheckpointStore
    from vitscale.checkpoint.tensors import read_tensors, whole_tensors
    from vitscale.distributed.atomic_files import fsync_folder
    from vitscale.distributed.failures.ending import run_rank_script
    from vitscale.distributed.world import World, agree_no_error, gather_objects, process_group
    from vitscale.engine.configuration import deepspeed_config
    from vitscale.engine.engine import Engine
    from vitscale.engine.settings import EngineSettings
    from vitscale.models.vit.model import build_model, decayed
    from vitscale.models.vit.settings import ViTSettings
    from vitscale.optim.optimizer import build_optimizer, parameter_groups
    from vitscale.optim.settings import OptimSettings
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

GOAL = 0.10
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
RATIOS = (
    ("stall", "torch.save"),
    ("stall, processor", "torch.save, processor"),
    ("added", "torch.save"),
)


def main() -> None:
    options = parse_arguments()
    if options.worker:
        run_rank_script(lambda: measure(options.work, size=options.mb[0], rounds=options.rounds))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"environment": environment(options), "measurements": []}
    print("\n".join(f"{key}: {value}" for key, value in results["environment"].items()), flush=True)
    for size in options.mb:
        for num_ranks in options.ranks:
            work = Path(tempfile.mkdtemp(prefix="stall-", dir=options.work))
            try:
                found = run_workers(work, size=size, num_ranks=num_ranks, rounds=options.rounds)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            results["measurements"].append(found)
            print(table(found), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    parser.add_argument(
        "--mb", type=int, nargs="+", choices=SIZES, default=[50, 500], help="size of the state"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="saves per measurement")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def environment(options: argparse.Namespace) -> dict[str, str]:
    return {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "load before": f"{os.getloadavg()[0]:.2f}",
        "torch": torch.__version__,
        "folder": str(options.work.resolve()),
    }


def run_workers(work: Path, *, size: int, num_ranks: int, rounds: int) -> dict[str, Any]:
    """Start the ranks and return rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--worker", f"--work={work}", f"--mb={size}"]
    processes = [
        subprocess.Popen(
            [*command, f"--rounds={rounds}"],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            | {"LOCAL_WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{size} MB on {num_ranks} ranks failed:\n" + "\n".join(outputs))
    line = next(line for line in outputs[0].splitlines() if line.startswith(RESULT))
    return json.loads(line.removeprefix(RESULT))


def build_engine(world: World, size: int) -> Engine:
    width, depth, mlp_width = SIZES[size]
    settings = ViTSettings(
        image_size=32,
        patch_size=16,
        width=width,
        depth=depth,
        num_heads=8,
        mlp_width=mlp_width,
        num_classes=10,
    )
    vit = build_model(settings, settings.architecture(num_classes=10), seed=0)
    optim = OptimSettings(name="adamw", lr=1e-3)
    groups = parameter_groups(vit.named_parameters(), weight_decay=0.1, decayed=decayed)
    config = deepspeed_config(
        EngineSettings(zero_stage=1),
        micro_batch=BATCH,
        accumulation=1,
        world_size=world.world_size,
        largest_parameter=max(each.numel() for each in vit.parameters()),
        clip_norm=1.0,
        dtype=torch.float32,
        raw={},
    )
    return Engine(
        vit,
        optimizer=build_optimizer(groups, settings=optim, device=world.device),
        optimizer_name="adamw",
        config=config,
        world=world,
        dtype=torch.float32,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def train_step(engine: Engine, store: CheckpointStore) -> tuple[float, float, float]:
    """One step on noise: seconds of all, of waiting for the copy, and its processor seconds."""
    start = time.perf_counter()
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
    engine.backward(engine.logits(images).square().mean())
    before, busy = time.perf_counter(), time.thread_time()
    store.wait_for_host_copy()
    waited, busy = time.perf_counter() - before, time.thread_time() - busy
    engine.step()
    return time.perf_counter() - start, waited, busy


def slowest(seconds: float) -> float:
    return max(gather_objects(seconds))


def flush_disk() -> None:
    os.sync()
    agree_no_error(None)


def timed_torch_save(state: dict[str, torch.Tensor], path: Path) -> dict[str, float]:
    """Seconds of torch.save alone, and with the fsync that makes it durable."""
    flush_disk()
    start, busy = time.perf_counter(), time.thread_time()
    torch.save(state, path)
    plain, busy = time.perf_counter() - start, time.thread_time() - busy
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    fsync_folder(path.parent)
    flushed = time.perf_counter() - start
    return {
        "torch.save": slowest(plain),
        "torch.save, processor": slowest(busy),
        "torch.save and fsync": slowest(flushed),
    }


def timed_our_save(store: CheckpointStore, engine: Engine, *, step: int) -> dict[str, float]:
    """Seconds: stall; until committed, while training continues; a step during the save."""
    flush_disk()
    quiet = median(train_step(engine, store)[0] for _ in range(5))
    flush_disk()
    start, busy = time.perf_counter(), time.thread_time()
    store.save(engine.export_state(), step=step, progress={}, description={})
    stall, busy = time.perf_counter() - start, time.thread_time() - busy
    first, waited, waited_busy = train_step(engine, store)
    added, meanwhile = slowest(stall + first - quiet), []
    while not all(gather_objects(store.finished())):
        meanwhile.append(train_step(engine, store)[0])
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


def measure(work: Path, *, size: int, rounds: int) -> None:
    """One rank's part; rank 0 prints the result."""
    with process_group(device="cpu", timeout_min=10, num_threads=None) as world:
        engine = build_engine(world, size)
        found: dict[str, list[float]] = {}
        with CheckpointStore(work, keep=1, world=world) as store:
            for _ in range(3):
                train_step(engine, store)
            state: dict[str, torch.Tensor] = {}
            for number in range(rounds + 1):
                state = {name: each.clone() for name, each in engine.export_state().items()}
                row = timed_torch_save(state, work / f"plain-{world.rank}.pt")
                row |= timed_our_save(store, engine, step=number + 1)
                for name, value in row.items():
                    key = f"first {name}" if number == 0 else name
                    found.setdefault(key, []).append(value)
            check_last_save(store, engine, world, step=rounds + 2)
            num_bytes = sum(gather_objects(sum(each.nbytes for each in state.values())))
        if world.is_first:
            head = {"state_mb": num_bytes / 1e6, "ranks": world.world_size}
            print(RESULT + json.dumps(head | {"seconds": found}), flush=True)


def check_last_save(store: CheckpointStore, engine: Engine, world: World, *, step: int) -> None:
    """The committed state is that of the save, although training continued."""
    shares = gather_objects({name: each.clone() for name, each in engine.export_state().items()})
    store.save(engine.export_state(), step=step, progress={}, description={})
    train_step(engine, store)
    committed = store.wait()
    assert committed is not None
    checkpoint = read_checkpoint(committed.folder)
    expected = whole_tensors(piece for share in shares for piece in share.items())
    saved = read_tensors([checkpoint.folder / name for name in checkpoint.files])
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved), "not what was saved"


def table(found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    ratios = {
        f"{ours} / {theirs}": [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        for ours, theirs in RATIOS
    }
    lines = [f"\n{found['state_mb']:.0f} MB of state, {found['ranks']} rank(s), seconds"]
    lines.append(f"{'':40}{'min':>9}{'median':>9}{'max':>9}")
    for name, values in [*seconds.items(), *ratios.items()]:
        numbers = (min(values), median(values), max(values))
        lines.append(f"{name:40}" + "".join(f"{number:9.4f}" for number in numbers))
    lines.append(f"goal of stall / torch.save: at most {GOAL}; processor: of the main thread")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
