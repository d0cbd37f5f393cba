"""Measure training on one device: our engine beside a bare loop and timm's, and with real images.

    python benchmarks/gpu_training.py --json results.json          # one GPU: B/16, L/16 and H/14
    python benchmarks/gpu_training.py --device cpu --toy           # to show that it works

First each model by itself, with ZeRO 1 and compiled: images/s, model FLOP/s over the datasheet's
and over those of a large matrix product, peak memory beside the estimate of a dry run. Then ZeRO 0
to 3, a bare PyTorch loop and timm's step of one model, in turn. Then the same model on JPEGs,
through the loader, beside batches that are on the device already. One rank does not communicate, so
ZeRO costs its hooks, copies and checks here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.corpora.photo_folder import given_photos, noise_photos, write_photo_folder
from benchmarks.measuring import (
    NUM_CORES,
    ROOT,
    Failed,
    make_shards_command,
    parser_of,
    ratio,
    run_benchmark,
    run_command,
    spread,
)
from benchmarks.training_loops import (
    BareLoop,
    EngineLoop,
    Images,
    Task,
    TimmLoop,
    interleaved,
    matmul_rate,
    seconds_of,
    start_afresh,
    synchronize,
)
from pretrain.run import PretrainRun
from vitscale.config.errors import run_script
from vitscale.config.loader import load_run
from vitscale.data.loader import training_batches
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.distributed.world import World, process_group
from vitscale.engine.device_batches import DeviceBatches
from vitscale.engine.settings import BUCKET_ELEMENTS
from vitscale.models.costs import memory_estimate, train_flops_per_image
from vitscale.training.interval_log import peak_flops

# Of the recipes in configs/: no regularisation, 1,000 classes, softmax, clipping, a short schedule.
PLAIN = (
    *("model.num_classes=1000", "model.representation_layer=false", "model.dropout=0.0"),
    *("model.head_bias=0.0", "objective.loss=softmax", "optim.clip_norm=1.0", "optim.lr=3e-4"),
    *("optim.weight_decay=0.1", "schedule.epochs=null", "schedule.steps=1000"),
    *("schedule.warmup_steps=10", "schedule.final_lr=0.0", "schedule.decay=cosine"),
    *("checkpoint.every_steps=1000", "evaluate=[]", "tracking.uri=null"),
)
TINY = (
    *("model.width=48", "model.depth=2", "model.num_heads=2", "model.mlp_width=96"),
    *("model.image_size=32", "model.patch_size=8"),
)
TINY_TIMM = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}


@dataclass(frozen=True)
class Model:
    """A recipe of configs/, the batch that fills a GPU of 80 GB, and timm's name."""

    config: str
    batch: int
    timm_name: str


MODELS = {
    "B16": Model("vit_b16", 512, "vit_base_patch16_224"),
    "L16": Model("vit_l16", 256, "vit_large_patch16_224"),
    "H14": Model("vit_h14", 128, "vit_huge_patch14_224"),
}
COMPARED = "L16"
# Several loops are in memory at once.
COMPARED_SHARE = 0.5
# Largest gap to the losses of the bare loop, over its first loss; other sums of bf16.
MAX_GAP = 0.05
WARM_UP = 10


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--images", type=Path, help="folder or tar of JPEGs; default: noise")
    parser.add_argument("--total-mib", type=float, default=700, help="images are repeated")
    parser.add_argument("--steps", type=int, default=20, help="of each loop and round")
    if parser.parse_args().toy:
        parser.set_defaults(rounds=2, steps=2, total_mib=1)
    options = parser.parse_args()
    run_benchmark(options, lambda work: measure(work, options), "torch", "deepspeed", "timm")


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    threads = 1 if options.toy else None
    with process_group(device=options.device, timeout_min=10, num_threads=threads) as world:
        bench = Bench(options=options, world=world)
        results = {"models": bench.models(), "loops": bench.loops(), "data": bench.data(work)}
    return results


