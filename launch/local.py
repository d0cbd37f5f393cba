"""Run any stage on this machine as the job that SLURM would run.

    python launch/local.py --config configs/demo/pretrain.yaml [key=value ...] --num-procs 2
    vitscale launch --local chains/demo --num-procs 2

The processes are as many as this machine has GPUs, one without any, or --num-procs. The runs of
a chain, and of a sweep such as optim.lr=[0.003,0.03], run one after another.
"""

from __future__ import annotations

import argparse
import sys

try:
    from finetune.settings import settings_of_run
    from launch.chains.load import launch_command, load_chain
    from launch.chains.settings import ChainRun
    from launch.jobs.preparation import check_job, prepare_job
    from launch.jobs.processes import StopFlag, run_here
    from launch.planning.dry_run import (
        as_table,
        check_device,
        check_here,
        describe,
        on_this_machine,
        run_checks,
    )
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.processes import num_gpus
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    # First of all: a signal that comes while a chain is read must not be missed.
    stop = StopFlag()

    # init=RUN alone is an evaluation, whose settings are those of the run.
    num_procs, argv = parse_num_procs()
    settings = settings_of_run(argv)
    if settings:
        settings = ["stage=evaluate", *settings]
    stated = any(word.startswith("stage=") for word in [*settings, *argv])

    command = launch_command(
        [*settings, *argv],
        needs_config=not stated,
        program="vitscale launch --local",
        description="Run a stage, a sweep or a chain on this machine; init=RUN alone: its "
        "evaluation.\n--num-procs N: that many processes; default: one for each GPU.",
        examples=("vitscale launch --local demo/pretrain --num-procs 2",),
        switches={
            "--dry-run": "show the plan of a run, or the runs of a chain with their states"
        },
    )
    is_dry_run = "--dry-run" in command.switches
    run = command.run

    if isinstance(run, ChainRun):
        # A single run needs none of the code of chains.
        from launch.chains.executors import chain_states, overview, run_chain

        chain = load_chain(run, cluster="local", num_tasks=num_procs)
        if is_dry_run:
            print(overview(chain, chain_states(chain)))
            return
        raise SystemExit(run_chain(chain, num_procs=num_procs, stop=stop))

    # All that can be wrong is reported before the job has a folder.
    check_job(run, num_tasks=num_procs, cluster="local")
    if is_dry_run:
        here = on_this_machine(run, num_procs)
        print(f"{describe(here)}\n\n# Checks\n{as_table(run_checks(here))}")
        # The plan of a run for GPUs is of use without one, too.
        check_device(run)
        return
    # What is missing is an error here, before a rank imports torch or the run has a folder.
    check_here(run, num_procs=num_procs)
    # From here on there is a folder, and an attempt in its record.
    job = prepare_job(run, cluster="local")
    raise SystemExit(
        run_here(job, python=run.launch.python, num_procs=num_procs, stop=stop)
    )


def parse_num_procs() -> tuple[int, list[str]]:
    """The number of processes, and the other arguments, which belong to the configuration."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "--num-procs", nargs="?", const="", default=str(num_gpus() or 1)
    )
    arguments, others = parser.parse_known_args()

    # Without a value it is empty, and as wrong as a name or 0.
    given = arguments.num_procs
    if not (given.isdecimal() and int(given)):
        raise UserError(
            f"{given!r} is not allowed", where="--num-procs", allowed="1, 2, ..."
        )
    return int(given), others


if __name__ == "__main__":
    run_script(main)
