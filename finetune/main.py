"""Fine-tune: checkpoint -> model for other labels, usually at a higher resolution.

    deepspeed finetune/main.py --config configs/demo/finetune.yaml init=runs/demo-pretrain

Position embeddings are resampled to the new grid, the old head is dropped, a zero head attached.
Source: Dosovitskiy et al. 2021, sec. 3.2. This file is the training loop.
"""

from __future__ import annotations

import sys

try:
    from finetune.run import FinetuneRun
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def train(run: FinetuneRun) -> None:
    # Imported late: torch and deepspeed take seconds, and a wrong configuration fails before them.
    with quick_imports():
        from vitscale.training.session import open_session

    objective = run.make_objective()
    with open_session(run, objective) as session:
        for step in session.steps():  # from the checkpoint's step
            for batch in session.micro_batches(step):
                loss = objective.loss(session.engine, batch)
                # Backward; the optimiser steps after the last micro-batch.
                session.update(loss)
            session.end_step(step)  # log, evaluate, save; ends here when preempted


def main() -> None:
    command = load_command(
        FinetuneRun,
        program="vitscale finetune",
        description="Fine-tune a pre-trained Vision Transformer on a folder of shards. `vitscale` "
        "starts a process for\neach GPU, or --num-procs N; --dry-run shows the plan alone.",
        examples=(
            "vitscale finetune demo/finetune init=runs/demo-pretrain",
            "vitscale finetune finetune/imagenet1k_384 init=RUN data.path=SHARDS",
        ),
    )
    # Imported late: torch takes seconds. Started before threads.
    with quick_imports():
        from vitscale.data.loader import start_loader_server

    start_loader_server(command.run.data.num_workers)
    train(command.run)


if __name__ == "__main__":
    run_rank_script(main)
