"""Run any stage on this machine as the job that SLURM would run.

    python launch/local.py --config configs/demo/pretrain.yaml [key=value ...] --num-procs 2
    python launch/local.py --study configs/studies/digits_objectives.yaml --parallel 2

--study trains a grid of runs.
"""

from __future__ import annotations

import argparse
import sys

try:
    from launch.jobs.monitor import StopFlag
    from launch.jobs.preparation import (
        RUN_TYPES,
        check_job,
        launchable,
        prepare_job,
        with_num_workers,
    )
    from launch.jobs.supervision.foreground import start_and_watch
    from launch.plans.chains.command import names_a_plan, plan_command
    from launch.plans.chains.sweeps import names_a_sweep, sweep_command
    from launch.plans.command import LOCAL_COUNTS, run_locally
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.processes import num_cores
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    argv, script = sys.argv[1:], "launch/local.py"
    if names_a_plan(argv):
        raise SystemExit(run_locally(plan_command(argv, script=script, counts=LOCAL_COUNTS)))
    if names_a_sweep(argv):
        raise SystemExit(run_locally(sweep_command(argv, script=script, counts=LOCAL_COUNTS)))
    num_procs, argv = parse_num_procs()
    command = load_command(
        RUN_TYPES,
        script="launch/local.py",
        description="Run a stage on this machine. --num-procs N (default 1) sets the processes.",
        argv=argv,
        examples=("python launch/local.py --config configs/demo/pretrain.yaml --num-procs 2",),
    )
    run = launchable(command.run)
    check_job(run, num_tasks=num_procs, cluster="local")
    run = with_num_workers(run, num_cores=max(1, num_cores() // num_procs))
    job, folder = prepare_job(run, cluster="local")
    code = start_and_watch(
        job, launch=run.launch, num_procs=num_procs, folder=folder, stop=StopFlag()
    )
    raise SystemExit(code)


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


if __name__ == "__main__":
    run_script(main)
