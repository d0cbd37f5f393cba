"""Show whether runs are queued, running, paused, stopped, finished or failed, and why.

    python launch/status.py [RUN ...] [--json]

RUN: the folder of a run or a chain, its name below runs/, or a folder of runs; default: all below
runs/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

try:
    from launch.jobs.run_folders import find_runs
    from launch.jobs.run_states import jobs_for, read_state
    from launch.jobs.status_text import as_text
    from vitscale.config.errors import run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    arguments = parse()
    folders = find_runs(arguments.runs)

    # SLURM is asked once for all runs.
    jobs = jobs_for(folders)
    runs = [read_state(folder, jobs) for folder in folders]
    if arguments.json:
        values = [{"name": run.folder.name, **asdict(run)} for run in runs]
        # Numbers that are not finite become strings, as in journals.
        strict = json.loads(json.dumps(values, default=str), parse_constant=str)
        print(json.dumps(strict, indent=2))
    else:
        print(as_text(runs, now=time.time()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="vitscale status [RUN ...] [--json]",
        description="Show whether runs are queued, running, paused, stopped, finished or failed.",
        allow_abbrev=False,
    )

    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder, name below runs/, or folder of runs",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
