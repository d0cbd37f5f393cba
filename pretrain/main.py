"""Pre-train a Vision Transformer: shards -> checkpoint. This file is the training loop.

    deepspeed --num_gpus 2 pretrain/main.py --config configs/demo/pretrain.yaml optim.lr=1e-3
    python pretrain/main.py --config configs/demo/pretrain.yaml

The same command again resumes the run.
"""

from __future__ import annotations

import sys

try:
    from pretrain.run import PretrainRun
    from vitscale.config.command_line import load_command
    from vitscale.distributed.processes import quick_imports, run_rank_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def train(run: PretrainRun) -> None:
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
        PretrainRun,
        program="vitscale pretrain",
        description="Pre-train a Vision Transformer on a folder of shards. `vitscale` starts a "
        "process for each\nGPU, or --num-procs N; --dry-run shows the plan alone.",
        examples=(
            "vitscale pretrain demo/pretrain",
            "vitscale pretrain vit_b16 data.path=SHARDS",
        ),
    )
    # Imported late: torch takes seconds. Started before threads.
    with quick_imports():
        from vitscale.data.loader import start_loader_server

    start_loader_server(command.run.data.num_workers)
    train(command.run)


if __name__ == "__main__":
    run_rank_script(main)
