"""Run the whole chain on a small corpus: shard, pre-train, fine-tune, compare.

    python launch/demo.py                     letters, rendered from the fonts in matplotlib's wheel
    python launch/demo.py --data FOLDER       any folder with one sub-folder of images per class

Every step is one of the project's own commands, printed before it runs. Run it again to resume.
--open shows the report in the browser at the end.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path

try:
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.processes import num_gpus
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

ROOT = Path(__file__).resolve().parents[1]
MAX_PROCESSES = 2
# Lines of the deepspeed launcher, left out of the output.
LAUNCHER_LINE = re.compile(r"^(\[rank\d\]:)?(\[\d{4}-|W\d{4}).*(INFO|WARNING|No CUDA runtime)")
FOLDER_STEPS = 600
# Of a folder, which may be ImageNet: 600 steps see 38,400 images.
MAX_PER_CLASS, MAX_IMAGES = 200, 20_000
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
SPLITS = {"train", "training", "val", "valid", "validation", "test"}
ALLOWED = "a folder with one sub-folder of JPEG, PNG or WebP images per class"
# 53 accented letters, in the fonts of matplotlib's wheel.
LETTERS = shlex.split("--sets western --grey-levels fixed --num-train 160 --num-test 40")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Names and paths of the demo on one corpus."""

    name: str
    data: Path | None
    image_sizes: tuple[int, int]
    """Of pre-training and of fine-tuning, in pixels."""

    @property
    def shards(self) -> str:
        return f"runs/{self.name}/shards"

    @property
    def images(self) -> Path:
        return ROOT / "runs" / self.name / "images"

    @property
    def report(self) -> str:
        return f"runs/{self.name}/report.html"

    @property
    def configs(self) -> str:
        return "configs/demo" if self.data is None else "configs/digits"

    def run(self, part: str) -> str:
        return f"{self.name}-{part}"


def corpus_of(data: str | None) -> Corpus:
    if data is None:
        return Corpus(name="demo", data=None, image_sizes=(8, 16))
    folder = Path(data).resolve()
    if not folder.is_dir():
        raise UserError(
            "no such folder",
            where=f"DATA={data}",
            allowed=ALLOWED,
        )
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-") or "folder"
    return Corpus(name=f"demo-{slug}"[:60], data=folder, image_sizes=(16, 24))


