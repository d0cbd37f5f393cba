"""Run any stage on this machine, as the same job that SLURM would run.

python launch/local.py --config configs/demo/pretrain.yaml [key=value ...] --num-procs 2
"""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

try:
    from launch.jobs.job import StageJob
    from launch.jobs.local import CONTROLLER_SECONDS, StopNote, end, failure_report, follow
    from launch.jobs.preparation import (
        RUN_TYPES,
        check_job,
        launchable,
        num_cores,
        prepare_job,
        with_num_workers,
    )
    from launch.jobs.submission import Submission, start_locally
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, run_script
    from vitscale.runs.launching import LaunchSettings
except ModuleNotFoundError as error:
    print(f"vitscale is not installed ({error}). Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

NUM_PROCS = "--num-procs"
EXIT_INTERRUPTED = 130


def main() -> None:
    command = load_command(
        RUN_TYPES,
        script="launch/local.py",
        description=f"Run a stage on this machine. {NUM_PROCS} N (default 1) sets the processes.",
        argv=_without_num_procs(sys.argv[1:]),
    )
    run = launchable(command.run)
    num_procs = _num_procs(sys.argv[1:])
    check_job(run, num_tasks=num_procs, cluster="local")
    run = with_num_workers(run, num_cores=max(1, num_cores() // num_procs))
    job, folder = prepare_job(run, cluster="local")
    raise SystemExit(start_and_watch(job, launch=run.launch, num_procs=num_procs, folder=folder))


def start_and_watch(job: StageJob, *, launch: LaunchSettings, num_procs: int, folder: Path) -> int:
    """Run the job to its end; its exit code. SIGTERM stops it with a checkpoint."""
    stop = StopNote()
    submission = start_locally(
        job, launch=launch, num_procs=num_procs, folder=folder, independent=job.independent
    )
    return watch(submission, stop=stop)


def watch(submission: Submission, *, stop: StopNote) -> int:
    """Follow the job; Ctrl-C ends it at once. However this ends, no process of it is left."""
    try:
        print(
            f"running {submission.num_tasks} process(es); logs in {submission.folder}", flush=True
        )
        ending = follow(submission, output=sys.stdout, stop=stop)
    except KeyboardInterrupt:
        # A second Ctrl-C would leave processes behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with suppress(OSError):
            print("\ninterrupted: ending all processes", file=sys.stderr, flush=True)
        end(submission, wait_first=CONTROLLER_SECONDS)
        return EXIT_INTERRUPTED
    except BaseException:
        # The reader of a pipe went away, or the disk of the output is full.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert submission.controller is not None
        submission.controller.send_signal(signal.SIGINT)
        end(submission, wait_first=CONTROLLER_SECONDS)
        raise
    if ending.exit_code == EXIT_STOPPED_RESUMABLE:
        print("stopped; the same command goes on where it was", flush=True)
    elif ending.exit_code:
        print(failure_report(submission, ending), file=sys.stderr, flush=True)
    return ending.exit_code


def _num_procs(argv: list[str]) -> int:
    """The value after --num-procs; the last one counts."""
    values = []
    for position, word in enumerate(argv):
        if word == NUM_PROCS:
            values.append(argv[position + 1] if position + 1 < len(argv) else "")
        elif word.startswith(f"{NUM_PROCS}="):
            values.append(word.partition("=")[2])
    value = values[-1] if values else "1"
    if not value.isdigit() or int(value) == 0:
        raise UserError(
            f"{value!r} is not a number of processes", where=NUM_PROCS, allowed="1, 2, …"
        )
    return int(value)


def _without_num_procs(argv: list[str]) -> list[str]:
    """The other arguments, which are the configuration's."""
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == NUM_PROCS:
            next(words, None)
        elif not word.startswith(f"{NUM_PROCS}="):
            rest.append(word)
    return rest


if __name__ == "__main__":
    run_script(main)
