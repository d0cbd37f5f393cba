"""Check and time training on one GPU, in four calls of at most nine minutes each.

    python benchmarks/gpu_training.py --call 1 --out OUT        # then 2, 3 and 4
    python benchmarks/gpu_training.py --call 2 --out OUT --sections H14,tax
    python benchmarks/gpu_training.py --call 1 --out OUT --toy  # tiny, on a CPU, as a rehearsal
    python benchmarks/gpu_training.py --report OUT OTHER        # goals reached, of several folders

A machine without internet needs the folder that `benchmarks/training/pack.py` makes.

Owns: the processes of a call and their time.
Leaves out: which sections a call has (`training.plan`), what they do (`training.checks`, `speed`,
`data`, `rows`), the table at the end (`training.report`).

Each section runs in a process of its own, which ends its loops when its time is over and is killed
a little later. It writes OUT/SECTION.json after every measurement, so what was measured is kept
whatever happens. Exit code 1: a check or a section failed. A missed goal is not a failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
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

from benchmarks.training.plan import CALLS, GRACE_S, MAX_CALL_S, SECTIONS, Section

NEEDED = {
    **{"torch": "torch", "timm": "timm", "deepspeed": "deepspeed", "pydantic": "pydantic"},
    **{"yaml": "PyYAML", "pyarrow": "pyarrow", "safetensors": "safetensors", "blake3": "blake3"},
    **{"PIL": "pillow", "psutil": "psutil", "numpy": "numpy", "hjson": "hjson", "tqdm": "tqdm"},
    **{"msgpack": "msgpack", "cpuinfo": "py-cpuinfo", "einops": "einops", "ninja": "ninja"},
}


def main() -> None:
    options = parse_arguments()
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing and not options.report:
        print(f"missing packages: {', '.join(missing)}", file=sys.stderr)
        print("run: pip install -e ., or see benchmarks/training/pack.py", file=sys.stderr)
        raise SystemExit(2)
    if options.report:
        report(options.report)
    elif options.first_step:
        in_process(options, "start", first_step=options.first_step)
    elif options.section:
        in_process(options, options.section)
    else:
        run_call(options)


def run_call(options: argparse.Namespace) -> None:
    """Run the sections one after the other; does not import torch."""
    from benchmarks.training.report import print_summary

    start = time.monotonic()
    wanted = options.sections or [section.name for section in CALLS[options.call]]
    sections = [SECTIONS[name] for name in wanted]
    options.out.mkdir(parents=True, exist_ok=True)
    for section in sections:  # of an earlier command into the same folder
        (options.out / f"{section.name}.json").unlink(missing_ok=True)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="vitscale-gpu-", dir=options.work))
    due = start
    try:
        for section in sections:
            due = min(due + section.seconds, start + 60 * options.minutes - GRACE_S)
            run_section(section, options, work, due=due)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\ncall {options.call}: {time.monotonic() - start:.0f} s")
    failed = print_summary(options.out, [section.name for section in sections])
    raise SystemExit(1 if failed else 0)


def run_section(section: Section, options: argparse.Namespace, work: Path, *, due: float) -> None:
    """Run a section in a process of its own until `due` (time.monotonic), or kill it."""
    from benchmarks.training.scale import Results

    results, start = Results(options.out, section.name), time.monotonic()
    if due - start < 5:
        results.record({"status": "left out", "error": "no time left in this call"})
        return
    command = [sys.executable, __file__, "--section", section.name, "--due", str(due)]
    command += ["--out", str(options.out), "--work", str(work), *(["--toy"] * options.toy)]
    command += ["--kill-section", options.kill_section] if options.kill_section else []
    log_path = options.out / "log.txt"
    # One cache for the sections of a call; none that an earlier command left.
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(work / "compiled")}
    folders |= {"TRITON_CACHE_DIR": str(work / "compiled/triton")}
    with open(log_path, "a") as log:
        log.write(f"=== {section.name}\n")
        log.flush()
        at = log.tell()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | folders,
        )
    reason = ""
    try:
        code = process.wait(timeout=max(1.0, due + GRACE_S - 5 - time.monotonic()))
    except subprocess.TimeoutExpired:
        reason, code = "killed: it did not end when its time was over", -signal.SIGKILL
    # Also what a dead process may have left: workers of a loader.
    with_group(process.pid, signal.SIGKILL)
    process.wait()
    seconds = time.monotonic() - start
    text = log_path.read_text(errors="replace")[at:]
    results.values = Results.read(results.path)
    if code or "status" not in results.values:
        error = reason or results.values.get("error") or f"the process ended with {code}"
        results.record({"status": "failed", "error": error, "log": text[-3000:]})
    # torch says only in its log that a function was compiled too often and runs uncompiled.
    hit = "recompile_limit" in text or "cache_size_limit" in text
    results.record({"process_s": seconds, "hit_recompile_limit": hit})
    print(f"{section.name}: {results.values['status']} in {seconds:.0f} s", flush=True)


def with_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def import_sections() -> dict[str, Callable[[Any], None]]:
    """What each section does."""
    from benchmarks.training import checks, data, rows, speed

    return {
        **{"smoke": checks.check_smoke, "losses": checks.check_losses},
        **{"rates": speed.measure_rates, "profile": speed.measure_profile},
        **{f"compile_{name}": speed.measure_compiling for name in ("L16", "H14", "B16")},
        **{name: speed.measure_model for name in ("L16", "H14", "B16")},
        **{"tax": speed.measure_tax, "data": data.measure_data, "start": data.measure_start},
        **{"checkpoint": data.measure_checkpoint, "recipes": rows.measure_recipes},
        **{"timm": rows.measure_timm, "attention": rows.measure_attention},
        **{"variants": rows.measure_variants},
    }


def in_process(options: argparse.Namespace, name: str, *, first_step: str = "") -> None:
    """A section, in a process of its own; or a first step for the section `start`."""
    from benchmarks.training.data import run_first_step
    from benchmarks.training.scale import GPU, TOY, Context, Results
    from vitscale.distributed.failures.ending import skip_teardown
    from vitscale.distributed.world import process_group

    scale = TOY if options.toy else GPU
    start = time.monotonic()
    with process_group(
        device=scale.device,  # type: ignore[arg-type]  # one of its literals
        timeout_min=5,
        num_threads=1 if options.toy else None,
    ) as world:
        ctx = Context(
            world=world,
            scale=scale,
            work=options.work,
            out=options.out,
            section=name,
            deadline=options.due,
            section_seconds=options.due - start,
            results=Results(options.out, name),
        )
        if first_step:
            run_first_step(ctx, first_step)
        else:
            code = run_and_record(ctx, kill=options.kill_section == name)
    skip_teardown(0 if first_step else code)


def run_and_record(ctx: Any, *, kill: bool) -> int:
    from benchmarks.training.scale import OutOfTime

    ctx.record(seconds=0.0)
    if kill:  # as when the system kills the process
        os.kill(os.getpid(), signal.SIGKILL)
    start, values = time.monotonic(), {"status": "done"}
    try:
        import_sections()[ctx.section](ctx)
    except OutOfTime as error:
        values = {"status": "cut short", "error": str(error)}
    except Exception as error:
        values = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:3000]}
        traceback.print_exc()
    ctx.record(**values, seconds=time.monotonic() - start)
    return int(values["status"] == "failed")


def report(folders: list[Path]) -> None:
    from benchmarks.training.report import print_report
    from benchmarks.training.scale import read_results

    merged: dict[str, dict[str, Any]] = {}
    for folder in folders:
        merged |= read_results(folder)
    print_report(merged)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--call", type=int, choices=sorted(CALLS), default=1, help="which sections")
    parser.add_argument("--sections", help="some of them: " + ",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_training"), help="for results")
    parser.add_argument("--work", type=Path, help="folder for shards and checkpoints")
    parser.add_argument(
        "--minutes", type=float, default=MAX_CALL_S / 60, help="longest that the call may take"
    )
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--report", type=Path, nargs="+", help="print the goals of these folders")
    for internal in ("--section", "--first-step", "--kill-section"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    parser.add_argument("--due", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sections = options.sections.split(",") if options.sections else []
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"--sections: no {', '.join(unknown)}; allowed: {', '.join(SECTIONS)}")
    return options


if __name__ == "__main__":
    main()