def copy_some(corpus: Corpus) -> None:
    """Link, or copy, at most MAX_PER_CLASS images of each class; of IMAGES/{train,val} of train."""
    folder, target = corpus.data, corpus.images
    if folder is None or target.exists():
        return
    classes = sub_folders(folder)
    if len(classes) > 1 and {path.name.lower() for path in classes} <= SPLITS:
        folder = next((path for path in classes if path.name.lower().startswith("train")), folder)
        classes = sub_folders(folder)
    most = min(MAX_PER_CLASS, max(10, MAX_IMAGES // max(1, len(classes))))
    started = target.with_name("images.part")
    shutil.rmtree(started, ignore_errors=True)
    for each in classes:
        images = sorted(path for path in each.rglob("*") if path.suffix.lower() in SUFFIXES)
        for number, image in enumerate(images[:: -(-len(images) // most) or 1]):
            copy = started / each.name / f"{number:04d}{image.suffix}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                copy.hardlink_to(image.resolve())
            except OSError:  # on another file system
                shutil.copyfile(image, copy)
    if not started.exists():
        raise UserError("has no class folders with images", where=f"DATA={folder}", allowed=ALLOWED)
    started.rename(target)
    print(f"{target}: at most {most} images of each of {len(classes):,} classes of {folder}")


def sub_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def data_commands(corpus: Corpus) -> list[list[str]]:
    make_shards = [sys.executable, "data_prep/make_shards.py", "--config"]
    if corpus.data is None:
        return [
            [
                sys.executable,
                "data_prep/make_corpus.py",
                "characters",
                "runs/demo/images",
                *LETTERS,
            ],
            [
                *make_shards,
                "configs/data/characters.yaml",
                "source.path=runs/demo/images",
                f"output={corpus.shards}",
            ],
        ]
    return [
        [
            *make_shards,
            "configs/data/image_folder.yaml",
            f"source.path={corpus.images}",
            f"output={corpus.shards}",
            "source.holdout_fraction=0.2",
            "images.short_side=64",
            "shards.min_shards=4",
        ]
    ]


def training_command(corpus: Corpus, script: str, config: str, part: str, *more: str) -> list[str]:
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    overrides = [f"name={corpus.run(part)}", f"data.path={corpus.shards}", *more]
    # Without GPUs two processes share the CPU cores.
    processes = f"--num_gpus={min(MAX_PROCESSES, num_gpus() or MAX_PROCESSES)}"
    return [launcher, processes, script, "--config", config, *overrides]


def training_commands(corpus: Corpus) -> list[list[str]]:
    pretrain, finetune = (f"{corpus.configs}/{part}.yaml" for part in ("pretrain", "finetune"))
    # The size of a folder is unknown: a fixed number of steps bounds the demo's time.
    length = (
        [] if corpus.data is None else ["schedule.epochs=null", f"schedule.steps={FOLDER_STEPS}"]
    )
    init = f"init=runs/{corpus.run('pretrain')}"
    return [
        training_command(corpus, "pretrain/main.py", pretrain, "pretrain", *length),
        training_command(corpus, "finetune/main.py", finetune, "finetune", init),
        training_command(corpus, "finetune/main.py", finetune, "scratch"),
    ]


def run_command(title: str, command: list[str]) -> None:
    """Run one step, showing its output as it comes."""
    shown = [Path(command[0]).name, *command[1:]]
    print(f"\n=== {title}\n$ {shlex.join(shown)}", flush=True)
    if shown[0] == "deepspeed":
        print("starting the processes (about 20 s) ...", flush=True)
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if not LAUNCHER_LINE.match(line):
                print(line, end="", flush=True)
    if process.returncode:
        raise UserError(
            f"{title} ended with exit code {process.returncode}",
            where=shlex.join(shown),
            next_step="fix the error shown above; `make demo` resumes from here",
        )


def last_value(run: str, metric: str) -> float:
    """The last value of a metric in a run's journal."""
    rows = (ROOT / "runs" / run / "journal.jsonl").read_text().splitlines()
    return [row[metric] for row in map(json.loads, rows) if metric in row][-1]


def print_summary(corpus: Corpus, *, seconds: float) -> None:
    low, high = corpus.image_sizes
    parts = {
        "pretrain": f"pre-trained at {low} px",
        "finetune": f"fine-tuned from it at {high} px",
        "scratch": "the same fine-tuning from random weights",
    }
    print(f"\n=== Done in {seconds / 60:.1f} minutes\n\nAccuracy (top-1 on the test images):")
    for part, text in parts.items():
        accuracy = last_value(corpus.run(part), "val/top1")
        print(f"  {accuracy:7.2%}  {text:42} runs/{corpus.run(part)}")
    print(
        f"""
Made:
  {corpus.shards}/    WebDataset tars, index.parquet, ledger.parquet (one row per input file)
  runs/{corpus.run("pretrain")}/    config.yaml, journal.jsonl, logs/, checkpoints/

Look at the runs:
  {corpus.report}    compared in one page, with curves and pictures: open it in a browser
  .venv/bin/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db    the same runs in MLflow

Try next:
  .venv/bin/python launch/slurm.py --config configs/vit_h14.yaml --dry-run
  .venv/bin/deepspeed --num_gpus 2 pretrain/main.py --config {corpus.configs}/pretrain.yaml \\
    data.path={corpus.shards} name={corpus.run("deeper")} model.depth=6
  make demo DATA=/path/to/folder    # your own images, one sub-folder per class"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the whole chain on a small corpus.")
    parser.add_argument("--data", help="folder with one sub-folder of images per class")
    parser.add_argument("--open", action="store_true", help="show the report in the browser")
    arguments = parser.parse_args()
    corpus = corpus_of(arguments.data)
    start = time.monotonic()
    copy_some(corpus)
    titles = ["images", "shards"] if corpus.data is None else ["shards"]
    titles += ["pre-train", "fine-tune at a higher resolution", "the same from scratch", "compare"]
    runs = [f"runs/{corpus.run(part)}" for part in ("pretrain", "finetune", "scratch")]
    compare = [sys.executable, "launch/compare.py", *runs, "--output", corpus.report]
    commands = [*data_commands(corpus), *training_commands(corpus), compare]
    for number, (title, command) in enumerate(zip(titles, commands, strict=True), start=1):
        run_command(f"{number}/{len(commands)} {title}", command)
    print_summary(corpus, seconds=time.monotonic() - start)
    if arguments.open and not webbrowser.open((ROOT / corpus.report).as_uri()):
        print(f"no browser found; open {corpus.report} yourself", file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
