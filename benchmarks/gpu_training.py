"""Check and time training on one GPU, in one command of at most nine minutes.

    python benchmarks/gpu_training.py --out OUT                 # one GPU
    python benchmarks/gpu_training.py --out OUT --sections L16,tax --minutes 4
    python benchmarks/gpu_training.py --out OUT --toy           # tiny, on a CPU, as a test

Needs torch >= 2.11, timm, deepspeed, pydantic, PyYAML, pyarrow, safetensors, blake3, psutil and
Pillow; missing ones are named before the start. On a machine without internet, bring wheels:

    pip wheel --no-deps --no-build-isolation -w wheels deepspeed    # comes as source; any machine
    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform ... -d wheels \\
        pydantic pydantic-core annotated-types typing-inspection hjson blake3 simplejpeg
    python -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl     # on that machine
    PYTHONPATH=$PWD:/tmp/site python benchmarks/gpu_training.py --out OUT

Owns: the sections, their order and time, and the table at the end.
Leaves out: what a section does (`training.speed`, `training.checks`), sizes (`training.scale`).

Sections run in one worker process. When it dies, or a section takes too long, the section has
failed and a new worker continues with the next. OUT/results.json is written after every
measurement. Exit code 1: a check or a section failed. A missed goal is not a failure.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

NEEDED = {
    **{"torch": "torch", "timm": "timm", "deepspeed": "deepspeed", "pydantic": "pydantic"},
    **{"yaml": "PyYAML", "pyarrow": "pyarrow", "safetensors": "safetensors", "blake3": "blake3"},
    **{"PIL": "pillow", "psutil": "psutil", "numpy": "numpy", "hjson": "hjson", "tqdm": "tqdm"},
    **{"msgpack": "msgpack", "cpuinfo": "py-cpuinfo", "einops": "einops"},
}
# Seconds after which a section is killed, in the order in which they run: the most important come
# first, since the command as a whole may be cut short.
SECTIONS = {
    "rates": 40,
    "checks": 90,
    "L16": 90,
    "tax": 120,
    "H14": 100,
    "B16": 80,
    "profile": 60,
    "data": 100,
    "timm": 130,
    "checkpoint": 70,
    "start": 120,
    "variants": 120,
}
# A section should end after this share of its time.
ASKED_AT = 0.7
STARTING_S = 75


def main() -> None:
    options = parse_arguments()
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"missing packages; run: pip install {' '.join(missing)}", file=sys.stderr)
        raise SystemExit(2)
    if options.first_step:
        first_step(options)
    elif options.worker:
        work_through(options)
    else:
        watch(options)


def watch(options: argparse.Namespace) -> None:
    """Start workers until no section remains; does not import torch."""
    from benchmarks.training.scale import Results

    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out)
    results.values["environment"] = environment(options)
    for name in options.sections:
        results.values["sections"].pop(name, None)  # of an earlier command into the same folder
    results.write()
    (options.out / "worker.log").unlink(missing_ok=True)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="vitscale-gpu-", dir=options.work))
    end = time.monotonic() + 60 * options.minutes
    left = list(options.sections)
    try:
        while left and time.monotonic() < end - 10:
            left = run_worker(left, options, work, end)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    results = Results(options.out)
    for name in left:
        results.record(name, {"status": "left out: no time left"})
    note_recompiling(results, options.out)
    print_summary(results)
    failed = [n for n, s in results.values["sections"].items() if s.get("status") in ("failed",)]
    wrong = [n for n, s in results.values["sections"].items() if s.get("wrong")]
    raise SystemExit(1 if failed or wrong else 0)


def run_worker(
    sections: list[str], options: argparse.Namespace, work: Path, end: float
) -> list[str]:
    """Run one worker over `sections`; returns those that remain. Records the one it died in."""
    from benchmarks.training.scale import Results

    command = [sys.executable, __file__, "--worker", "--sections", ",".join(sections)]
    command += ["--out", str(options.out), "--work", str(work), *(["--toy"] * options.toy)]
    command += ["--kill-section", options.kill_section] if options.kill_section else []
    command += ["--minutes", str((end - time.monotonic()) / 60)]
    log_path = options.out / "worker.log"
    shown = log_path.stat().st_size if log_path.exists() else 0
    with open(log_path, "a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    began, current = time.monotonic(), ""
    reason = ""
    while process.poll() is None and not reason:
        time.sleep(0.1)
        now = Results(options.out).values.get("now", {})
        if now.get("section", "") != current:
            current, began = now.get("section", ""), time.monotonic()
        limit = patience(options) * (SECTIONS[current] if current else STARTING_S)
        if time.monotonic() > began + limit:
            reason = f"killed after {limit} s"
        elif time.monotonic() > end:
            reason = "killed: the command's time is over"
        shown = show_log(log_path, shown, quiet=options.toy)
    if reason:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    show_log(log_path, shown, quiet=options.toy)
    results = Results(options.out)
    done = [name for name in sections if "status" in results.values["sections"].get(name, {})]
    left = [name for name in sections if name not in done]
    results.values.pop("now", None)
    results.write()
    if left and (reason or process.returncode):
        # A worker that reached no section would not reach the next one either.
        died = [current] if current in left else left
        values = {
            "status": "failed",
            "error": reason or f"the process ended with {process.returncode}",
            "log": log_path.read_text(errors="replace")[-3000:],
        }
        for name in died:
            results.record(name, values)
        print(f"{', '.join(died)}: failed: {values['error']}\n{values['log'][-1000:]}", flush=True)
        left = [name for name in left if name not in died]
    return left


def patience(options: argparse.Namespace) -> int:
    """Toy runs may be slow: they share few cores."""
    return 10 if options.toy else 1


def show_log(path: Path, shown: int, *, quiet: bool) -> int:
    """Print the new lines of the worker's log; returns how much has been shown."""
    text = path.read_text(errors="replace")
    lines = [line for line in text[shown:].splitlines() if line.startswith("> ")]
    if lines and not quiet:
        print("\n".join(line[2:] for line in lines), flush=True)
    return len(text)


