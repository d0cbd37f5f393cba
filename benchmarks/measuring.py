"""What the benchmarks share: options, commands, the machine, ratios.

All candidates run in turn (A B C A B C). Each output is checked before its time counts: a wrong one
ends the benchmark with exit code 1. Numbers are of this machine as it is: the load by others is
printed, and results taken beside other work mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The cores that this process may use: a container or a job often has fewer than the machine.
NUM_CORES = len(os.sched_getaffinity(0))
SHARD_MIB = 256


class Failed(Exception):
    """A command ended with an error, or an output is not what it should be."""


def parser_of(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--work", type=Path, default=Path("runs"), help="on the disk to measure"
    )
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument(
        "--toy", action="store_true", help="tiny sizes, to show that it works"
    )
    return parser


def run_benchmark(
    options: argparse.Namespace,
    measure: Callable[[Path], dict[str, Any]],
    *packages: str,
) -> None:
    """Print the machine, measure in a temporary folder, and write the results."""
    # Before the measurement, which may take an hour and would be lost at its end.
    if options.json and not options.json.parent.is_dir():
        print(f"--json: {options.json.parent} does not exist", file=sys.stderr)
        raise SystemExit(2)

    # Read before anything runs: afterwards the load would be that of the benchmark itself.
    machine = environment(*packages) | {"rounds": options.rounds}
    print("\n".join(f"{name}: {value}" for name, value in machine.items()), flush=True)

    # Under --work, since /tmp is often memory, and the disk is part of what is measured.
    options.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="benchmark-", dir=options.work)).resolve()
    try:
        results = measure(work)
    except Failed as failure:
        print(f"\nFAILED: {failure}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        # Also after an error: a folder of photographs takes gigabytes.
        shutil.rmtree(work, ignore_errors=True)

    if options.json:
        document = {"environment": machine, **results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def environment(*packages: str) -> dict[str, Any]:
    """The machine, its load, and the versions of what is compared."""
    models = set()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                models.add(line.split(":")[1].strip())
    machine: dict[str, Any] = {
        # ARM kernels name no model.
        "cpu": ", ".join(sorted(models)) or platform.machine(),
        "cores": NUM_CORES,
        "load before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    for name in packages:
        # A rival that is missing is left out of the benchmark, which says so itself.
        with suppress(PackageNotFoundError):
            machine[name] = version(name)
    return machine


def run_command(command: Sequence[str | Path]) -> float:
    """Seconds from start to end. Raises Failed."""
    environment = dict(os.environ)
    # As in an ordinary installation: modules are compiled once, not at every start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # The checkout first: an installed vitscale of another version must not be what is measured.
    inherited = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{inherited}"
    words = [str(word) for word in command]

    # The start of the interpreter and the imports count: users wait for the whole command.
    start = time.perf_counter()
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    seconds = time.perf_counter() - start

    if done.returncode:
        text = done.stdout + done.stderr
        raise Failed(f"{' '.join(words)}: exit code {done.returncode}\n{text}")
    return seconds


def make_shards_command(
    source: Path, output: Path, *options: str, shard_mib: int = SHARD_MIB
) -> list[str]:
    return [
        sys.executable,
        "data_prep/make_shards.py",
        "--config",
        "configs/data/image_folder.yaml",
        # All images are training images, as in the rivals' shards.
        "source.holdout_fraction=0",
        f"shards.shard_mib={shard_mib}",
        f"source.path={source}",
        f"output={output}",
        *options,
    ]


def ratio(over: Sequence[float], under: Sequence[float], form: str = ".2f") -> str:
    """Median, least and largest ratio over the rounds, each compared within itself."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return f"{median(ratios):{form}} ({min(ratios):{form}} to {max(ratios):{form}})"


def spread(values: Sequence[float], form: str = ".0f") -> str:
    chosen = (min(values), median(values), max(values))
    return " / ".join(format(value, form) for value in chosen)
