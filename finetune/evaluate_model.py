"""Evaluate a trained model: one table for any list of evaluations.

python finetune/evaluate_model.py init=runs/demo-finetune
deepspeed finetune/evaluate_model.py --config configs/eval/demo.yaml init=runs/demo-finetune
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from finetune.settings import EvaluateRun, settings_of_run
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def evaluate(run: EvaluateRun) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    with quick_imports():
        from finetune.evaluating import check_folder, evaluate_run
        from vitscale.distributed.watchdog import watched_ranks

    folder = Path(run.folder)
    # The watchdog already writes into the folder, so it is checked first.
    check_folder(folder)
    with watched_ranks(folder, run.compute) as watchdog, watchdog.reporting():
        evaluate_run(run, watchdog.world)


def main() -> None:
    argv = sys.argv[1:]
    overrides = settings_of_run(argv)
    command = load_command(
        EvaluateRun,
        program="vitscale evaluate",
        description="Evaluate a trained model on a folder of shards.\n"
        "Without a configuration: on the data of its run, by the evaluations of its run.\n"
        "`vitscale` starts a process for each GPU, or --num-procs N; --dry-run shows the plan.",
        # The user's own words come last, so that they win.
        argv=overrides + argv,
        needs_config=not overrides,
        examples=(
            "vitscale evaluate init=runs/demo-finetune",
            "vitscale evaluate eval/features init=FILE",
        ),
    )
    # Imported late: torch takes seconds. Started before threads.
    with quick_imports():
        from vitscale.data.loader import start_loader_server

    start_loader_server(command.run.data.num_workers)
    evaluate(command.run)


if __name__ == "__main__":
    run_rank_script(main)
