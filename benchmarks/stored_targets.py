"""Compare training from stored targets with training by a live teacher, and with no teacher at all.

    python benchmarks/stored_targets.py --rounds 3 --json results.json

All trainings are those of the command, on one process without loader workers; the rate of a step is
the journal's. Weights are random: they cost what trained ones cost.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

import timm
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.corpora.photo_folder import noise_photos, write_photo_folder
from benchmarks.measuring import (
    make_shards_command,
    parser_of,
    ratio,
    run_benchmark,
    run_command,
    spread,
)
from vitscale.config.errors import run_script
from vitscale.data.loader import training_batches
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet, open_training_set, with_targets
from vitscale.tracking.journal import read_rows

TEACHERS = {
    "S": "vit_small_patch16_224",
    "B": "vit_base_patch16_224",
    "L": "vit_large_patch16_224",
}
# Pixels a side on a CPU: 16 patches instead of 196, for teacher and student alike.
SIDE = 64
BATCH = 16
VIEWS = 2
# With targets a loader repeats a few views, so crops have one size, which costs the same in each.
LOADER_VIEWS = 4
CROP_AREA = (0.35, 0.35)
# Steps before the rate counts.
WARM_STEPS = 2
# 224 px there: with fewer the loader is measured, and not the steps.
ON_GPU = (
    "engine.device=cuda",
    "engine.max_micro_batch=256",
    "data.global_batch=256",
    "data.num_workers=8",
    "model.image_size=224",
)
CONFIG = yaml.safe_load(f"""
stage: pretrain
name: stored-targets
data: {{global_batch: {BATCH}, num_workers: 0, val_split: null}}
model: {{preset: S/16, image_size: {SIDE}}}
optim: {{lr: 0.001}}
schedule: {{warmup_steps: 1}}
engine: {{device: cpu, max_micro_batch: {BATCH}}}
checkpoint: {{every_steps: 100000}}
evaluate: []
tracking: {{uri: null, log_every_steps: 1}}
""")


class Bench:
    """A corpus and its configuration in a folder."""

    def __init__(self, work: Path, options: Any) -> None:
        self.work = work
        self.steps = options.steps
        self.side = SIDE
        self.settings: tuple[str, ...] = ()
        if options.device == "cuda":
            self.side = 224
            self.settings = ON_GPU
        self.number = 0
        photos = noise_photos(**options.noise)
        total_bytes = int(options.total_mib * 2**20)
        source = write_photo_folder(work / "photos", photos, total_bytes=total_bytes)
        self.shards = work / "shards"
        run_command(
            make_shards_command(source.root, self.shards, "images.check=header")
        )

    def features(self, size: str) -> list[str]:
        """The settings of a teacher, whose weights are made at its first use."""
        name = TEACHERS[size]
        weights = self.work / f"{name}.safetensors"
        if not weights.exists():
            torch.manual_seed(0)
            model = timm.create_model(name, img_size=self.side)
            save_file(model.state_dict(), weights)
        teacher = f"{{model: {name}, weights: {weights}, image_size: {self.side}}}"
        grid = self.side // 16
        return [
            "objective.name=features",
            f"objective.teachers=[{teacher}]",
            f"objective.patch_grid=[{grid}, {grid}]",
        ]

    def command(self, script: str, *words: str, output: Path) -> float:
        config = self.work / "config.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        return run_command(
            [
                *(sys.executable, script, "--config", config, f"output={output}"),
                *(f"data.path={self.shards}", f"schedule.steps={self.steps}"),
                *(*self.settings, *words),
            ]
        )

    def prepare(self, size: str, output: Path) -> float:
        """Seconds of the command."""
        words = ("stage=targets", f"views={VIEWS}", *self.features(size))
        return self.command("pretrain/prepare_targets.py", *words, output=output)

    def train(self, *words: str) -> tuple[float, float]:
        """Images per second of a step, and seconds of the whole command."""
        self.number += 1
        folder = self.work / f"run {self.number}"
        seconds = self.command("pretrain/main.py", *words, output=folder)
        rates = [
            row.metrics["vitals/images_per_s"]
            for row, _ in read_rows(folder / "journal.jsonl")
            if "vitals/images_per_s" in row.metrics
        ]
        return median(rates[WARM_STEPS:]), seconds


def loader_rate(bench: Bench, data: TrainingSet, settings: DataSettings) -> float:
    """Images per second of a loader with two workers."""
    loader = training_batches(
        data,
        settings=settings,
        image_size=224,
        seed=0,
        start=0,
        stop=BATCH << 20,
        rank=0,
        world_size=1,
        micro_batch=BATCH,
        pin_memory=False,
    )
    with loader as batches:
        for _ in islice(batches, 12):
            pass
        start = time.perf_counter()
        num_batches = 5 * bench.steps
        for batch in islice(batches, num_batches):
            if data.targets is not None:
                batch.with_targets(data.targets.header)
        return BATCH * num_batches / (time.perf_counter() - start)


def measure_loader(bench: Bench, rounds: int) -> dict[str, list[float]]:
    targets = bench.work / "targets 224"
    words = ("stage=targets", f"views={LOADER_VIEWS}", *bench.features("S"))
    view = ("model.image_size=224", f"data.crop_area={list(CROP_AREA)}")
    bench.command("pretrain/prepare_targets.py", *words, *view, output=targets)

    settings = DataSettings(
        path=str(bench.shards),
        global_batch=BATCH,
        num_workers=2,
        crop_area=CROP_AREA,
    )
    plain = open_training_set(settings, seed=0)
    stored = with_targets(plain, str(targets), settings, image_size=224, seed=0)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(rounds):
        rates["without"].append(loader_rate(bench, plain, settings))
        rates["with"].append(loader_rate(bench, stored, settings))
    return rates


def measure(work: Path, options: Any) -> dict[str, Any]:
    bench = Bench(work, options)
    rates: dict[str, list[float]] = {"supervised": []}
    for size in options.teachers:
        bench.prepare(size, work / f"targets {size}")
    for _ in range(options.rounds):
        rates["supervised"].append(bench.train()[0])
        for size in options.teachers:
            teacher = bench.features(size)
            stored = f"objective.targets={work / f'targets {size}'}"
            for name, words in (("live", teacher), ("stored", [*teacher, stored])):
                rates.setdefault(f"{name} {size}", []).append(bench.train(*words)[0])
    for name, found in rates.items():
        print(f"{name:12} {spread(found, '.1f')} images/s")
    for size in options.teachers:
        stored_rate = rates[f"stored {size}"]
        print(f"stored {size} / supervised: {ratio(stored_rate, rates['supervised'])}")
        print(
            f"stored {size} / live {size}: {ratio(stored_rate, rates[f'live {size}'])}"
        )

    if options.rates_alone:
        return {"rates": rates}
    loader = measure_loader(bench, options.rounds)
    print(
        f"loader with targets, of its rate: {ratio(loader['with'], loader['without'])}"
    )

    # A sweep over the learning rate, from the first command to the end of the last.
    size = options.teachers[-1]
    teacher = bench.features(size)
    targets = work / "sweep"
    seconds = {"stored": bench.prepare(size, targets), "live": 0.0}
    for number in range(options.students):
        rate = f"optim.lr={1e-3 / 2**number}"
        stored = f"objective.targets={targets}"
        seconds["stored"] += bench.train(rate, *teacher, stored)[1]
        seconds["live"] += bench.train(rate, *teacher)[1]
    print(
        f"{options.students} students with a live {size}: {seconds['live']:.0f} s; from stored "
        f"targets, with their preparation: {seconds['stored']:.0f} s; "
        f"ratio {seconds['live'] / seconds['stored']:.2f}"
    )
    return {"loader": loader, "rates": rates, "sweep_s": seconds}


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--total-mib", type=float, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--students", type=int, default=5)
    parser.add_argument("--teachers", nargs="+", default=["S", "B", "L"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--rates-alone", action="store_true", help="no sweep, and not the loader alone"
    )
    parser.set_defaults(noise={})
    if parser.parse_args().toy:
        tiny = {"width": 160, "height": 120, "num": 8}
        toy = {
            "rounds": 1,
            "total_mib": 0.2,
            "steps": 4,
            "teachers": ["S"],
            "students": 1,
        }
        parser.set_defaults(noise=tiny, **toy)
    options = parser.parse_args()
    run_benchmark(options, lambda work: measure(work, options), "timm")


if __name__ == "__main__":
    run_script(main)
