"""Show whether runs are queued, running, paused, stopped, finished or failed, and why.

    python launch/status.py [RUN ...] [--watch | --follow | --json]

RUN: the folder of a run or a chain, its name below runs/, or a folder of runs; default: all below
runs/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    from launch.chains.status import ChainStatus, chain_lines, chain_values, read_chain
    from launch.jobs.queue import NoAnswerError, QueuedJob, user_jobs
    from launch.jobs.status.finding import CHAIN_FILE, find_runs
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
    seen = look(find_runs(arguments.runs))
    if arguments.json:
        values = [*map(chain_values, seen.chains), *map(as_values, seen.runs)]
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
    return parser.parse_args()


def follow(folders: Sequence[Path]) -> int:
    """Follow the only run of `folders`. Returns its exit code."""
    [folder, *others] = folders
    if others or (folder / CHAIN_FILE).is_file():
        what = f"these are {len(folders)}" if others else f"{folder} is a chain"
        raise UserError(
            f"--follow shows one run, but {what}",
            where="command line",
            next_step="name one run, or use --watch",
        )
    return follow_run(folder, output=sys.stdout)


def watch(names: Sequence[str]) -> None:
    """Show the states again and again. Ends when no run is active, or by Ctrl-C."""
    try:
        while True:
            seen = look(find_runs(names))
            start = CLEAR_SCREEN if sys.stdout.isatty() else f"\n{time.strftime('%H:%M:%S')}\n"
            print(start + seen.text, flush=True)
            if not seen.is_active:
                return
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What all runs and chains did at one moment."""

    runs: list[RunStatus]
    chains: list[ChainStatus]
    now: float

    @property
    def is_active(self) -> bool:
        return any(run.state in ACTIVE for run in self.runs) or any(
            chain.is_active for chain in self.chains
        )

    @property
    def text(self) -> str:
        parts = ["\n".join(chain_lines(chain, now=self.now)) for chain in self.chains]
        return "\n".join([*parts, as_text(self.runs, now=self.now)]).rstrip()


def look(folders: Sequence[Path]) -> Look:
    """The states of all runs and chains. SLURM is asked once."""
    jobs: list[QueuedJob] | None = None
    note = None
    try:
        jobs = user_jobs()
    except NoAnswerError as error:
        note = f"as its records say; SLURM does not answer: {error}"
    now = time.time()
    of_chains = [folder for folder in folders if (folder / CHAIN_FILE).is_file()]
    chains = [read_chain(folder, jobs=jobs, note=note, now=now) for folder in of_chains]
    # The jobs of a chain's data preparation are in a run folder of their own.
    shown = {run.folder.absolute() for chain in chains for run in chain.runs}
    runs = [
        read_status(folder, jobs=jobs, note=note, now=now)
        for folder in folders
        if folder not in of_chains and folder.absolute() not in shown
    ]
    return Look(runs=runs, chains=chains, now=now)


if __name__ == "__main__":
    run_script(main)
