"""Show whether runs are queued, running, paused, stopped, finished or failed, and why.

    python launch/status.py [RUN ...] [--watch | --follow | --json]
    python launch/status.py RUN --watch --stalled-min 30 --call "COMMAND ..."

RUN: the folder of a run, a study or a chain, its name below runs/, or a folder of runs; default:
all below runs/.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    from launch.jobs.queue import NoAnswerError, QueuedJob, user_jobs
    from launch.jobs.status.finding import PLAN_FILE, find_runs
    from launch.jobs.status.following import EXIT_INTERRUPTED, follow_run
    from launch.jobs.status.reading import RunStatus, read_status
    from launch.jobs.status.text import as_text, as_values
    from launch.jobs.status.watching import Watcher
    from launch.plans.status import PlanStatus, plan_lines, plan_values, read_plan
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

# squeue loads the controller of the whole site.
WATCH_SECONDS = 10.0
CLEAR_SCREEN = "\x1b[2J\x1b[H"


def main() -> None:
    arguments = parse()
    if not arguments.watch and (arguments.call or arguments.stalled_min is not None):
        raise UserError("--stalled-min and --call need --watch", where="command line")
    if arguments.follow:
        raise SystemExit(follow(find_runs(arguments.runs)))
    if arguments.watch:
        raise SystemExit(watch(arguments.runs, watcher(arguments)))
    seen = read_report(find_runs(arguments.runs))
    if arguments.json:
        values = [*map(plan_values, seen.plans), *map(as_values, seen.runs)]
        print(json.dumps(values, indent=2))
    else:
        print(seen.text)


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
    parser.add_argument(
        "--stalled-min",
        type=float,
        metavar="N",
        help="with --watch: end with code 3 when all active runs have made no step for N minutes",
    )
    parser.add_argument(
        "--call",
        metavar="COMMAND",
        help="with --watch: command for every run that stalls or ends, which finds a sentence in "
        "the variable VITSCALE_SENTENCE and the folder in VITSCALE_RUN",
    )
    return parser.parse_args()


def watcher(arguments: argparse.Namespace) -> Watcher:
    """Raise UserError for a command that cannot be run."""
    try:
        command = shlex.split(arguments.call or "")
    except ValueError as error:
        raise UserError(f"{arguments.call!r}: {error}", where="--call") from None
    if command and shutil.which(command[0]) is None:
        raise UserError(
            f"there is no command {command[0]}",
            where="--call",
            next_step="give a program and its arguments; no shell is used",
        )
    return Watcher(stalled_min=arguments.stalled_min, command=command)


def follow(folders: Sequence[Path]) -> int:
    """Follow the only run of `folders`. Returns its exit code."""
    [folder, *others] = folders
    if others or (folder / PLAN_FILE).is_file():
        what = f"these are {len(folders)}" if others else f"{folder} is a study or a chain"
        raise UserError(
            f"--follow shows one run, but {what}",
            where="command line",
            next_step="name one run, or use --watch",
        )
    return follow_run(folder, output=sys.stdout)


def watch(names: Sequence[str], alarms: Watcher) -> int:
    """Show the states again and again, until no run is active or all are stalled, or by Ctrl-C.

    Returns the exit code, see `Watcher.exit_code`.
    """
    try:
        while True:
            seen = read_report(find_runs(names))
            start = CLEAR_SCREEN if sys.stdout.isatty() else f"\n{time.strftime('%H:%M:%S')}\n"
            print(start + seen.text, flush=True)
            runs = [*seen.runs, *(run for plan in seen.plans for run in plan.runs)]
            for alarm in alarms.look(runs, slurm_answers=seen.slurm_answers, now=seen.now):
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {alarm}", flush=True)
            if alarms.is_over:
                return alarms.exit_code
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusReport:
    """What all runs and plans did at one moment."""

    runs: list[RunStatus]
    plans: list[PlanStatus]
    slurm_answers: bool
    now: float

    @property
    def text(self) -> str:
        parts = ["\n".join(plan_lines(plan, now=self.now)) for plan in self.plans]
        return "\n".join([*parts, as_text(self.runs, now=self.now)]).rstrip()


def read_report(folders: Sequence[Path]) -> StatusReport:
    """The states of all runs and plans. SLURM is asked once."""
    jobs: list[QueuedJob] | None = None
    note = None
    try:
        jobs = user_jobs()
    except NoAnswerError as error:
        note = f"as its records say; SLURM does not answer: {error}"
    now = time.time()
    of_plans = [folder for folder in folders if (folder / PLAN_FILE).is_file()]
    plans = [read_plan(folder, jobs=jobs, note=note, now=now) for folder in of_plans]
    # The jobs of a chain's data preparation are in a run folder of their own.
    shown = {run.folder.absolute() for plan in plans for run in plan.runs}
    runs = [
        read_status(folder, jobs=jobs, note=note, now=now)
        for folder in folders
        if folder not in of_plans and folder.absolute() not in shown
    ]
    return StatusReport(runs=runs, plans=plans, slurm_answers=jobs is not None, now=now)


if __name__ == "__main__":
    run_script(main)
