"""Measure training on one device: our engine beside a bare loop and timm's, and with real images.

    python benchmarks/gpu_training.py --sections probe recipes host --json first.json
    python benchmarks/gpu_training.py --device cpu --toy           # to show that it works

One rank does not communicate, so ZeRO costs its hooks, copies and checks here. Sections, in order:
    probe    versions, attention kernel, rates of large matrix products
    recipes  every ZeRO stage with every kind of recipe, ten steps of B/16 each
    host     time of an update whose kernels are too small to matter, and its calls of ATen
    models   each model with ZeRO 1: images/s, share of the product's rate, peak memory
    objectives   the same of DINO, LeJEPA, and distillation by a live teacher beside none
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from timm import create_model
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
    run_steps,
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
from vitscale.models.costs import memory_estimate
from vitscale.training.interval_log import peak_flops

# Of the recipes in configs/: no regularisation, 1,000 classes, softmax, clipping, a short schedule.
PLAIN = (
    # The model that timm has under the same name.
    "model.num_classes=1000",
    "model.representation_layer=false",
    "model.dropout=0.0",
    "model.head_bias=0.0",
    # What all loops do: softmax, a clipped gradient norm, decay.
    "objective.loss=softmax",
    "optim.clip_norm=1.0",
    "optim.lr=3e-4",
    "optim.weight_decay=0.1",
    # Short, so that the loss falls within the steps of a measurement.
    "schedule.epochs=null",
    "schedule.steps=1000",
    "schedule.warmup_steps=10",
    "schedule.final_lr=0.0",
    "schedule.decay=cosine",
    # Nothing beside the steps.
    "checkpoint.every_steps=1000",
    "evaluate=[]",
    "tracking.uri=null",
)
TINY = (
    "model.width=48",
    "model.depth=2",
    "model.num_heads=2",
    "model.mlp_width=96",
    "model.image_size=32",
    "model.patch_size=8",
)
# By timm's names, but for the MLP, which is wider there: a toy compares no speed.
TINY_TIMM = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}


@dataclass(frozen=True)
class Model:
    """A recipe of configs/, the batch that fills a GPU of 80 GB, and timm's name."""

    config: str
    batch: int
    timm_name: str = ""
    settings: tuple[str, ...] = PLAIN


