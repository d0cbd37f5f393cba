"""Evaluate a trained model: one table for any list of evaluations.

python finetune/evaluate_model.py init=runs/demo-finetune
deepspeed finetune/evaluate_model.py --config configs/eval/demo.yaml init=runs/demo-finetune
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

try:
    from finetune.inference.settings import EvaluateRun, settings_of_run
    from vitscale.config.command_line import load_command
    from vitscale.data.workers.server import start_loader_server
    from vitscale.distributed.failures.ending import run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def evaluate(run: EvaluateRun) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    from finetune.inference.evaluating import (
        FILES,
        check,
        describe,
        evaluate_all,
        splits,
    )
    from finetune.inference.results import text_table, write_results
    from finetune.inference.tracking import check_folder, open_tracker
    from finetune.loading.loaded_model import load_model
    from vitscale.checkpoint.store import run_folder_lock
    from vitscale.distributed.failures.heartbeat import watched_ranks
    from vitscale.distributed.node_share import once_per_node
    from vitscale.distributed.world import gather_objects

    compute, folder = run.compute, Path(run.folder)
    check_folder(folder)
    with watched_ranks(
        folder, compute.timeout_min, device=compute.device, num_threads=compute.num_threads
    ) as world:
        say = print if world.is_first else lambda _: None
        loaded = load_model(run)
        (train, val), lines = once_per_node(
            lambda: splits(run, check_files=world.is_first),
            rank=world.rank,
            gather=gather_objects,
            for_workers=run.data.num_workers > 0,
        )
        for line in lines:
            say(f"index of {run.data.path}: {line}")
        check(run, loaded, world, train=train, val=val)
        say(f"evaluating {loaded.source}")
        with run_folder_lock(folder, world=world), open_tracker(run, loaded, world) as tracker:
            if world.is_first:
                shutil.rmtree(folder / FILES, ignore_errors=True)
            found = evaluate_all(run, loaded, world, train=train, val=val, say=say)
            metrics = {f"val/{row.metric}": row.value for row in found}
            tracker.log(metrics, step=loaded.step or 0)
            if world.is_first:
                description = describe(run, loaded, val)
                for path in write_results(folder, found, description=description):
                    tracker.artifact(path)
                if (folder / FILES).exists():
                    tracker.artifact(folder / FILES)
        say(f"\n{text_table(found)}\n\nresults: {folder}/results.json, .csv, .md")


def main() -> None:
    argv = sys.argv[1:]
    of_run = [] if "--config" in argv else settings_of_run(argv)
    command = load_command(
        EvaluateRun,
        script="finetune/evaluate_model.py",
        description="Evaluate a trained model on a folder of shards.\n"
        "Without --config: on the data of its run, by the evaluations of its run.",
        argv=of_run + argv,
        needs_config=not of_run,
        examples=(
            "python finetune/evaluate_model.py init=runs/demo-finetune",
            "python finetune/evaluate_model.py --config configs/eval/features.yaml init=FILE",
        ),
    )
    data = command.run.data
    # Before threads start.
    start_loader_server(data.num_workers)
    evaluate(command.run)


if __name__ == "__main__":
    run_rank_script(main)
