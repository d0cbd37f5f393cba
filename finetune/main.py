"""Fine-tune: checkpoint -> model for other labels, usually at a higher resolution.

    deepspeed finetune/main.py --config configs/finetune/demo.yaml init=runs/demo-pretrain

Position embeddings are resampled to the new grid, the old head is dropped, a zero head attached.
Source: Dosovitskiy et al. 2021, sec. 3.2. This file is the training loop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, run_rank_script
    from vitscale.optim.schedules import learning_rate
    from vitscale.runs.finetune import FinetuneRun
except ModuleNotFoundError as error:
    print(f"vitscale is not installed ({error}). Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from torch import nn

    from vitscale.models.architecture import Architecture


def load_trunk(model: nn.Module, arch: Architecture, run: FinetuneRun) -> list[str]:
    """The weights of `init` under the model's fresh zero head; returns what they are."""
    from vitscale.checkpoint.folders import resolve_weights
    from vitscale.models.external_weights import is_weight_file, read_external_weights
    from vitscale.models.transfer import transfer_weights
    from vitscale.training.resume import starting_weights

    if run.init is None:
        return []
    if is_weight_file(run.init):
        foreign = read_external_weights(Path(run.init), grid=run.init_grid)
        transfer_weights(
            model,
            weights=foreign.weights,
            source_grid=foreign.grid,
            target_grid=arch.grid,
            num_prefix_tokens=arch.num_prefix_tokens,
            convention=run.position_embedding,
            where=run.init,
        )
        return [f"starting from {run.init}"]
    source, complaints = resolve_weights(run.init)
    rows, columns = source.description["grid"]
    transfer_weights(
        model,
        weights=starting_weights(source, run.init_weights),
        source_grid=(rows, columns),
        target_grid=arch.grid,
        num_prefix_tokens=source.description["num_prefix_tokens"],
        convention=run.position_embedding,
        where=str(source.folder),
    )
    return [*complaints, f"starting from {source.folder}, step {source.step}"]


def train(run: FinetuneRun) -> None:
    # Imported late: torch and deepspeed take seconds, and a wrong configuration fails before them.
    from finetune.pictures import predictions_sheet
    from vitscale.training.losses import LOSSES
    from vitscale.training.session import open_training, seed_step

    loss_of = LOSSES[run.objective.loss]
    with open_training(run, initial_weights=lambda model, arch: load_trunk(model, arch, run)) as t:
        for step in range(t.start_step, t.plan.total_steps):
            lr = learning_rate(
                step,
                peak=run.optim.lr,
                final=run.schedule.final_lr,
                warmup_steps=t.plan.warmup_steps,
                total_steps=t.plan.total_steps,
                decay=run.schedule.decay,
                rsqrt_timescale=run.schedule.rsqrt_timescale,
                cooldown_steps=t.plan.cooldown_steps,
                cooldown_shape=run.schedule.cooldown_shape,
            )
            t.engine.set_learning_rate(lr)
            for micro_step in range(t.plan.accumulation):
                batch = t.next_batch()
                seed_step(run.seed, step=step, micro_step=micro_step, rank=t.world.rank)
                logits = t.engine.logits(batch.images)
                loss = loss_of(
                    logits,
                    batch.labels,
                    run.objective.label_smoothing,
                    mixed_labels_B=batch.mixed_labels,
                    mix_lambda_B=batch.mix_lambda,
                )
                t.engine.backward(loss)
                t.store.wait_for_host_copy()
                t.engine.step()
                t.meter.add_loss(loss)
            done = step + 1
            t.end_step(done)
            stopping = t.stop.set_on_any_rank() and not t.is_last(done)
            if t.log_due(done):
                t.log_interval(done, lr=lr)
            if t.evaluation_due(done):
                t.log_evaluation(done)
                if t.is_last(done) and t.val_index is not None:
                    t.tracker.artifact(
                        predictions_sheet(
                            t.engine,
                            t.val_index,
                            settings=run.data,
                            image_size=t.arch.image_size,
                            folder=t.folder,
                        )
                    )
            if t.comparison_due(done):
                t.compare_weights(done)
            # Saved last: a checkpoint says that everything up to its step was logged.
            if t.checkpoint_due(done) or stopping:
                t.save(done)
            if stopping:
                t.finish_save()
                t.progress.message(f"stopped by a signal at step {done}; run it again to go on")
                raise SystemExit(EXIT_STOPPED_RESUMABLE)


def main() -> None:
    command = load_command(
        FinetuneRun,
        script="finetune/main.py",
        description="Fine-tune a pre-trained Vision Transformer on a folder of shards.",
        default_config="configs/finetune/demo.yaml",
    )
    train(command.run)


if __name__ == "__main__":
    run_rank_script(main)