def work_through(options: argparse.Namespace) -> None:
    """The worker: run every section, catching its errors."""
    from benchmarks.training.checks import check_engine, measure_checkpoint, measure_data
    from benchmarks.training.scale import GPU, TOY, Context, Results
    from benchmarks.training.speed import (
        measure_model,
        measure_profile,
        measure_rates,
        measure_start,
        measure_tax,
        measure_timm,
        measure_variants,
    )
    from vitscale.distributed.world import process_group

    measures: dict[str, Callable[[Context], None]] = {
        **{"rates": measure_rates, "checks": check_engine, "tax": measure_tax},
        **{"L16": measure_model, "H14": measure_model, "B16": measure_model},
        **{"timm": measure_timm, "data": measure_data, "checkpoint": measure_checkpoint},
        **{"start": measure_start, "profile": measure_profile, "variants": measure_variants},
    }
    end = time.monotonic() + 60 * options.minutes
    results = Results(options.out)
    device = "cpu" if options.toy else "cuda"
    with process_group(
        device=device, timeout_min=5, num_threads=1 if options.toy else None
    ) as world:
        for name in options.sections:
            if end - time.monotonic() < 5:
                break
            ctx = Context(
                world=world,
                scale=TOY if options.toy else GPU,
                work=options.work,
                out=options.out,
                section=name,
                deadline=min(
                    end - 5, time.monotonic() + ASKED_AT * patience(options) * SECTIONS[name]
                ),
                results=results,
            )
            run_section(ctx, kill_this_process if name == options.kill_section else measures[name])
    results.values.pop("now", None)
    results.write()
    skip_teardown(0)