@dataclass(kw_only=True)
class Bench:
    """The measurements of one call."""

    options: argparse.Namespace
    world: World

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    @property
    def precision(self) -> str:
        return "bf16" if self.on_gpu else "fp32"

    def task(self, name: str, *, share: float = 1.0) -> Task:
        """A model with a share of its batch."""
        start_afresh(self.world.device)
        batch = 4 if self.options.toy else int(MODELS[name].batch * share)
        sizes = (f"data.global_batch={batch}", f"engine.max_micro_batch={batch}")
        given = [*PLAIN, *(TINY if self.options.toy else ()), *sizes]
        given += [f"engine.device={self.world.device.type}", f"engine.precision={self.precision}"]
        path = ROOT / "configs" / f"{MODELS[name].config}.yaml"
        run = load_run(PretrainRun, path, overrides=given, with_site=False).run
        return Task(run=run, device=self.world.device)

    def models(self) -> dict[str, dict[str, Any]]:
        print("\nmodel  images/s: min / median / max  TFLOP/s  of datasheet  of matmul  memory")
        return {name: self.model(name) for name in self.options.models}

    def model(self, name: str) -> dict[str, Any]:
        """The whole engine at ZeRO 1."""
        task = self.task(name)
        losses: list[torch.Tensor] = []
        loop = EngineLoop(task, self.world)
        step = stepper(loop, task.pool, losses)
        first_s = seconds_of(lambda: step(0), self.world.device)
        memory = self.memory(task, warm=step)
        before = self.matmul()
        seconds = interleaved({name: step}, **self.turns())[name]
        flops = task.batch / median(seconds) * train_flops_per_image(task.arch)
        of_matmul, datasheet = 2 * flops / (before + self.matmul()), peak_flops(task.device)
        rates = [task.batch / each for each in seconds]
        gib = " of an estimated ".join(f"{each / 2**30:.2f}" for each in memory.values())
        of_datasheet = "-" if datasheet is None else f"{flops / datasheet:.3f}"
        print(
            f"{name:6} {spread(rates):28} {flops / 1e12:8.1f} {of_datasheet:>13} "
            f"{of_matmul:10.3f}  {gib} GiB",
            flush=True,
        )
        loop.engine.close()
        if not losses[-1] < losses[0]:
            raise Failed(f"{name}: the loss does not fall: {[float(each) for each in losses]}")
        return {
            "batch": task.batch,
            "first_step_s": first_s,
            "images_per_s": rates,
            "model_flops": flops,
            "of_datasheet": datasheet and flops / datasheet,
            "of_matmul": of_matmul,
            **memory,
        }

    def matmul(self) -> float:
        return matmul_rate(self.world.device, side=64 if self.options.toy else 8192)

    def turns(self) -> dict[str, Any]:
        rounds, steps = self.options.rounds, self.options.steps
        return {"rounds": rounds, "steps_per_round": steps, "device": self.world.device}

    def memory(self, task: Task, *, warm: Callable[[int], Any]) -> dict[str, int]:
        """Bytes: the peak of the allocator in a few steps (0 on CPUs), and the estimate."""
        for number in range(1, WARM_UP):
            warm(number)
        synchronize(self.world.device)
        engine, objective = task.run.engine, task.run.make_objective()
        estimate = memory_estimate(
            task.arch,
            zero_stage=1,
            world_size=1,
            precision=self.precision,
            micro_batch=task.batch,
            activation_checkpointing=engine.activation_checkpointing,
            optimizer_bytes=task.run.optim.state_bytes_per_parameter,
            bucket_elements=BUCKET_ELEMENTS,
            costs=objective,
        )
        peak = torch.cuda.max_memory_allocated(self.world.device) if self.on_gpu else 0
        return {"peak_bytes": peak, "estimated_bytes": estimate.total}

    def loops(self) -> dict[str, Any]:
        """ZeRO 0 to 3, the bare loop and timm's step, in turn on the same batches."""
        task = self.task(COMPARED, share=COMPARED_SHARE)
        sizes = TINY_TIMM if self.options.toy else {}
        master, plain = ("master", "autocast") if self.on_gpu else ("fp32", "fp32")
        bare = partial(BareLoop, task, compiled=self.on_gpu)
        build: dict[str, Callable[[], Any]] = {
            "bare": partial(bare, precision=master),
            "bare, autocast": partial(bare, precision=plain),
            "timm": lambda: TimmLoop(
                MODELS[COMPARED].timm_name, task, compiled=self.on_gpu, **sizes
            ),
            **{
                f"ZeRO {stage}": partial(EngineLoop, task, self.world, stage=stage)
                for stage in range(4)
            },
        }
        losses: dict[str, list[torch.Tensor]] = {name: [] for name in build}
        steps = {name: stepper(make(), task.pool, losses[name]) for name, make in build.items()}
        for step in steps.values():
            for number in range(WARM_UP):
                step(number)
        seconds = interleaved(steps, **self.turns())
        print(
            f"\n{COMPARED}, batch {task.batch}: images/s, min / median / max; speed over bare, timm"
        )
        for name, each in seconds.items():
            rates = spread([task.batch / one for one in each])
            own = "bare, autocast" if name in ("ZeRO 0", "bare, autocast") else "bare"
            over = f"{ratio(seconds[own], each)}  {ratio(seconds['timm'], each)}"
            print(f"{name:15} {rates:20} {over}", flush=True)
            values = [float(loss) for loss in losses[name][:WARM_UP]]
            expected = [float(loss) for loss in losses[own][:WARM_UP]]
            gap = max(abs(a - b) for a, b in zip(values, expected, strict=True)) / expected[0]
            if name.startswith("ZeRO") and not gap < MAX_GAP:
                raise Failed(f"{name}: losses {values}, of the bare loop {expected}")
        return {"batch": task.batch, "seconds": seconds}

    def data(self, work: Path) -> dict[str, Any]:
        """Steps on JPEGs that the loader decodes, beside steps on synthetic batches."""
        photos = given_photos(self.options.images) if self.options.images else noise_photos()
        total = int(self.options.total_mib * 2**20)
        source = write_photo_folder(work / "photos", photos, total_bytes=total)
        run_command(make_shards_command(source.root, work / "shards", shard_mib=32))
        task, workers = self.task(COMPARED), max(1, NUM_CORES - 2)
        settings = DataSettings(
            path=str(work / "shards"), global_batch=task.batch, num_workers=workers
        )
        loader = training_batches(
            open_training_set(settings, seed=0),
            settings=settings,
            image_size=task.arch.image_size,
            seed=0,
            start=0,
            stop=100_000 * task.batch,
            rank=0,
            world_size=1,
            micro_batch=task.batch,
            pin_memory=self.on_gpu,
        )
        loop = EngineLoop(task, self.world)
        synthetic = stepper(loop, task.pool, [])
        with loader as batches:
            on_device = DeviceBatches(batches, self.world.device)

            def real(number: int) -> torch.Tensor:
                batch = next(on_device)
                loss = loop.step(number, batch.images, batch.labels)
                on_device.prefetch()
                return loss

            for number in range(WARM_UP):
                synthetic(number)
            # What the loader has prefetched must not count.
            for number in range(2 * workers + 2):
                real(number)
            seconds = interleaved({"synthetic": synthetic, "real": real}, **self.turns())
        print(f"\n{COMPARED}, batch {task.batch}, {workers} workers: images/s, min / median / max")
        for name, each in seconds.items():
            print(f"{name:15} {spread([task.batch / one for one in each])}")
        print(f"real / synthetic: {ratio(seconds['synthetic'], seconds['real'])}")
        return {"batch": task.batch, "workers": workers, "seconds": seconds}


def stepper(
    loop: Any, pool: list[Images], losses: list[torch.Tensor]
) -> Callable[[int], torch.Tensor]:
    """Steps over the batches of the pool in turn; keeps the losses on the device."""

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = loop.step(number, *pool[number % len(pool)])
        losses.append(loss)
        return loss

    return step


if __name__ == "__main__":
    run_script(main)
