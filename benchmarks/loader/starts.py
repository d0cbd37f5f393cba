"""Measure what loader workers cost: start of a training, start of an evaluation, memory.

    python benchmarks/loader/starts.py --shards SHARDS --trees . ../other --workers 1 2 --rounds 5

Runs the digits training on two ranks, from checkouts of the project in turn. Prints medians over
the rounds, of the slower rank:

first step      seconds from the start of the process to the end of the first step
evaluation      seconds from the start of an evaluation to its first batch, median of a run
memory          MiB of all processes of both ranks (PSS) while training, after the first evaluation
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

NUM_STEPS, EVALUATE_EVERY = 24, 4
CONFIG = "configs/digits/pretrain.yaml"
SETTINGS = (
    f"schedule.steps={NUM_STEPS}",
    *("schedule.epochs=null", "schedule.warmup_steps=5", "tracking.uri=null"),
    f"evaluate=[{{name: classification, every_steps: {EVALUATE_EVERY}}}]",
)
MEMORY_STEP = 2 * EVALUATE_EVERY + 2


class _AfterImport(MetaPathFinder):
    """Calls a function with a module as soon as that is imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, *_: Any) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_call(module: Any) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]  # on purpose
        return spec


def one_rank(script: str) -> None:
    """Run a training; print `@first_step S`, `@evaluation S` and `@memory MIB`."""

    def watch(module: Any) -> None:
        session = module.TrainingSession
        end_step, evaluate = session.end_step, session._evaluate

        def timed_end(self: Any, step: int) -> None:
            if step == 0:
                say("first_step", time.monotonic() - float(os.environ["STARTED"]))
            if step == MEMORY_STEP and self.world.is_first:
                say("memory", node_mib())
            end_step(self, step)

        def timed_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
            from vitscale.data import loader

            start, to = time.monotonic(), loader.Batch.to

            def first(batch: Any, device: Any) -> Any:
                say("evaluation", time.monotonic() - start)
                loader.Batch.to = to  # type: ignore[method-assign]  # as it was
                return to(batch, device)

            loader.Batch.to = first  # type: ignore[method-assign]  # until the first batch
            evaluate(self, *args, **kwargs)

        session.end_step, session._evaluate = timed_end, timed_evaluate

    sys.meta_path.insert(0, _AfterImport("vitscale.training.loop", watch))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def say(name: str, value: float) -> None:
    """One write: both ranks have the same output."""
    os.write(1, f"@{name} {value}\n".encode())


def node_mib() -> float:
    """MiB of all processes of the session; pages that several share count once."""
    total, session = 0, os.getsid(0)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(folder.name)) == session:
                text = (folder / "smaps_rollup").read_text()
                found = re.search(r"Pss: +(\d+)", text)
                total += int(found[1]) if found else 0
    return total / 1024


def measured(tree: Path, shards: Path, *, workers: int, port: int) -> dict[str, float]:
    """The three values of one training."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(tree)}
        options = [f"data.num_workers={workers}", f"data.path={shards}", f"output={folder}/run"]
        own = Path(__file__).resolve()
        # In a session of their own, whose memory is summed.
        command = [
            "setsid",
            "--wait",
            "bash",
            "-c",
            '"$@" & RANK=1 LOCAL_RANK=1 "$@"; wait $!',
            "-",
        ]
        command += [sys.executable, str(own), str(tree / "pretrain/main.py")]
        done = subprocess.run(
            [*command, "--config", CONFIG, *SETTINGS, *options],
            cwd=tree,
            env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
            | common
            | {"RANK": "0", "LOCAL_RANK": "0", "STARTED": str(time.monotonic())},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    values = defaultdict(list)
    for name, value in re.findall(r"@(first_step|evaluation|memory) ([\d.]+)", done.stdout):
        values[name].append(float(value))
    if len(values) != 3:
        raise SystemExit(f"the training of {tree} failed:\n{done.stdout}")
    return {
        "first_step": max(values["first_step"]),
        "evaluation": median(values["evaluation"]),
        "memory": median(values["memory"]),
    }


def rounds(options: argparse.Namespace) -> Iterable[tuple[tuple[str, int], dict[str, float]]]:
    for number in range(options.rounds):
        trees = options.trees if number % 2 == 0 else options.trees[::-1]
        for workers in options.workers:
            for tree in trees:
                port = 20_000 + (os.getpid() * 7 + int(time.monotonic() * 10)) % 20_000
                yield (
                    (str(tree), workers),
                    measured(tree.resolve(), options.shards.resolve(), workers=workers, port=port),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shards", type=Path, required=True, help="made by configs/data/digits")
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path()], help="checkouts")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="data.num_workers")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = defaultdict(list)
    for key, values in rounds(options):
        found[key].append(values)
        print(*key, json.dumps({name: round(value, 3) for name, value in values.items()}))
    print(
        "\n| tree | workers | first step, s | evaluation, s | memory, MiB |\n|---|---|---|---|---|"
    )
    for (tree, workers), runs in found.items():
        first, evaluation, memory = (median(run[name] for run in runs) for name in runs[0])
        print(f"| {tree} | {workers} | {first:.2f} | {evaluation:.3f} | {memory:.0f} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        one_rank(sys.argv[1])
    else:
        main()
