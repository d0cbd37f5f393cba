"""Run any stage on this machine as the job that SLURM would run.

    python launch/local.py --config configs/demo/pretrain.yaml [key=value ...] --num-procs 2
    python launch/local.py --study configs/studies/vit_subsets.yaml --parallel 2

--study trains a grid of runs and draws the results.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import suppress
from pathlib import Path

try:
    from launch.jobs.job import StageJob
    from launch.jobs.monitor import CONTROLLER_SECONDS, StopFlag, end, failure_report, follow
    from launch.jobs.preparation import (
        RUN_TYPES,
        check_job,
        launchable,
        prepare_job,
        with_num_workers,
    )
    from launch.jobs.submission import Submission, start_locally
    from launch.studies.command import names_a_study, run_study_locally
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, run_script
    from vitscale.distributed.processes import num_cores
    from vitscale.runs.launching import LaunchSettings
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

EXIT_INTERRUPTED = 130


def main() -> None:
    if names_a_study(sys.argv[1:]):
        raise SystemExit(run_study_locally(sys.argv[1:]))
    num_procs, argv = parse_num_procs()
    command = load_command(
        RUN_TYPES,
        script="launch/local.py",
        description="Run a stage on this machine. --num-procs N (default 1) sets the processes.",
        argv=argv,
    )
    run = launchable(command.run)
    check_job(run, num_tasks=num_procs, cluster="local")
    run = with_num_workers(run, num_cores=max(1, num_cores() // num_procs))
    job, folder = prepare_job(run, cluster="local")
    raise SystemExit(start_and_watch(job, launch=run.launch, num_procs=num_procs, folder=folder))


def parse_num_procs() -> tuple[int, list[str]]:
    """The number of processes, and the other arguments, which belong to the configuration."""
    parser = argparse.ArgumentParser(
        usage="python launch/local.py --config FILE [key=value ...] [--num-procs N]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--num-procs", default="1", metavar="N")
    arguments, others = parser.parse_known_args()
    value = arguments.num_procs
    if not value.isdecimal() or int(value) == 0:
        raise UserError(
            f"{value!r} is not a number of processes", where="--num-procs", allowed="1, 2, …"
        )
    return int(value), others


def start_and_watch(job: StageJob, *, launch: LaunchSettings, num_procs: int, folder: Path) -> int:
    """Run the job to its end and return its exit code. SIGTERM stops it with a checkpoint."""
    stop = StopFlag()
    submission = start_locally(
        job, launch=launch, num_procs=num_procs, folder=folder, independent=job.independent
    )
    return watch(submission, stop=stop)


def watch(submission: Submission, *, stop: StopFlag) -> int:
    """Follow the job. Ctrl-C ends it at once. No process is left, however this ends."""
    try:
        print(
            f"running {submission.num_tasks} process(es); logs in {submission.folder}", flush=True
        )
        result = follow(submission, output=sys.stdout, stop=stop)
    except KeyboardInterrupt:
        # A second Ctrl-C would leave processes running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(OSError):
            print("\ninterrupted: ending all processes", file=sys.stderr, flush=True)
        end(submission, wait_first=CONTROLLER_SECONDS)
        return EXIT_INTERRUPTED
    except BaseException:
        # For example: the reader of our output has closed the pipe, or the disk is full.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert submission.controller is not None
        submission.controller.send_signal(signal.SIGINT)
        end(submission, wait_first=CONTROLLER_SECONDS)
        raise
    if result.exit_code == EXIT_STOPPED_RESUMABLE:
        print("stopped; the same command resumes the run", flush=True)
    elif result.exit_code:
        print(failure_report(submission, result), file=sys.stderr, flush=True)
    return result.exit_code


if __name__ == "__main__":
    run_script(main)
