"""Run the whole chain on a small corpus: shard, pre-train, fine-tune, compare.

    vitscale demo                   letters, rendered from the fonts in matplotlib's wheel
    vitscale demo --data FOLDER     any folder with one sub-folder of images per class

Every step is one of the project's own commands, printed before it runs, and writes to runs/ in the
current folder. Run it again to resume. --open shows the report in the browser at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import webbrowser
from pathlib import Path

try:
    from vitscale.config.errors import (
        EXIT_INTERRUPTED,
        EXIT_STOPPED_RESUMABLE,
        UserError,
        run_script,
    )
    from vitscale.data.folders import files_below, folders_in, is_image_name
    from vitscale.data.split_names import splits_of_folders
    from vitscale.distributed.processes import num_gpus
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

MAX_PROCESSES = 2
# Of a folder, which may be ImageNet: 600 steps see 38,400 images.
FOLDER_LENGTH = "schedule.epochs=null schedule.steps=600"
MAX_PER_CLASS, MAX_IMAGES = 200, 20_000
ALLOWED = "a folder with one sub-folder of images per class"


def name_of(folder: Path) -> str:
    """The name of the demo on this folder of images, and of its folder below runs/.

    It ends in a hash of the paths of its images: folders of one name hold others, and so does a
    folder that has changed, whose shards and runs are those of the images before.
    """
    paths = "\0".join(sorted(filter(is_image_name, files_below(folder))))
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-") or "folder"
    return f"demo-{readable[:50]}-{hashlib.sha256(os.fsencode(paths)).hexdigest()[:8]}"


def folder_of_classes(folder: Path) -> Path:
    """The folder itself, or that of its training split. Raises UserError if this is not clear."""
    try:
        splits = splits_of_folders(folder)
    except UserError as error:
        step = (
            f"name the folder whose sub-folders are classes, such as {folder / 'train'}"
        )
        raise UserError(error.what, where=f"DATA={folder}", next_step=step) from None
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise UserError(what, where=f"DATA={folder}", allowed=ALLOWED) from None
    if not splits:
        return folder
    print(
        f"{folder} has the splits {', '.join(splits)}; the demo takes images of train alone"
    )
    return folder / splits["train"]


def commands(name: str, *, configs: str) -> dict[str, str]:
    """Title -> command. configs: `digits` for a folder of images, `demo` for letters."""
    images, shards = f"runs/{name}/images", f"runs/{name}/shards"
    paths = f"source.path={images} output={shards}"
    steps = {}
    length = ""
    if configs == "digits":
        length = FOLDER_LENGTH
        steps["shards"] = (
            f"vitscale prepare shards data/image_folder {paths} source.holdout_fraction=0.2 "
            "images.short_side=64 shards.min_shards=4"
        )
    else:
        # 53 accented letters, in the fonts of matplotlib's wheel.
        steps["images"] = f"vitscale prepare corpus characters {images}"
        steps["shards"] = f"vitscale prepare shards data/characters {paths}"
    # Without GPUs two processes share the CPU cores.
    num = min(MAX_PROCESSES, num_gpus() or MAX_PROCESSES)
    how = f"--num-procs {num} data.path={shards}"
    pretrain = f"vitscale pretrain {configs}/pretrain {how}"
    finetune = f"vitscale finetune {configs}/finetune {how}"
    runs = [f"runs/{name}-{part}" for part in ("pretrain", "finetune", "scratch")]
    return steps | {
        "pre-train": f"{pretrain} name={name}-pretrain {length}".strip(),
        "fine-tune at a higher resolution": f"{finetune} name={name}-finetune init={runs[0]}",
        "the same from scratch": f"{finetune} name={name}-scratch",
        "compare": f"vitscale compare {' '.join(runs)} --output runs/{name}/report.html",
    }


def link_some(folder: Path, target: Path) -> None:
    """Link to at most MAX_PER_CLASS images of each class."""
    classes: dict[str, list[Path]] = {}
    for name in folders_in(folder):
        paths = sorted(map(Path, files_below(folder / name)))
        if images := [path for path in paths if is_image_name(path.name)]:
            classes[name] = images
    if not classes:
        raise UserError(
            "has no class folders with images", where=f"DATA={folder}", allowed=ALLOWED
        )

    # Few images of each class, so that the chain ends in minutes.
    most = min(MAX_PER_CLASS, max(10, MAX_IMAGES // len(classes)))
    for name, images in classes.items():
        (target / name).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(images[:: -(-len(images) // most)]):
            link = target / name / f"{number:04d}{image.suffix}"
            link.unlink(missing_ok=True)
            link.symlink_to(image.resolve())
    print(
        f"{target}: at most {most} images of each of {len(classes):,} classes of {folder}"
    )


def run_command(title: str, command: str) -> None:
    print(f"\n=== {title}\n$ {command}", flush=True)
    _, *words = shlex.split(command)
    # Ctrl-C is for the command that runs, which says what it keeps.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    code = subprocess.run([sys.executable, "-m", "vitscale.command", *words]).returncode
    signal.signal(signal.SIGINT, before)
    if code in (EXIT_INTERRUPTED, EXIT_STOPPED_RESUMABLE):
        raise SystemExit(code)
    if code:
        raise UserError(
            f"{title} ended with exit code {code}",
            where=command,
            next_step="fix the error shown above, and run the same command again to resume",
        )


def print_summary(name: str, *, minutes: float, configs: str) -> None:
    # The report's verdict and tables were printed by the last command, above this.
    print(
        f"""
=== Done in {minutes:.1f} minutes

Made in {Path.cwd()}:
  runs/{name}/shards/        WebDataset tars, index.parquet, ledger.parquet (a row per input file)
  runs/{name}-pretrain/      config.yaml, journal.jsonl, logs/, checkpoints/
  runs/{name}-finetune/      the same, started from it at a higher resolution
  runs/{name}-scratch/       the same fine-tuning from random weights
  runs/{name}/report.html    the runs compared in one page: open it in a browser

Try next there, with {Path(sys.executable).parent} on PATH:
  vitscale predict init=runs/{name}-finetune IMAGES
  mlflow ui --backend-store-uri sqlite:///runs/mlflow.db
  vitscale launch vit_h14 --dry-run
  vitscale pretrain {configs}/pretrain data.path=runs/{name}/shards name={name}-deeper model.depth=6
  vitscale demo --data FOLDER    # your own images, one sub-folder per class"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="vitscale demo", description="Run the whole chain on a small corpus."
    )
    parser.add_argument(
        "--data", type=Path, help="folder with one sub-folder of images per class"
    )
    parser.add_argument(
        "--open", action="store_true", help="show the report in the browser"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    # Own images are small classes of their own, for which the digits' settings are made.
    name = configs = "demo"
    if arguments.data is not None:
        folder = arguments.data.resolve()
        classes = folder_of_classes(folder)
        name = name_of(folder)
        configs = "digits"
        link_some(classes, Path(f"runs/{name}/images"))

    # The commands are printed as a user would type them.
    steps = commands(name, configs=configs)
    for number, (title, command) in enumerate(steps.items(), start=1):
        run_command(f"{number}/{len(steps)} {title}", command)
    minutes = (time.monotonic() - start) / 60
    print_summary(name, minutes=minutes, configs=configs)
    if arguments.open and not webbrowser.open(
        Path(f"runs/{name}/report.html").absolute().as_uri()
    ):
        print(
            f"no browser found; open runs/{name}/report.html yourself", file=sys.stderr
        )


if __name__ == "__main__":
    run_script(main)
