"""Evaluate a trained model: one table for any list of evaluations.

python finetune/evaluate_model.py init=runs/demo-finetune
deepspeed finetune/evaluate_model.py --config configs/eval/demo.yaml init=runs/demo-finetune
"""

from __future__ import annotations

import sys

try:
    from finetune.inference.settings import EvaluateRun
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def evaluate(run: EvaluateRun) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    from finetune.inference.evaluating import evaluations
    from finetune.loading.loaded_model import load_model
    from vitscale.distributed.world import process_group

    compute = run.compute
    with process_group(
        device=compute.device, timeout_min=compute.timeout_min, num_threads=compute.num_threads
    ) as world:
        loaded = load_model(run)
        if world.is_first:
            print(f"evaluating {loaded.source}")
        for metrics in evaluations(run, loaded, world):
            if world.is_first:
                for name, value in metrics.items():
                    print(f"{name:<24}{value:.4f}")


def main() -> None:
    command = load_command(
        EvaluateRun,
        script="finetune/evaluate_model.py",
        description="Evaluate a trained model on a folder of shards.",
        default_config="configs/eval/demo.yaml",
    )
    evaluate(command.run)


if __name__ == "__main__":
    run_rank_script(main)
