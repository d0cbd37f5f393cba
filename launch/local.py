"""Run any stage on this machine, as the same job that SLURM would run.

python launch/local.py --config configs/demo/pretrain.yaml [key=value ...] --num-procs 2
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

try:
    from launch.local_run import CONTROLLER_SECONDS, end, failure_report, follow
    from launch.preparation import (
        RUN_TYPES,
        check_job,
        launchable,
        num_cores,
        prepare_job,
        with_num_workers,
    )
    from launch.submission import Submission, start_locally
    from vitscale.config.command_line import load_command
    from vitscale.errors import EXIT_STOPPED_RESUMABLE, UserError, run_script
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
    submission = start_locally(
        job, launch=run.launch, num_procs=num_procs, folder=folder, independent=job.independent
    )
    print(f"running {num_procs} process(es); logs in {submission.folder}", flush=True)
    raise SystemExit(watch(submission))


def watch(submission: Submission) -> int:
    """Follow the job; SIGTERM stops it with a checkpoint, Ctrl-C ends it at once."""

    def forward(signum: int, frame: FrameType | None) -> None:
        assert submission.controller is not None
        submission.controller.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGUSR2, forward)
    try:
        ending = follow(submission, output=sys.stdout)
    except KeyboardInterrupt:
        print("\ninterrupted: ending all processes", file=sys.stderr, flush=True)
        end(submission, wait_first=CONTROLLER_SECONDS)
        return EXIT_INTERRUPTED
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
