"""Measure training on one device: our engine beside a bare loop and timm's, and with real images.

    python benchmarks/gpu_training.py --sections probe recipes host --json first.json
    python benchmarks/gpu_training.py --device cpu --toy           # to show that it works

One rank does not communicate, so ZeRO costs its hooks, copies and checks here. Sections, in order:
    probe    versions, attention kernel, rate of a large matrix product
    recipes  every ZeRO stage with every kind of recipe, ten steps of B/16 each
    host     time of an update whose kernels are too small to matter, and its calls of ATen
    models   each model with ZeRO 1: images/s, share of the product's rate, peak memory
    kernels  where the time of a step of each model goes
    loops    the engine, a bare PyTorch loop and timm's step, in turn, all compiled
    stall    how long training stops for a checkpoint
    data     JPEGs through the loader, beside batches that are on the device
Nothing begins after `--minutes`; `--json` is written after every measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.corpora.photo_folder import (
    given_photos,
    noise_photos,
    write_photo_folder,
)
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
    Calls,
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
from vitscale.checkpoint.store import CheckpointStore
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
    *(
        "model.num_classes=1000",
        "model.representation_layer=false",
        "model.dropout=0.0",
    ),
    *(
        "model.head_bias=0.0",
        "objective.loss=softmax",
        "optim.clip_norm=1.0",
        "optim.lr=3e-4",
    ),
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
# Kinds of recipes, as overrides; LAMB needs whole tensors.
RECIPES = {
    "adamw": (),
    "layer decay": ("optim.layer_decay=0.75",),
    "bf16 moment": ("optim.momentum_dtype=bf16",),
    "average": ("optim.ema.decay=0.99",),
    "drop path": ("model.drop_path=0.1",),
    "recomputed": ("engine.activation_checkpointing=true",),
    "lamb": ("optim.name=lamb", "optim.lr=1e-3"),
    "sgd": ("optim.name=sgd",),
    "mae": (
        "objective.name=mae",
        "model.positions=sincos2d_mae",
        "model.num_classes=null",
    ),
}
RECIPE_BATCH, HOST_BATCH = 32, 4
SECTIONS = ("probe", "recipes", "host", "models", "kernels", "loops", "stall", "data")
# Several loops are in memory at once.
COMPARED_SHARE = 0.5
# Largest gap to the losses of the bare loop, over its first loss; other sums of bf16.
MAX_GAP = 0.01
WARM_UP = 10
NUM_KERNELS = 20


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS)
    )
    parser.add_argument("--minutes", type=float, default=9, help="of one call")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--images", type=Path, help="folder or tar of JPEGs; default: noise"
    )
    parser.add_argument(
        "--total-mib", type=float, default=700, help="images are repeated"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each loop and round")
    parser.set_defaults(recipe_steps=10)
    if parser.parse_args().toy:
        parser.set_defaults(rounds=2, steps=2, total_mib=1, recipe_steps=2)
    options = parser.parse_args()
    run_benchmark(
        options, lambda work: measure(work, options), "torch", "deepspeed", "timm"
    )


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    threads = 1 if options.toy else None
    with process_group(
        device=options.device, timeout_min=10, num_threads=threads
    ) as world:
        bench = Bench(options=options, world=world, work=work)
        for section in options.sections:
            getattr(bench, section)()
    return bench.results


@dataclass(kw_only=True)
class Bench:
    """The measurements of one call."""

    options: argparse.Namespace
    world: World
    work: Path
    results: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def keep(self, *keys: str, found: Any) -> None:
        """Add a result and write all of them."""
        place = self.results
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = found
        if self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n")

    def has_time(self, what: str) -> bool:
        """Whether a measurement may begin; a line says which one does not."""
        if time.monotonic() - self.began < self.options.minutes * 60:
            return True
        print(
            f"{what}: left out, {self.options.minutes:g} minutes are over", flush=True
        )
        return False

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def task(
        self, name: str, *more: str, share: float = 1.0, batch: int | None = None
    ) -> Task:
        """A model with a share of its batch, or another, and further overrides."""
        start_afresh(self.world.device)
        batch = 4 if self.options.toy else batch or int(MODELS[name].batch * share)
        sizes = (f"data.global_batch={batch}", f"engine.max_micro_batch={batch}")
        given = [
            each
            for each in PLAIN
            if "objective.name=mae" not in more or "loss" not in each
        ]
        given += [*(TINY if self.options.toy else ()), *sizes]
        given += [f"engine.device={self.world.device.type}", "engine.precision=bf16"]
        given += more
        path = ROOT / "configs" / f"{MODELS[name].config}.yaml"
        run = load_run(PretrainRun, path, overrides=given, with_site=False).run
        return Task(run=run, device=self.world.device)

    def probe(self) -> None:
        """What every other number depends on."""
        device = self.world.device
        query = torch.empty(2, 16, 197, 64, device=device, dtype=torch.bfloat16)
        found: dict[str, Any] = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name(device) if self.on_gpu else "cpu",
            "capability": torch.cuda.get_device_capability(device)
            if self.on_gpu
            else None,
            "attention": int(torch._fused_sdp_choice(query, query, query)),
            "matmul_flops": self.matmul(),
        }
        print(
            "\n" + ", ".join(f"{name} {value}" for name, value in found.items()),
            flush=True,
        )
        self.keep("probe", found=found)

    def recipes(self) -> None:
        """A few steps, not compiled, of every stage and kind of recipe: none fails."""
        print(
            f"\nB16, {self.options.recipe_steps} steps: loss of the first and the last one"
        )
        for kind, overrides in RECIPES.items():
            for stage in range(4):
                where = f"{kind}, ZeRO {stage}"
                if (kind == "lamb" and stage) or not self.has_time(where):
                    continue
                given = (
                    *overrides,
                    f"engine.zero_stage={stage}",
                    "engine.compile=false",
                )
                task = self.task("B16", *given, batch=RECIPE_BATCH)
                loop, losses = (
                    EngineLoop(task, self.world, stage=stage),
                    list[torch.Tensor](),
                )
                step = stepper(loop, task.pool, losses)
                for number in range(self.options.recipe_steps):
                    step(number)
                values = [float(loss) for loss in losses]
                loop.engine.close()
                print(f"{where:24} {values[0]:8.4f} {values[-1]:8.4f}", flush=True)
                self.keep("recipes", where, found=values)
                if not all(map(math.isfinite, values)):
                    raise Failed(f"{where}: losses {values}")

    def host(self) -> None:
        """Time of an update of four images, which is the host's on any GPU; nothing is compiled."""
        print(f"\nbatch {HOST_BATCH}, not compiled: ms of an update, calls of ATen")
        for name in self.options.models:
            eager, layers = "engine.compile=false", "optim.layer_decay=0.75"
            task = self.task(name, eager, batch=HOST_BATCH)
            decayed = self.task(name, eager, layers, batch=HOST_BATCH)
            build: dict[str, Callable[[], Any]] = {
                "bare": partial(BareLoop, task, precision="master", compiled=False),
                "ZeRO 0": partial(EngineLoop, task, self.world, stage=0),
                "ZeRO 1": partial(EngineLoop, task, self.world, stage=1),
                "layer decay": partial(EngineLoop, decayed, self.world, stage=1),
            }
            for kind, make in build.items():
                if not self.has_time(f"{name}, {kind}"):
                    return
                step = stepper(make(), task.pool, [])
                for number in range(WARM_UP):
                    step(number)
                seconds = interleaved({kind: step}, **self.turns())[kind]
                with Calls() as calls:
                    step(WARM_UP)
                print(
                    f"{name:5} {kind:12} {1000 * median(seconds):8.2f} {calls.count:6}"
                )
                self.keep(
                    "host", name, kind, found={"seconds": seconds, "calls": calls.count}
                )

    def kernels(self) -> None:
        """The kernels that take most of three steps with ZeRO 1."""
        for name in self.options.models:
            if not self.has_time(f"kernels of {name}"):
                return
            task = self.task(name)
            loop = EngineLoop(task, self.world)
            step = stepper(loop, task.pool, [])
            for number in range(WARM_UP):
                step(number)
            synchronize(self.world.device)
            activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
            with profile(activities=[activity]) as trace:
                for number in range(3):
                    step(number)
                synchronize(self.world.device)
            spent = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
            rows = sorted(trace.key_averages(), key=lambda row: -getattr(row, spent))
            table = [
                (row.key, row.count / 3, getattr(row, spent) / 3)
                for row in rows[:NUM_KERNELS]
            ]
            print(f"\n{name}, batch {task.batch}: calls and us of a step")
            for key, count, micros in table:
                print(f"{key[:70]:70} {count:7.1f} {micros:10.1f}")
            loop.engine.close()
            self.keep("kernels", name, found=table)

    def stall(self) -> None:
        """What steps take longer from a save until it is committed."""
        if not self.has_time("checkpoint stall"):
            return
        task, device = self.task(COMPARED), self.world.device
        loop, found = EngineLoop(task, self.world), dict[str, list[float]]()
        step = stepper(loop, task.pool, [])
        for number in range(WARM_UP):
            step(number)
        folder = Path(tempfile.mkdtemp(dir=self.work))
        with CheckpointStore(folder, keep=1, world=self.world) as store:
            loop.before_update = store.wait_for_host_copy
            for number in range(1, self.options.rounds + 1):
                quiet = median(seconds_of(lambda: step(0), device) for _ in range(5))
                start = time.perf_counter()
                store.save(
                    loop.engine.export_state(), step=number, progress={}, description={}
                )
                called = time.perf_counter() - start
                steps = [seconds_of(lambda: step(0), device)]
                while (commit := store.take_committed()) is None:
                    steps.append(seconds_of(lambda: step(0), device))
                row = {
                    "called": called,
                    "added": called + sum(steps) - quiet * len(steps),
                }
                for key, value in (
                    row | {"committed": time.perf_counter() - start}
                ).items():
                    found.setdefault(key, []).append(value)
                if commit.warnings:
                    raise Failed(f"checkpoint: {commit.warnings}")
        loop.engine.close()
        shown = ", ".join(f"{key} {spread(each, '.3f')}" for key, each in found.items())
        print(f"\n{COMPARED}, checkpoint, s: {shown}", flush=True)
        self.keep("stall", found=found)

    def models(self) -> None:
        print(
            "\nmodel  images/s: min / median / max  TFLOP/s  of datasheet  of matmul  memory"
        )
        for name in self.options.models:
            if self.has_time(name):
                self.keep("models", name, found=self.model(name))

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
        of_matmul, datasheet = (
            2 * flops / (before + self.matmul()),
            peak_flops(task.device),
        )
        rates = [task.batch / each for each in seconds]
        gib = " of an estimated ".join(
            f"{each / 2**30:.2f}" for each in memory.values()
        )
        of_datasheet = "-" if datasheet is None else f"{flops / datasheet:.3f}"
        print(
            f"{name:6} {spread(rates):28} {flops / 1e12:8.1f} {of_datasheet:>13} "
            f"{of_matmul:10.3f}  {gib} GiB",
            flush=True,
        )
        loop.engine.close()
        if not losses[-1] < losses[0]:
            raise Failed(
                f"{name}: the loss does not fall: {[float(each) for each in losses]}"
            )
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
            precision="bf16",
            micro_batch=task.batch,
            activation_checkpointing=engine.activation_checkpointing,
            optimizer_bytes=task.run.optim.state_bytes_per_parameter,
            bucket_elements=BUCKET_ELEMENTS,
            costs=objective,
        )
        peak = torch.cuda.max_memory_allocated(self.world.device) if self.on_gpu else 0
        return {"peak_bytes": peak, "estimated_bytes": estimate.total}

    def loops(self) -> None:
        for name in self.options.models:
            if self.has_time(f"loops of {name}"):
                self.keep("loops", name, found=self.compared(name))

    def compared(self, name: str) -> dict[str, Any]:
        """ZeRO 1 (of one model 0 to 2), the bare loop and timm's step, in turn.

        Not ZeRO 3, which replaces `torch.nn.functional.linear` in the whole process: the compiled
        loops beside it lose the gradients of their blocks (torch 2.11).
        """
        task = self.task(name, share=COMPARED_SHARE)
        stages = range(3) if name == COMPARED else (1,)
        sizes = TINY_TIMM if self.options.toy else {}
        bare = partial(BareLoop, task, compiled=self.on_gpu)
        build: dict[str, Callable[[], Any]] = {
            "bare": partial(bare, precision="master"),
            "bare, autocast": partial(bare, precision="autocast"),
            "timm": lambda: TimmLoop(
                MODELS[name].timm_name, task, compiled=self.on_gpu, **sizes
            ),
            **{
                f"ZeRO {stage}": partial(EngineLoop, task, self.world, stage=stage)
                for stage in stages
            },
        }
        losses: dict[str, list[torch.Tensor]] = {kind: [] for kind in build}
        steps = {
            kind: stepper(make(), task.pool, losses[kind])
            for kind, make in build.items()
        }
        for step in steps.values():
            for number in range(WARM_UP):
                step(number)
        seconds = interleaved(steps, **self.turns())
        print(
            f"\n{name}, batch {task.batch}: images/s, min / median / max; speed over bare, timm"
        )
        for kind, each in seconds.items():
            rates = spread([task.batch / one for one in each])
            own = "bare, autocast" if kind in ("ZeRO 0", "bare, autocast") else "bare"
            over = f"{ratio(seconds[own], each)}  {ratio(seconds['timm'], each)}"
            print(f"{kind:15} {rates:20} {over}", flush=True)
            values = [float(loss) for loss in losses[kind][:WARM_UP]]
            expected = [float(loss) for loss in losses[own][:WARM_UP]]
            gap = (
                max(abs(a - b) for a, b in zip(values, expected, strict=True))
                / expected[0]
            )
            if kind.startswith("ZeRO") and not gap < MAX_GAP:
                raise Failed(f"{kind}: losses {values}, of the bare loop {expected}")
        return {"batch": task.batch, "seconds": seconds}

    def data(self) -> None:
        """Steps on JPEGs that the loader decodes, beside steps on synthetic batches."""
        if not self.has_time("data"):
            return
        photos = (
            given_photos(self.options.images) if self.options.images else noise_photos()
        )
        total = int(self.options.total_mib * 2**20)
        source = write_photo_folder(self.work / "photos", photos, total_bytes=total)
        run_command(
            make_shards_command(source.root, self.work / "shards", shard_mib=32)
        )
        task, workers = self.task(COMPARED), max(1, NUM_CORES - 2)
        settings = DataSettings(
            path=str(self.work / "shards"), global_batch=task.batch, num_workers=workers
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
            seconds = interleaved(
                {"synthetic": synthetic, "real": real}, **self.turns()
            )
        print(
            f"\n{COMPARED}, batch {task.batch}, {workers} workers: images/s, min / median / max"
        )
        for name, each in seconds.items():
            print(f"{name:15} {spread([task.batch / one for one in each])}")
        print(f"real / synthetic: {ratio(seconds['synthetic'], seconds['real'])}")
        self.keep(
            "data", found={"batch": task.batch, "workers": workers, "seconds": seconds}
        )


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
