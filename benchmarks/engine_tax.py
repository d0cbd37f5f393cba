"""Measure a training step through our engine against a bare loop of the same model, on CPUs.

    python benchmarks/engine_tax.py --json results.json

Owns: the step on CPU, on 1 and 2 ranks: bare loop, engine with ZeRO 0 and 1, and the whole loop of
pretrain/main.py (batches, schedule, meter, progress, log lines; no evaluation, no checkpoint).
All of them run in turn in one process per rank (A B C, C B A), so other load affects all of them.
Processor time of all ranks decides: it changes less than wall clock on a busy machine.
Leaves out: GPUs (`gpu_training`) and the loops themselves (`training.steps`).

The bare loop on two ranks is DistributedDataParallel. Its first losses must equal ours, or the
benchmark ends with exit code 1. A goal that is missed does not end it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    from benchmarks.corpora.photo_folder import noise_photos, write_photo_folder
    from benchmarks.faults.process_runs import ROOT, CommandFailed, run_command
    from benchmarks.sharding.commands import make_shards_command
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.failures.ending import run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

GOAL, STRETCH_GOAL = 1.03, 1.01
STAGES = (0, 1)
CHECKED_STEPS = 6
LOSS_TOLERANCE = 1e-4
SIZES: dict[str, dict[str, Any]] = {
    # DeiT's Ti/16 (5.5 M parameters) at 160 px.
    "small": {
        "model": {"preset": "Ti/16", "image_size": 160},
        "batch": 8,
        "warmup": 2,
        "steps_per_block": 2,
        "photos": {"width": 500, "height": 375, "num": 16},
        "mib": 24.0,
        "real_steps": 12,
        "prefetched": 4,
    },
    "toy": {
        "model": {
            **{"image_size": 32, "patch_size": 8, "width": 48},
            **{"depth": 2, "num_heads": 2, "mlp_width": 96},
        },
        "batch": 4,
        "warmup": 1,
        "steps_per_block": 2,
        "photos": {"width": 64, "height": 48, "num": 8},
        "mib": 0.1,
        "real_steps": 4,
        "prefetched": 4,
    },
}


def main() -> None:
    options = parse_arguments()
    if options.rank_of is not None:
        run_rank_script(lambda: measure_on_rank(options))
        return
    results: dict[str, Any] = {"size": options.size, "load_before": os.getloadavg()[0]}
    options.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="tax-", dir=options.work)).resolve()
    try:
        size = chosen_size(options)
        write_photo_folder(
            work / "photos", noise_photos(**size["photos"]), total_bytes=int(size["mib"] * 2**20)
        )
        run_command(make_shards_command(work / "photos", work / "shards", shard_mib=8))
        for num_ranks in options.ranks:
            results[f"{num_ranks} ranks"] = found = run_on_ranks(num_ranks, work, options)
            print_table(num_ranks, found)
    except CommandFailed as failure:
        print(f"\nFAILED: {failure}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def chosen_size(options: argparse.Namespace) -> dict[str, Any]:
    return SIZES[options.size] | ({"batch": options.batch} if options.batch else {})


def run_on_ranks(num_ranks: int, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start this file once per rank; returns the results of rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--size", options.size, "--blocks", str(options.blocks)]
    command += ["--rank-of", str(work)]
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--batch", str(options.batch)] if options.batch else []
    processes = []
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
        place |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = open(work / f"rank{rank}.log", "w")
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {name: str(value) for name, value in place.items()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            break
        time.sleep(0.2)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    logs = [(work / f"rank{rank}.log").read_text() for rank in range(num_ranks)]
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            raise CommandFailed(f"a rank ended with {process.returncode}\n{log[-4000:]}")
    found: dict[str, Any] = json.loads((work / "found.json").read_text())
    return found


def measure_on_rank(options: argparse.Namespace) -> None:
    """One rank. Torch is imported here, so that the parent starts at once."""
    from benchmarks.training.steps import BareLoop, EngineLoop, Task, random_batches
    from vitscale.engine.device_batches import DeviceBatches
    from vitscale.training.session import open_session

    size = chosen_size(options)
    run = endless_run(size, options)
    with open_session(run, run.make_objective()) as t:
        import torch

        world = t.world
        model = run.model.model_copy(update={"num_classes": t.arch.num_classes})
        run = run.model_copy(update={"model": model})
        task = Task(run=run, world_size=world.world_size)
        pool = random_batches(task, world)
        loops: dict[str, Any] = {"bare": BareLoop(task, world, precision="fp32")}
        for stage in STAGES:
            engine = run.engine.model_copy(update={"zero_stage": stage})
            staged = run.model_copy(update={"engine": engine})
            loops[f"zero{stage}"] = EngineLoop(staged, world, model=task.initial())
        steps: dict[str, Callable[[int], torch.Tensor]] = {
            name: stepper(loop, pool) for name, loop in loops.items()
        }
        losses = {
            name: [float(step(number)) for number in range(CHECKED_STEPS)]
            for name, step in steps.items()
        }
        check_losses(losses)
        real = t.batches
        t.batches = DeviceBatches(synthetic(pool), world.device)
        numbers = count()  # a run's log lines never go back
        steps["loop"] = lambda number: main_step(t, next(numbers))
        found = timed(steps, size, options.blocks, world)
        found["losses"] = losses
        found["threads"] = torch.get_num_threads()
        found["torch"] = torch.__version__
        found["real"] = timed_real(t, steps["loop"], real, pool, size)
        if world.is_first:
            (options.rank_of / "found.json").write_text(json.dumps(found))


def endless_run(size: dict[str, Any], options: argparse.Namespace) -> Any:
    """A run that never ends by itself, saves or evaluates."""
    from pretrain.run import PretrainRun
    from vitscale.checkpoint.settings import CheckpointSettings
    from vitscale.data.settings import DataSettings
    from vitscale.engine.settings import EngineSettings
    from vitscale.models.vit.settings import ViTSettings
    from vitscale.optim.schedules import ScheduleSettings
    from vitscale.optim.settings import OptimSettings
    from vitscale.tracking.settings import TrackingSettings

    work = options.rank_of
    return PretrainRun(
        stage="pretrain",
        name="tax",
        output=str(work / "run"),
        data=DataSettings(
            path=str(work / "shards"),
            val_split=None,
            global_batch=size["batch"] * int(os.environ["WORLD_SIZE"]),
            num_workers=1,
        ),
        model=ViTSettings(**size["model"]),
        optim=OptimSettings(lr=3e-4, weight_decay=0.1, clip_norm=1.0),
        schedule=ScheduleSettings(steps=100_000, warmup_steps=10),
        engine=EngineSettings(
            device="cpu", max_micro_batch=size["batch"], num_threads=options.threads
        ),
        checkpoint=CheckpointSettings(every_steps=1_000_000),
        tracking=TrackingSettings(log_every_steps=10),
    )


def stepper(loop: Any, pool: list[Any]) -> Callable[[int], Any]:
    return lambda number: loop.step(number, *pool[number % len(pool)])


def synthetic(pool: list[Any]) -> Iterator[Any]:
    import torch

    from vitscale.data.loader import Batch

    while True:
        for images, labels in pool:
            yield Batch(images, labels, torch.ones(len(labels)))


def main_step(session: Any, step: int) -> Any:
    """The body of the loop of pretrain/main.py."""
    from vitscale.training.loop import learning_rate_at

    session.engine.set_learning_rate(learning_rate_at(step, run=session.run, plan=session.plan))
    for batch in session.micro_batches(step):
        loss = session.objective.loss(session.engine, batch)
        session.update(loss)
    session.end_step(step)
    return loss.detach()


def check_losses(losses: dict[str, list[float]]) -> None:
    for name, ours in losses.items():
        worst = max(abs(a / b - 1) for a, b in zip(ours, losses["bare"], strict=True))
        if not worst < LOSS_TOLERANCE:
            raise UserError(f"{name} has losses {ours}, the bare loop {losses['bare']}")


def timed(steps: dict[str, Any], size: dict[str, Any], blocks: int, world: Any) -> dict[str, Any]:
    """Seconds per step and their ratios to the bare loop's; wall clock, and processors' sum."""
    import torch

    from benchmarks.training.timing import interleaved, ratio, warm_up
    from vitscale.distributed.world import sum_over_ranks

    cpu: dict[str, list[float]] = {name: [] for name in steps}
    turns = [sorted(steps, reverse=block % 2 == 1) for block in range(blocks)]
    order = iter(name for turn in turns for name in turn)

    def clock(work: Callable[[], object]) -> float:
        torch.distributed.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        cpu[next(order)].append((time.process_time() - cpu_s) / size["steps_per_block"])
        return time.perf_counter() - wall_s

    for step in steps.values():
        warm_up(step, steps=size["warmup"], device=world.device)
    wall = interleaved(
        steps,
        blocks=blocks,
        steps_per_block=size["steps_per_block"],
        device=world.device,
        start=size["warmup"],
        clock=clock,
    )
    cpu = {name: sum_over_ranks(torch.tensor(own)).tolist() for name, own in cpu.items()}
    return {
        kind: {
            "seconds": {name: median(values) for name, values in found.items()},
            "over_bare": {
                name: ratio(values, found["bare"])
                for name, values in found.items()
                if name != "bare"
            },
        }
        for kind, found in (("processor", cpu), ("wall", wall))
    }


def timed_real(
    t: Any, step: Callable[[int], Any], real: Iterator[Any], pool: list[Any], size: dict[str, Any]
) -> dict[str, float]:
    """The whole loop on batches of the shards, between two measurements on synthetic ones.

    Wall clock: the loader's processes share the cores with the training, so this shows the cost of
    decoding on few cores, not that of the loop. Prefetched batches are used up first.
    """
    from vitscale.engine.device_batches import DeviceBatches

    num, seconds, waits = size["real_steps"], {}, []
    for name, batches in (
        ("before", synthetic(pool)),
        ("real", watched(real, waits)),
        ("after", synthetic(pool)),
    ):
        t.batches = DeviceBatches(batches, t.world.device)
        for number in range(size["prefetched"]):
            step(number)
        start, known = time.perf_counter(), len(waits)
        for number in range(num):
            step(number)
        seconds[name] = (time.perf_counter() - start) / num
        if name == "real":
            waited = sum(waits[known:]) / num
    synthetic_s = (seconds["before"] + seconds["after"]) / 2
    return seconds | {
        "over_synthetic": seconds["real"] / synthetic_s,
        "data_wait": waited / seconds["real"],
    }


def watched(batches: Iterator[Any], waits: list[float]) -> Iterator[Any]:
    """The same batches; appends how long each was waited for."""
    while True:
        start = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - start)
        yield batch


def print_table(num_ranks: int, found: dict[str, Any]) -> None:
    print(f"\n{num_ranks} ranks, {found['threads']} threads each, seconds per step")
    for kind in ("processor", "wall"):
        part = found[kind]
        print(f"{kind:10} bare   {part['seconds']['bare']:8.4f}")
        for name, over in part["over_bare"].items():
            interval = f"{over['low']:.3f} to {over['high']:.3f}"
            text = f"{part['seconds'][name]:8.4f}  over bare {over['median']:.3f} ({interval})"
            print(f"{'':10} {name:6} {text}")
    real = found["real"]
    print(
        f"real shards over synthetic, wall clock, cores shared: {real['over_synthetic']:.3f}, "
        f"{100 * real['data_wait']:.0f} % of it waiting for data"
    )
    for stage in STAGES:
        reached = found["processor"]["over_bare"][f"zero{stage}"]["median"]
        verdict = (
            "better" if reached <= STRETCH_GOAL else "reached" if reached <= GOAL else "missed"
        )
        print(f"ZeRO {stage}: {reached:.3f}; goal {GOAL}, stretch goal {STRETCH_GOAL}: {verdict}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="size of the model")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to show that it works")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--batch", type=int, help="images per rank and step")
    parser.add_argument("--blocks", type=int, default=15, help="blocks of steps per loop")
    parser.add_argument("--threads", type=int, help="per rank; default: cores / ranks")
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder for shards")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.toy:
        options.size, options.blocks, options.threads = "toy", 2, 1
    return options


if __name__ == "__main__":
    run_script(main)