MODELS = {
    "B16": Model("vit_b16", 512, "vit_base_patch16_224"),
    "L16": Model("vit_l16", 256, "vit_large_patch16_224"),
    "H14": Model("vit_h14", 128, "vit_huge_patch14_224"),
    # So few images that the host is busy as long as the device.
    "B16x64": Model("vit_b16", 64, "vit_base_patch16_224"),
}
# Without labels, and S/16 without and with a teacher that is run.
S16 = (*PLAIN, "model.preset=S/16")
LIVE_TEACHER = "objective.name=features"
LEARNING = (*S16, LIVE_TEACHER, "model.num_classes=null")
OBJECTIVES = {
    "DINO-S16": Model("self_supervised/dino_s16", 128, settings=()),
    "LeJEPA-B16": Model("self_supervised/lejepa_b16", 128, settings=()),
    "S16": Model("vit_b16", 256, settings=S16),
    "S16-live-L": Model("vit_b16", 256, settings=LEARNING),
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
RECIPE_BATCH = 32
RECIPE_STEPS = 10
# So few that the device waits for the host.
HOST_BATCH = 4
# Each is a method of `Bench`; the order is that of the module's description.
SECTIONS = (
    "probe",
    "recipes",
    "host",
    "models",
    "objectives",
    "kernels",
    "loops",
    "stall",
    "data",
)
# Rows, columns, and terms of each sum; the last is that of the MLP of L/16.
PRODUCTS = ((4096,) * 3, (8192,) * 3, (16384,) * 3, (50432, 4096, 1024))
# Largest gap to the losses of the bare loop, over its first loss; other sums of bf16.
MAX_GAP = 0.01
# Steps that compile, choose kernels and fill the allocator's pools.
WARM_UP = 10
NUM_KERNELS = 20


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS)
    )
    parser.add_argument("--minutes", type=float, default=9, help="of one call")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument(
        "--stages", type=int, nargs="+", default=[1], help="of ZeRO, in `loops`"
    )
    parser.add_argument(
        "--images", type=Path, help="folder or tar of JPEGs; default: noise"
    )
    parser.add_argument(
        "--total-mib", type=float, default=700, help="images are repeated"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each loop and round")

    # Only defaults change, so what is given with --toy still counts.
    if parser.parse_args().toy:
        parser.set_defaults(rounds=2, steps=2, total_mib=1)
    options = parser.parse_args()
    run_benchmark(
        options,
        lambda work: measure(work, options),
        "torch",
        "deepspeed",
        "timm",
    )


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_threads = None
    # Threads cost a tiny model more than they give.
    if options.toy:
        num_threads = 1
    group = process_group(
        device=options.device,
        timeout_min=10,
        num_threads=num_threads,
    )
    with group as world:
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

    def keep(self, *keys: str, result: Any) -> None:
        """Add a result and write all of them."""
        *sections, last = keys
        section = self.results
        for key in sections:
            section = section.setdefault(key, {})
        section[last] = result
        # Now, since the machine may be taken away before the end.
        if self.options.json:
            self.options.json.write_text(json.dumps(self.results, indent=1) + "\n")

    def has_time(self, name: str) -> bool:
        """Whether a measurement may begin; a line says which one does not."""
        minutes = self.options.minutes
        if time.monotonic() - self.began < minutes * 60:
            return True
        print(f"{name}: left out, {minutes:g} minutes are over", flush=True)
        return False

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def task(self, name: str, *more: str, batch: int | None = None) -> Task:
        """A model or objective with its batch, or another, and further overrides."""
        # Every task is a new model: what the last one left must not take its memory.
        start_afresh(self.world.device)

        model = (MODELS | OBJECTIVES)[name]
        overrides = [*model.settings, *more]
        # Others have losses of their own, and refuse the key.
        if any(word.startswith("objective.name=") for word in overrides):
            overrides.remove("objective.loss=softmax")
        if LIVE_TEACHER in overrides:
            overrides += self.teacher()
        if batch is None:
            batch = model.batch
        if self.options.toy:
            batch = 4
            overrides += TINY
            # Local views have 96 pixels a side, which global ones may not fall below.
            if name in OBJECTIVES:
                overrides.append("model.image_size=96")
        overrides += [
            f"data.global_batch={batch}",
            # One micro-batch: accumulation would hide what an update costs.
            f"engine.max_micro_batch={batch}",
            f"engine.device={self.world.device.type}",
            "engine.precision=bf16",
        ]
        path = ROOT / "configs" / f"{model.config}.yaml"
        run = load_run(PretrainRun, path, overrides=overrides, with_site=False).run
        return Task(run=run, device=self.world.device)

    def teacher(self) -> list[str]:
        """The settings of a teacher, whose random weights cost what trained ones cost."""
        name = "vit_large_patch16_224"
        if self.options.toy:
            name = "vit_tiny_patch16_224"
        weights = self.work / "teacher.safetensors"
        save_file(create_model(name).state_dict(), weights)
        return [f"objective.teachers=[{{model: {name}, weights: {weights}}}]"]

    def probe(self) -> None:
        """What every other number depends on."""
        device = self.world.device
        name = "cpu"
        capability = None
        if self.on_gpu:
            name = torch.cuda.get_device_name(device)
            capability = torch.cuda.get_device_capability(device)
        # The shape of L/16: torch chooses a kernel of attention by shape and type.
        query = torch.empty(2, 16, 197, 64, device=device, dtype=torch.bfloat16)
        facts: dict[str, Any] = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": name,
            "capability": capability,
            "attention": int(torch._fused_sdp_choice(query, query, query)),
            "product": self.product,
            "matmul_flops": self.matmul(),
        }
        shown = ", ".join(f"{key} {value}" for key, value in facts.items())
        print("\n" + shown, flush=True)
        self.keep("probe", result=facts)

    def recipes(self) -> None:
        """Ten steps, not compiled, of every stage and kind of recipe: none fails."""
        print("\nB16, ten steps: loss of the first and the last one")
        for number, (kind, overrides) in enumerate(RECIPES.items()):
            stages: Iterable[int] = range(4)
            # To show that it works, each kind runs at one stage.
            if self.options.toy:
                stages = [number % 4]
            # LAMB needs whole tensors, which ZeRO 0 alone has.
            if kind == "lamb":
                stages = [0]
            for stage in stages:
                where = f"{kind}, ZeRO {stage}"
                if not self.has_time(where):
                    continue
                task = self.task(
                    "B16",
                    *overrides,
                    f"engine.zero_stage={stage}",
                    # Compiling each of them would take longer than all their steps.
                    "engine.compile=false",
                    batch=RECIPE_BATCH,
                )
                loop = EngineLoop(task, self.world, stage=stage)
                losses: list[torch.Tensor] = []
                run_steps(stepper(loop, task.pool, losses), RECIPE_STEPS)
                values = [float(loss) for loss in losses]
                # DeepSpeed's hooks stay in the process otherwise, and in the next loop's way.
                loop.engine.close()

                print(f"{where:24} {values[0]:8.4f} {values[-1]:8.4f}", flush=True)
                self.keep("recipes", where, result=values)
                if not all(map(math.isfinite, values)):
                    raise Failed(f"{where}: losses {values}")

    def host(self) -> None:
        """Time of an update of four images, which is the host's on any GPU; nothing is compiled."""
        print(f"\nbatch {HOST_BATCH}, not compiled: ms of an update, calls of ATen")
        for name in self.options.models:
            eager = "engine.compile=false"
            task = self.task(name, eager, batch=HOST_BATCH)
            # The most groups of parameters that a recipe has: two for each layer.
            layers = "optim.layer_decay=0.75"
            decayed = self.task(name, eager, layers, batch=HOST_BATCH)
            engine = partial(EngineLoop, task, self.world)
            build: dict[str, Callable[[], Any]] = {
                "bare": partial(BareLoop, task, precision="master", compiled=False),
                "ZeRO 0": partial(engine, stage=0),
                "ZeRO 1": partial(engine, stage=1),
                "layer decay": partial(EngineLoop, decayed, self.world, stage=1),
            }
            for kind, make in build.items():
                if not self.has_time(f"{name}, {kind}"):
                    return
                step = stepper(make(), task.pool, [])
                run_steps(step, WARM_UP)
                seconds = interleaved({kind: step}, **self.turns())[kind]

                # Outside the clock, since counting takes longer than most calls.
                with Calls() as calls:
                    step(WARM_UP)
                count = calls.count
                print(f"{name:5} {kind:12} {1000 * median(seconds):8.2f} {count:6}")
                result = {"seconds": seconds, "calls": count}
                self.keep("host", name, kind, result=result)

    def kernels(self) -> None:
        """The kernels that take most of three steps with ZeRO 1."""
        for name in self.options.models:
            if not self.has_time(f"kernels of {name}"):
                return
            task = self.task(name)
            loop = EngineLoop(task, self.world)
            step = stepper(loop, task.pool, [])
            run_steps(step, WARM_UP)
            synchronize(self.world.device)

            activity = ProfilerActivity.CPU
            spent = attrgetter("self_cpu_time_total")
            if self.on_gpu:
                activity = ProfilerActivity.CUDA
                spent = attrgetter("self_device_time_total")
            with profile(activities=[activity]) as trace:
                run_steps(step, 3)
                # Inside the trace, or it would miss the kernels that are still in the queue.
                synchronize(self.world.device)

            rows = sorted(trace.key_averages(), key=spent, reverse=True)
            table = []
            print(f"\n{name}, batch {task.batch}: calls and us of a step")
            for row in rows[:NUM_KERNELS]:
                count = row.count / 3
                micros = spent(row) / 3
                table.append((row.key, count, micros))
                print(f"{row.key[:70]:70} {count:7.1f} {micros:10.1f}")
            loop.engine.close()
            self.keep("kernels", name, result=table)

    def stall(self) -> None:
        """What steps take longer from a save until it is committed."""
        if not self.has_time("checkpoint stall"):
            return
        task = self.task(COMPARED)
        loop = EngineLoop(task, self.world)
        step = stepper(loop, task.pool, [])
        run_steps(step, WARM_UP)

        def timed_step() -> float:
            return seconds_of(lambda: step(0), self.world.device)

        seconds: dict[str, list[float]] = {"called": [], "added": [], "committed": []}
        folder = Path(tempfile.mkdtemp(dir=self.work))
        with CheckpointStore(folder, keep=1, world=self.world) as store:
            loop.before_update = store.wait_for_host_copy
            for number in range(1, self.options.rounds + 1):
                # Anew in each round: a card that becomes warm becomes slower.
                quiet = median(timed_step() for _ in range(5))
                start = time.perf_counter()
                state = loop.engine.export_state()
                store.save(state, step=number, progress={}, description={})
                called = time.perf_counter() - start

                # All steps until the commit: the copy and the writing may slow each of them.
                steps = [timed_step()]
                while (commit := store.take_committed()) is None:
                    steps.append(timed_step())
                seconds["called"].append(called)
                seconds["added"].append(called + sum(steps) - quiet * len(steps))
                seconds["committed"].append(time.perf_counter() - start)
                if commit.warnings:
                    raise Failed(f"checkpoint: {commit.warnings}")
        loop.engine.close()

        cells = [f"{key} {spread(values, '.3f')}" for key, values in seconds.items()]
        print(f"\n{COMPARED}, checkpoint, s: {', '.join(cells)}", flush=True)
        self.keep("stall", result=seconds)

    def models(self) -> None:
        self.measure_all("models", self.options.models)

    def objectives(self) -> None:
        self.measure_all("objectives", OBJECTIVES)

    def measure_all(self, section: str, names: Iterable[str]) -> None:
        print(
            f"\n{section}  images/s: min / median / max  TFLOP/s  of datasheet  of matmul  memory"
        )
        for name in names:
            if self.has_time(name):
                self.keep(section, name, result=self.model(name))

    def model(self, name: str) -> dict[str, Any]:
        """The whole engine at ZeRO 1."""
        task = self.task(name)
        losses: list[torch.Tensor] = []
        loop = EngineLoop(task, self.world)
        step = stepper(loop, task.pool, losses)
        # Apart from the others, since it compiles.
        first_s = seconds_of(lambda: step(0), self.world.device)
        memory = self.memory(task, warm=step)

        # A product before and after: the clock of a card falls while it becomes warm.
        matmul_before = self.matmul()
        seconds = interleaved({name: step}, **self.turns())[name]
        matmul_flops = (matmul_before + self.matmul()) / 2
        rates = [task.batch / value for value in seconds]
        costs = task.run.make_objective()
        flops = task.batch / median(seconds) * costs.train_flops_per_image(task.arch)

        # Not every device has a datasheet that we know.
        datasheet = peak_flops(task.device)
        of_datasheet = None
        shown = "-"
        if datasheet is not None:
            of_datasheet = flops / datasheet
            shown = f"{of_datasheet:.3f}"
        of_matmul = flops / matmul_flops
        peak, estimate = (f"{num / 2**30:.2f}" for num in memory.values())
        print(
            f"{name:6} {spread(rates):28} {flops / 1e12:8.1f} {shown:>13} "
            f"{of_matmul:10.3f}  {peak} of an estimated {estimate} GiB",
            flush=True,
        )
        loop.engine.close()

        # A fast step that does not train is worth nothing. Objectives warm up for epochs.
        values = [float(loss) for loss in losses]
        is_better = values[-1] < values[0] or name not in MODELS
        if not (is_better and math.isfinite(values[-1])):
            raise Failed(f"{name}: the loss does not fall: {values}")
        return {
            "batch": task.batch,
            "first_step_s": first_s,
            "images_per_s": rates,
            "model_flops": flops,
            "of_datasheet": of_datasheet,
            "of_matmul": of_matmul,
            **memory,
        }

    @cached_property
    def product(self) -> tuple[int, ...]:
        """The shape of the fastest product: cool, after ten, and warm, after a second of work."""
        if self.options.toy:
            return (64, 64, 64)
        rates = {}
        for shape in PRODUCTS:
            cool, warm = (
                matmul_rate(self.world.device, shape=shape, seconds=seconds)
                for seconds in (0, 1)
            )
            print(f"product {shape}: {cool / 1e12:.0f} cool, {warm / 1e12:.0f} warm")
            rates[shape] = warm
            self.keep("products", str(shape), result={"cool": cool, "warm": warm})
        return max(rates, key=rates.__getitem__)

    def matmul(self) -> float:
        seconds = 0 if self.options.toy else 1
        return matmul_rate(self.world.device, shape=self.product, seconds=seconds)

    def turns(self) -> dict[str, Any]:
        return {
            "rounds": self.options.rounds,
            "steps_per_round": self.options.steps,
            "device": self.world.device,
        }

    def memory(self, task: Task, *, warm: Callable[[int], Any]) -> dict[str, int]:
        """Bytes: the peak of the allocator in a few steps (0 on CPUs), and the estimate."""
        run_steps(warm, WARM_UP - 1, first=1)
        synchronize(self.world.device)
        # The estimate that --dry-run shows, of the same settings.
        estimate = memory_estimate(
            task.arch,
            zero_stage=1,
            world_size=1,
            precision="bf16",
            micro_batch=task.batch,
            activation_checkpointing=task.run.engine.activation_checkpointing,
            optimizer_bytes=task.run.optim.state_bytes_per_parameter,
            bucket_elements=BUCKET_ELEMENTS,
            costs=task.run.make_objective(),
        )
        peak = 0
        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated(self.world.device)
        return {"peak_bytes": peak, "estimated_bytes": estimate.total}

    def loops(self) -> None:
        for name in self.options.models:
            if self.has_time(f"loops of {name}"):
                self.keep("loops", name, result=self.compared(name))

    def compared(self, name: str) -> dict[str, Any]:
        """The engine, the bare loop and timm's step, in turn.

        Not ZeRO 3, which replaces `torch.nn.functional.linear` in the whole process: the compiled
        loops beside it lose the gradients of their blocks (torch 2.11).
        """
        # Several loops are in memory at once.
        task = self.task(name, batch=max(64, MODELS[name].batch // 2))
        sizes: dict[str, int] = {}
        if self.options.toy:
            sizes = TINY_TIMM
        compiled = self.on_gpu
        loops: dict[str, Any] = {
            "bare": BareLoop(task, precision="master", compiled=compiled),
            "timm": TimmLoop(MODELS[name].timm_name, task, compiled=compiled, **sizes),
        }
        autocast = partial(BareLoop, task, precision="autocast", compiled=compiled)
        # Each takes memory, and time to compile.
        for stage in self.options.stages:
            if stage == 0:
                loops["bare, autocast"] = autocast()
            loops[f"ZeRO {stage}"] = EngineLoop(task, self.world, stage=stage)

        losses: dict[str, list[torch.Tensor]] = {kind: [] for kind in loops}
        steps = {
            kind: stepper(loop, task.pool, losses[kind]) for kind, loop in loops.items()
        }
        for step in steps.values():
            run_steps(step, WARM_UP)
        seconds = interleaved(steps, **self.turns())

        print(
            f"\n{name}, batch {task.batch}: images/s, min / median / max; speed over bare, timm"
        )
        for kind, values in seconds.items():
            # Beside the bare loop that keeps its weights in the same precision.
            peer = "bare"
            if kind in ("ZeRO 0", "bare, autocast"):
                peer = "bare, autocast"
            rates = spread([task.batch / value for value in values])
            over = f"{ratio(seconds[peer], values)}  {ratio(seconds['timm'], values)}"
            print(f"{kind:15} {rates:20} {over}", flush=True)
            if kind.startswith("ZeRO"):
                check_losses(kind, losses[kind], losses[peer])
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
        shards = self.work / "shards"
        run_command(make_shards_command(source.root, shards, shard_mib=32))

        task = self.task(COMPARED)
        # Two cores are left to the step and to the thread that moves batches.
        workers = max(1, NUM_CORES - 2)
        settings = DataSettings(
            path=str(shards),
            global_batch=task.batch,
            num_workers=workers,
        )
        loader = training_batches(
            open_training_set(settings, seed=0),
            settings=settings,
            image_size=task.arch.image_size,
            seed=0,
            start=0,
            # More batches than any measurement takes.
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
                # As pretrain/main.py: the next batch is moved while the device is busy.
                on_device.prefetch()
                return loss

            run_steps(synthetic, WARM_UP)
            # What the loader has prefetched must not count.
            run_steps(real, 2 * workers + 2)
            steps = {"synthetic": synthetic, "real": real}
            seconds = interleaved(steps, **self.turns())

        print(
            f"\n{COMPARED}, batch {task.batch}, {workers} workers: images/s, min / median / max"
        )
        for name, values in seconds.items():
            print(f"{name:15} {spread([task.batch / value for value in values])}")
        print(f"real / synthetic: {ratio(seconds['synthetic'], seconds['real'])}")
        result = {"batch": task.batch, "workers": workers, "seconds": seconds}
        self.keep("data", result=result)


def stepper(
    loop: Any, pool: list[Images], losses: list[torch.Tensor]
) -> Callable[[int], torch.Tensor]:
    """Steps over the batches of the pool in turn; keeps the losses on the device."""

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = loop.step(number, *pool[number % len(pool)])
        # As tensors: their values would make the host wait for the device at each step.
        losses.append(loss)
        return loss

    return step


def check_losses(
    kind: str, losses: list[torch.Tensor], of_peer: list[torch.Tensor]
) -> None:
    """Raise Failed unless the first losses are those of the bare loop, within MAX_GAP."""
    # Later ones drift apart: each update is computed from the sums of the one before.
    values = [float(loss) for loss in losses[:WARM_UP]]
    expected = [float(loss) for loss in of_peer[:WARM_UP]]
    gaps = [abs(a - b) for a, b in zip(values, expected, strict=True)]
    if not max(gaps) / expected[0] < MAX_GAP:
        raise Failed(f"{kind}: losses {values}, of the bare loop {expected}")


if __name__ == "__main__":
    run_script(main)
