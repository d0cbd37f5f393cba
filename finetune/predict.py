"""Predict the classes of images with a trained model.

python finetune/predict.py init=runs/demo-finetune cat.jpg
python finetune/predict.py init=runs/demo-finetune photos/ output=predictions.csv
deepspeed finetune/predict.py init=runs/demo-finetune runs/demo/shards output=predictions.parquet
"""

from __future__ import annotations

import sys

try:
    from finetune.settings import PredictRun, check_paths
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def predict(run: PredictRun) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    with quick_imports():
        from finetune.predicting import find_inputs, predict_images
        from vitscale.distributed.watchdog import watched_ranks
        from vitscale.evaluation.trained_model import open_model

    # A wrong path should fail at once, not after a large model was loaded.
    inputs = find_inputs(run)
    with watched_ranks(None, run.compute) as watchdog, watchdog.reporting():
        model = open_model(**run.source(), world=watchdog.world)
        if watchdog.world.is_first:
            # Predictions may go to a file or a pipe.
            print(f"model: {model.source}", file=sys.stderr, flush=True)
        for line in predict_images(run, model, inputs, watchdog.world):
            if watchdog.world.is_first:
                print(line)


def main() -> None:
    command = load_command(
        PredictRun,
        program="vitscale predict",
        description="Predict the classes of images with a trained model.",
        needs_config=False,
        words_key="images",
    )
    check_paths(command.run.init, command.run.images)
    # Imported late: torch takes seconds. Started before threads.
    with quick_imports():
        from vitscale.data.loader import start_loader_server

    start_loader_server(command.run.num_workers)
    predict(command.run)


if __name__ == "__main__":
    run_rank_script(main)
