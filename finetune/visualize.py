"""Look inside a trained model: filters, positions, attention.

python finetune/visualize.py init=runs/demo-finetune [--dry-run]
python finetune/visualize.py init=runs/demo-finetune photos/ pictures=[attention_rollout]
"""

from __future__ import annotations

import sys

try:
    from finetune.settings import DRY_RUN, VisualizeRun, check_paths
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def visualize(run: VisualizeRun, *, is_dry_run: bool) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    with quick_imports():
        from finetune.inspection.run import draw_pictures
        from vitscale.distributed.world import process_group

    # One process draws all; others, if a launcher started them, only take part in the world.
    compute = run.compute
    with process_group(
        device=compute.device,
        timeout_min=compute.timeout_min,
        num_threads=compute.num_threads,
    ) as world:
        if world.is_first:
            draw_pictures(run, world, is_dry_run=is_dry_run)


def main() -> None:
    command = load_command(
        VisualizeRun,
        program="vitscale visualize",
        description="Draw what a trained model has learned, as PNG files.",
        needs_config=False,
        switches=DRY_RUN,
        words_key="images",
    )
    run = command.run
    check_paths(run.init, run.images, output=run.output)
    visualize(run, is_dry_run="--dry-run" in command.switches)


if __name__ == "__main__":
    run_rank_script(main)
