"""Compute once what the teachers of a configuration say of its training images.

    python pretrain/prepare_targets.py --config CONFIG stage=targets output=TARGETS [--dry-run]
    deepspeed pretrain/prepare_targets.py --config CONFIG stage=targets output=TARGETS

The same command again goes on where it was stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from pretrain.run import TargetsRun
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def prepare(run: TargetsRun, *, is_dry_run: bool) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    with quick_imports():
        from pretrain.targets import prepare_targets
        from vitscale.distributed.watchdog import watched_ranks

    with watched_ranks(Path(run.folder), run.engine) as watchdog, watchdog.reporting():
        for line in prepare_targets(run, watchdog.world, is_dry_run=is_dry_run):
            if watchdog.world.is_first:
                print(line, flush=True)


def main() -> None:
    command = load_command(
        TargetsRun,
        program="vitscale prepare targets",
        description="Compute once what the teachers of a configuration say of its training "
        "images, for trainings\nwith objective.targets. CONFIG is that of the training. `vitscale` "
        "starts a process for each\nGPU, or --num-procs N.",
        examples=("vitscale prepare targets CONFIG output=TARGETS views=8",),
        switches={
            "--dry-run": "open teachers and shards, show the work; write nothing"
        },
    )
    # Imported late: torch takes seconds. Started before threads.
    with quick_imports():
        from vitscale.data.loader import start_loader_server

    start_loader_server(command.run.data.num_workers)
    prepare(command.run, is_dry_run="--dry-run" in command.switches)


if __name__ == "__main__":
    run_rank_script(main)