def kill_this_process(ctx: Any) -> None:
    """As when the system kills the process in a section."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_section(ctx: Any, measure: Callable[[Any], None]) -> None:
    ctx.results.values["now"] = {"section": ctx.section}
    ctx.record(seconds=0.0)
    start, values = time.monotonic(), {"status": "done"}
    try:
        measure(ctx)
    except Exception as error:  # the other sections must run
        values = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:3000]}
        values["log"] = traceback.format_exc()[-3000:]
        print(values["log"], flush=True)
    ctx.record(**values, seconds=time.monotonic() - start)
    print(f"> {ctx.section}: {values['status']} in {time.monotonic() - start:.0f} s", flush=True)


def skip_teardown(code: int) -> None:
    from vitscale.config.errors import skip_teardown as skip

    skip(code)


def first_step(options: argparse.Namespace) -> None:
    from benchmarks.training.scale import GPU, TOY
    from benchmarks.training.speed import COMPARED, print_first_step

    scale = TOY if options.toy else GPU
    print_first_step(
        options.first_step,
        scale.models[COMPARED],
        batch=scale.compared_batch,
        compiler=scale.compiler,
        fp32=options.toy,
    )


def note_recompiling(results: Any, out: Path) -> None:
    """torch reports only in its log that a function was compiled too often and runs uncompiled."""
    text = (out / "worker.log").read_text(errors="replace")
    hit = "recompile_limit" in text or "cache_size_limit" in text
    results.values["hit_recompile_limit"] = hit
    results.write()


def environment(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.platform()}
    for name in NEEDED.values():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total",
        "--format=csv,noheader",
    ]
    try:
        gpu = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        gpu = ""
    return found | {
        "gpu": gpu or "none",
        "cores": len(os.sched_getaffinity(0)),
        "toy": options.toy,
    }


def print_summary(results: Any) -> None:
    """A short table at the end of the output."""
    sections = results.values["sections"]
    print("\nsection      status    results")
    for name, values in sections.items():
        print(f"{name:12} {values.get('status', 'cut short'):9} {summary(values)}")
        for line in [*values.get("wrong", []), values.get("error", "")]:
            if line:
                print(f"{'':12} WRONG: {line.splitlines()[0][:200]}")
    if results.values.get("hit_recompile_limit"):
        print("torch's limit of recompiling was hit: something ran uncompiled (OUT/worker.log)")
    print(f"all results: {results.path}", flush=True)


def summary(values: dict[str, Any]) -> str:
    """The main results of a section in one line."""
    words = []
    for key in (
        *("images_per_s", "of_matmul", "of_datasheet", "of_products", "goal", "stretch_goal"),
        *("speed_over_bare", "speed_over_timm", "real_over_synthetic", "data_wait"),
        *("loader_images_per_s", "stall_over_torch_save", "stall_over_copy", "warm_over_whole"),
        *("idle_share", "first_step_s", "losses_apart", "memory", "matmul"),
    ):
        value = values.get(key)
        if isinstance(value, float):
            words.append(f"{key} {value:.4g}")
        elif isinstance(value, dict):
            words.append(f"{key} ({', '.join(f'{k} {short(v)}' for k, v in value.items())})")
    return "; ".join(words)


def short(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("median", value.get("s"))
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu_training"), help="folder for results"
    )
    parser.add_argument("--sections", help="some of: " + ",".join(SECTIONS))
    parser.add_argument(
        "--minutes", type=float, help="limit for everything; default 9 (60 with --toy)"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for shards and checkpoints; default: /tmp"
    )
    parser.add_argument("--toy", action="store_true", help="tiny, on the CPU")
    parser.add_argument(
        "--kill-section", choices=SECTIONS, help="kill the process in this section, as a test"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-step", choices=("blocks", "whole"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.minutes = options.minutes or (60.0 if options.toy else 9.0)
    options.sections = options.sections.split(",") if options.sections else list(SECTIONS)
    unknown = sorted(set(options.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"--sections: {', '.join(unknown)} is none of {', '.join(SECTIONS)}")
    return options


if __name__ == "__main__":
    main()
