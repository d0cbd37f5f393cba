"""Show whether runs are queued, running, paused, stopped, finished or failed, and why.

    python launch/status.py [RUN ...] [--watch | --follow | --json]

RUN: a run folder, its name below runs/, or a folder of runs; default: all below runs/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

try:
    from launch.jobs.queue import NoAnswerError, QueuedJob, user_jobs
    from launch.jobs.status.finding import find_runs
    from launch.jobs.status.following import EXIT_INTERRUPTED, follow_run
    from launch.jobs.status.reading import ACTIVE, RunStatus, read_status
    from launch.jobs.status.text import as_text, as_values
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

# squeue loads the controller of the whole site.
WATCH_SECONDS = 10.0
CLEAR_SCREEN = "\x1b[2J\x1b[H"


def main() -> None:
    arguments = parse()
    if arguments.follow:
        raise SystemExit(follow(find_runs(arguments.runs)))
    if arguments.watch:
        watch(arguments.runs)
        return
    runs, now = read_all(find_runs(arguments.runs))
    if arguments.json:
        print(json.dumps([as_values(run) for run in runs], indent=2))
    else:
        print(as_text(runs, now=now))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="python launch/status.py [RUN ...] [--watch | --follow | --json]",
        description="Show whether runs are queued, running, paused, stopped, finished or failed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run folder, name below runs/, or folder of runs"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--watch", action="store_true", help="show again every 10 s until nothing runs or waits"
    )
    mode.add_argument(
        "--follow", action="store_true", help="show the log of one run until the run ends"
    )
    mode.add_argument("--json", action="store_true", help="print a list of objects")
    return parser.parse_args()


def follow(folders: Sequence[Path]) -> int:
    """Follow the only run of `folders`. Returns its exit code."""
    if len(folders) > 1:
        raise UserError(
            f"--follow shows one run, but these are {len(folders)}",
            where="command line",
            allowed=", ".join(map(str, folders[:10])),
        )
    return follow_run(folders[0], output=sys.stdout)


def watch(names: Sequence[str]) -> None:
    """Show the states again and again. Ends when no run is active, or by Ctrl-C."""
    try:
        while True:
            runs, now = read_all(find_runs(names))
            start = CLEAR_SCREEN if sys.stdout.isatty() else f"\n{time.strftime('%H:%M:%S')}\n"
            print(start + as_text(runs, now=now), flush=True)
            if not any(run.state in ACTIVE for run in runs):
                return
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def read_all(folders: Sequence[Path]) -> tuple[list[RunStatus], float]:
    """The states of all runs, and the time of asking. SLURM is asked once."""
    jobs: list[QueuedJob] | None = None
    note = None
    try:
        jobs = user_jobs()
    except NoAnswerError as error:
        note = f"as its records say; SLURM does not answer: {error}"
    now = time.time()
    return [read_status(folder, jobs=jobs, note=note, now=now) for folder in folders], now


if __name__ == "__main__":
    run_script(main)
