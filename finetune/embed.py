"""Write the features of all images of a split with a trained model, for search and own classifiers.

python finetune/embed.py init=runs/demo-pretrain data.path=runs/demo/shards output=x.parquet
deepspeed finetune/embed.py init=hf://OWNER/NAME data.path=SHARDS output=x.parquet [--dry-run]
"""

from __future__ import annotations

import sys

try:
    from finetune.settings import DRY_RUN, EmbedRun, check_paths
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def embed(run: EmbedRun, *, is_dry_run: bool) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    with quick_imports():
        from finetune.embedding import embed_images
        from finetune.images import images_of_split
        from vitscale.distributed.watchdog import watched_ranks
        from vitscale.evaluation.trained_model import open_model

    # A wrong path should fail at once, not after a large model was loaded.
    data = run.data
    images = images_of_split(
        data.path, split=data.split, remote=data.remote, key="data.split"
    )
    with watched_ranks(None, run.compute) as watchdog, watchdog.reporting():
        world = watchdog.world
        model = open_model(**run.source(), world=world)
        if world.is_first:
            print(f"model: {model.source}", flush=True)
        for line in embed_images(run, model, images, world, is_dry_run=is_dry_run):
            if world.is_first:
                print(line, flush=True)


def main() -> None:
    command = load_command(
        EmbedRun,
        program="vitscale embed",
        description="Write the features of all images of a split as a Parquet file.\n"
        "`vitscale` starts a process for each GPU, or --num-procs N.",
        needs_config=False,
        switches=DRY_RUN,
    )
    run = command.run
    check_paths(run.init, output=run.output)
    # Imported late: torch takes seconds. Started before threads.
    with quick_imports():
        from vitscale.data.loader import start_loader_server

    start_loader_server(run.data.num_workers)
    embed(run, is_dry_run="--dry-run" in command.switches)


if __name__ == "__main__":
    run_rank_script(main)
