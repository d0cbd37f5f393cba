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
import subprocess
import sys
import time
import webbrowser
from pathlib import Path

try:
    from vitscale.config.errors import UserError, run_script
    from vitscale.distributed.processes import num_gpus
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

ROOT = Path(__file__).resolve().parents[1]
MAX_PROCESSES = 2
# Of a folder, which may be ImageNet: 600 steps see 38,400 images.
FOLDER_LENGTH = "schedule.epochs=null schedule.steps=600"
MAX_PER_CLASS, MAX_IMAGES = 200, 20_000
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
ALLOWED = "a folder with one sub-folder of JPEG, PNG or WebP images per class"


def name_of(folder: Path | None) -> str:
    """The name of the demo on this folder of images, and of its folder below runs/."""
    if folder is None:
        return "demo"
    return f"demo-{re.sub(r'[^A-Za-z0-9_-]+', '-', folder.name).strip('-') or 'folder'}"[:60]


def commands(name: str, *, is_folder: bool) -> dict[str, str]:
    """Title -> command."""
    images, shards = f"runs/{name}/images", f"runs/{name}/shards"
    make_shards = f"python data_prep/make_shards.py source.path={images} output={shards} --config"
    steps = {}
    if is_folder:
        configs, length = "configs/digits", FOLDER_LENGTH
        steps["shards"] = (
            f"{make_shards} configs/data/image_folder.yaml source.holdout_fraction=0.2 "
            "images.short_side=64 shards.min_shards=4"
        )
    else:
        configs, length = "configs/demo", ""
        # 53 accented letters, in the fonts of matplotlib's wheel.
        steps["images"] = f"python data_prep/make_corpus.py characters {images}"
        steps["shards"] = f"{make_shards} configs/data/characters.yaml"
    # Without GPUs two processes share the CPU cores.
    num = min(MAX_PROCESSES, num_gpus() or MAX_PROCESSES)
    train, data = f"deepspeed --num_gpus={num}", f"data.path={shards}"
    pretrain = f"{train} pretrain/main.py --config {configs}/pretrain.yaml {data}"
    finetune = f"{train} finetune/main.py --config {configs}/finetune.yaml {data}"
    runs = [f"runs/{name}-{part}" for part in ("pretrain", "finetune", "scratch")]
    return steps | {
        "pre-train": f"{pretrain} name={name}-pretrain {length}".strip(),
        "fine-tune at a higher resolution": f"{finetune} name={name}-finetune init={runs[0]}",
        "the same from scratch": f"{finetune} name={name}-scratch",
        "compare": f"python launch/compare.py {' '.join(runs)} --output runs/{name}/report.html",
    }


def link_some(folder: Path, target: Path) -> None:
    """Link to at most MAX_PER_CLASS images of each class."""
    classes: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("[!.]*/**/*")):
        if path.suffix.lower() in SUFFIXES:
            classes.setdefault(path.relative_to(folder).parts[0], []).append(path)
    if not classes:
        raise UserError("has no class folders with images", where=f"DATA={folder}", allowed=ALLOWED)
    most = min(MAX_PER_CLASS, max(10, MAX_IMAGES // len(classes)))
    for name, images in classes.items():
        (target / name).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images[:: -(-len(images) // most)]):
            link = target / name / f"{number:04d}{image.suffix}"
            link.unlink(missing_ok=True)
            link.symlink_to(image.resolve())
    print(f"{target}: at most {most} images of each of {len(classes):,} classes of {folder}")


def run_command(title: str, command: str) -> None:
    """Run one step with this Python and the programs beside it."""
    print(f"\n=== {title}\n$ {command}", flush=True)
    program, *words = shlex.split(command)
    if program == "deepspeed":
        print("starting the processes (about 20 s) ...", flush=True)
    python = Path(sys.executable)
    path = python if program == "python" else python.with_name(program)
    if code := subprocess.run([path, *words], cwd=ROOT).returncode:
        raise UserError(
            f"{title} ended with exit code {code}",
            where=command,
            next_step="fix the error shown above; `make demo` resumes from here",
        )


def final_top1(run: str) -> float:
    rows = map(json.loads, (ROOT / f"runs/{run}/journal.jsonl").read_text().splitlines())
    return [row["val/top1"] for row in rows if "val/top1" in row][-1]


def print_summary(name: str, *, minutes: float, is_folder: bool) -> None:
    low, high, configs = (16, 24, "digits") if is_folder else (8, 16, "demo")
    parts = {
        "pretrain": f"pre-trained at {low} px",
        "finetune": f"fine-tuned from it at {high} px",
        "scratch": "the same fine-tuning from random weights",
    }
    print(f"\n=== Done in {minutes:.1f} minutes\n\nAccuracy (top-1 on the test images):")
    for part, text in parts.items():
        print(f"  {final_top1(f'{name}-{part}'):7.2%}  {text:42} runs/{name}-{part}")
    print(
        f"""
Made:
  runs/{name}/shards/        WebDataset tars, index.parquet, ledger.parquet (a row per input file)
  runs/{name}-pretrain/      config.yaml, journal.jsonl, logs/, checkpoints/
  runs/{name}/report.html    the runs compared in one page: open it in a browser

Try next:
  .venv/bin/mlflow ui --backend-store-uri sqlite:///runs/mlflow.db
  .venv/bin/python launch/slurm.py --config configs/vit_h14.yaml --dry-run
  .venv/bin/deepspeed --num_gpus 2 pretrain/main.py --config configs/{configs}/pretrain.yaml \\
    data.path=runs/{name}/shards name={name}-deeper model.depth=6
  make demo DATA=/path/to/folder    # your own images, one sub-folder per class"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the whole chain on a small corpus.")
    parser.add_argument("--data", type=Path, help="folder with one sub-folder of images per class")
    parser.add_argument("--open", action="store_true", help="show the report in the browser")
    arguments = parser.parse_args()
    folder = None if arguments.data is None else arguments.data.resolve()
    name, start = name_of(folder), time.monotonic()
    if folder is not None:
        link_some(folder, ROOT / f"runs/{name}/images")
    steps = commands(name, is_folder=folder is not None)
    for number, (title, command) in enumerate(steps.items(), start=1):
        run_command(f"{number}/{len(steps)} {title}", command)
    minutes = (time.monotonic() - start) / 60
    print_summary(name, minutes=minutes, is_folder=folder is not None)
    if arguments.open and not webbrowser.open((ROOT / f"runs/{name}/report.html").as_uri()):
        print(f"no browser found; open runs/{name}/report.html yourself", file=sys.stderr)


if __name__ == "__main__":
    run_script(main)
