"""Predict the classes of images with a trained model.

python finetune/predict.py init=runs/demo-finetune cat.jpg
python finetune/predict.py init=runs/demo-finetune photos/ output=predictions.csv [--dry-run]
deepspeed finetune/predict.py init=runs/demo-finetune runs/demo/shards output=predictions.parquet
"""

from __future__ import annotations

import sys

try:
    from finetune.settings import DRY_RUN, PredictRun, check_paths
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def predict(run: PredictRun, *, is_dry_run: bool) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    with quick_imports():
        from finetune.predicting import check_head, find_inputs, planned, predict_images
        from vitscale.distributed.watchdog import watched_ranks
        from vitscale.evaluation.trained_model import open_model

    # A wrong path should fail at once, not after a large model was loaded.
    inputs = find_inputs(run)
    with watched_ranks(None, run.compute) as watchdog, watchdog.reporting():
        model = open_model(**run.source(), world=watchdog.world)
        if watchdog.world.is_first:
            # Predictions may go to a file or a pipe.
            print(f"model: {model.source}", file=sys.stderr, flush=True)
        check_head(model)
        lines = predict_images(run, model, inputs, watchdog.world)
        if is_dry_run:
            lines = planned(run, inputs)
        for line in lines:
            if watchdog.world.is_first:
                print(line)


def main() -> None:
    command = load_command(
        PredictRun,
        program="vitscale predict",
        description="Predict the classes of images with a trained model.",
        needs_config=False,
        switches=DRY_RUN,
        words_key="images",
    )
    run = command.run
    check_paths(run.init, run.images, output=run.output)
    # Imported late: torch takes seconds. Started before threads.
    with quick_imports():
        from vitscale.data.loader import start_loader_server

    start_loader_server(run.num_workers)
    predict(run, is_dry_run="--dry-run" in command.switches)


if __name__ == "__main__":
    run_rank_script(main)
