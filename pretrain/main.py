"""Pre-train a Vision Transformer: shards -> checkpoint. This file is the training loop.

    deepspeed --num_gpus 2 pretrain/main.py --config configs/demo/pretrain.yaml optim.lr=1e-3
    python pretrain/main.py --config configs/demo/pretrain.yaml

The same command again continues the run (`checkpoint.resume: auto`).
"""

from __future__ import annotations

import sys

try:
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, run_rank_script
    from vitscale.optim.schedules import learning_rate
    from vitscale.runs.pretrain import PretrainRun
except ModuleNotFoundError as error:
    print(f"vitscale is not installed ({error}). Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def train(run: PretrainRun) -> None:
    # Imported late: torch and deepspeed take seconds, and a wrong configuration fails before them.
    from pretrain.objectives.supervised import supervised_loss
    from vitscale.training.session import open_training, seed_step

    with open_training(run) as t:
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
                loss = supervised_loss(t.engine, batch, run.objective)
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
        PretrainRun,
        script="pretrain/main.py",
        description="Pre-train a Vision Transformer on a folder of shards.",
        default_config="configs/demo/pretrain.yaml",
    )
    train(command.run)


if __name__ == "__main__":
    run_rank_script(main)
