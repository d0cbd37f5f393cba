"""Compare training_batches with webdataset, torchvision, OpenCV, DALI and SPDL.

    python benchmarks/loader_speed.py --images PHOTOS --workers 2 --rounds 5 --json results.json
    python benchmarks/loader_speed.py --images PHOTOS --png            # the same photographs as PNG
    python benchmarks/loader_speed.py --images PHOTOS --png-side 32    # as in CIFAR, output 32 px

Owns: which measurements run, in what order, and the tables. All loaders run in turn (A B C A B C),
each time in a fresh process (except with --toy), on the same shards of data_prep/make_shards.py.
Our pixels are compared with Pillow's first, and a wrong one ends the benchmark with exit code 1. A
goal that is missed does not.
Leaves out: the loaders (`loader.contenders`) and single properties (`loader.properties`).

The shards are in the page cache. Numbers are of this machine as it is: the load by others is
printed, and results taken beside other work mean little.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    from benchmarks.corpora.photo_folder import (
        as_png,
        given_photos,
        noise_photos,
        write_photo_folder,
    )
    from benchmarks.faults.process_runs import ROOT, CommandFailed, check_results_path, run_command
    from benchmarks.loader import contenders, properties
    from benchmarks.loader.contenders import CONTENDERS, RIVALS, sample_order, why_missing
    from benchmarks.loader.ours import BATCH, SIDE
    from benchmarks.sharding.commands import make_shards_command
    from benchmarks.sharding.contenders import NUM_CORES
    from benchmarks.sharding.output_checks import WrongOutput
    from vitscale.config.errors import UserError, run_script
    from vitscale.data.index import read_split
    from vitscale.images.decoders import DECODERS, missing
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

MEASUREMENTS = ("pixels", "rates", "parse", "resume", "memory")
SHARD_MIB = 24
# A fast decoder may differ from Pillow by rounding; a wrong box gives a far lower PSNR.
LEAST_PSNR = 30.0
PACKAGES = (
    *("torch", "torchvision", "webdataset", "pillow", "simplejpeg", "opencv-python-headless"),
    *("opencv-python", "nvidia-dali-cuda130", "spdl", "isal"),
)


def main() -> None:
    options = parse_arguments()
    results: dict[str, Any] = {"environment": environment(options)}
    print("\n".join(f"{name}: {value}" for name, value in results["environment"].items()))
    options.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="loader-", dir=options.work)).resolve()
    try:
        measure(work, options, results)
    except (WrongOutput, CommandFailed) as failure:
        print(f"\nFAILED: {failure}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def measure(work: Path, options: argparse.Namespace, results: dict[str, Any]) -> None:
    photos = given_photos(options.images) if options.images else noise_photos(**options.noise)
    if options.png or options.png_side:
        photos = as_png(photos, side=options.png_side)
    source = write_photo_folder(work / "photos", photos, total_bytes=int(options.total_mib * 2**20))
    shards = work / "shards"
    run_command(
        make_shards_command(
            source.root,
            shards,
            *("images.check=header", "shards.entry_points=true"),
            shard_mib=options.shard_mib,
        )
    )
    num = read_split(shards, split="train").num_samples
    print(
        f"{num:,} images, {source.num_bytes / 1e6:,.0f} MB, {len(list(shards.glob('*.tar')))} tars"
    )
    if num != len(source.digests):
        raise WrongOutput(f"{num} images in shards of {len(source.digests)}")
    for name in options.only:
        results[name] = {
            "pixels": measure_pixels,
            "rates": measure_rates,
            "parse": measure_parse,
            "resume": measure_resume,
            "memory": measure_memory,
        }[name](shards, options)


def child(script: ModuleType, *arguments: object, fresh: bool) -> dict[str, Any]:
    """Run the script in a fresh process, or in this one, which is faster; returns its result."""
    words = [str(argument) for argument in arguments]
    if not fresh:
        result: dict[str, Any] = script.run(words)
        return result
    command = [sys.executable, str(script.__file__), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_pixels(shards: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Ours against Pillow's pixels of the same boxes. Raises WrongOutput."""
    print("\nours beside Pillow decoding the whole image, same boxes")
    found = {}
    for decoder in DECODERS:
        if missing(decoder) is not None:
            print(f"{decoder:12} left out: {missing(decoder)}")
            continue
        arguments = ["--decoder", decoder, "--workers", options.workers, "--side", side(options)]
        corrupt = ["--corrupt", options.corrupt] if options.corrupt else []
        seen = child(
            properties,
            "pixels",
            shards,
            *arguments,
            "--images",
            options.check_images,
            *corrupt,
            fresh=not options.toy,
        )
        found[decoder] = seen
        print(
            f"{decoder:12} {seen['images']} images, {seen['identical']} identical; PSNR median "
            f"{seen['psnr_median']:.1f} dB, least {seen['psnr_min']:.1f} dB (99: identical)"
        )
        if seen["images"] != seen["expected"]:
            raise WrongOutput(f"{decoder} gave {seen['images']} of {seen['expected']} images")
        if seen["wrong_labels"]:
            raise WrongOutput(f"{decoder} gave {seen['wrong_labels']} wrong labels")
        if seen["psnr_min"] < LEAST_PSNR:
            raise WrongOutput(f"{decoder}: an image differs, PSNR {seen['psnr_min']:.1f} dB")
    return found


def measure_rates(shards: Path, options: argparse.Namespace) -> dict[str, Any]:
    present = [name for name in CONTENDERS if left_out(name) is None]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in present}
    expected = Expected(shards)
    print()
    for turn in range(options.rounds):
        for name in present:
            limits = ["--workers", options.workers, "--seconds", options.seconds]
            limits += ["--side", side(options)]
            found = child(contenders, name, shards, *limits, fresh=not options.toy)
            expected.check(name, found)
            kept = {key: found[key] for key in ("rate", "start_s", "images")}
            runs[name].append({**kept, "load": os.getloadavg()[0]})
            print(f"  round {turn + 1}: {name} {found['rate']:.0f} img/s", flush=True)
    print_rates(runs, side=side(options))
    return runs


def side(options: argparse.Namespace) -> int:
    """Pixels a side of the output."""
    return options.png_side or SIDE


def left_out(name: str) -> str | None:
    decoder = name.partition("_")[0]
    return missing(decoder) if decoder in DECODERS and name not in RIVALS else why_missing(name)


class Expected:
    """The labels that a loader must give."""

    def __init__(self, shards: Path) -> None:
        self.index = read_split(shards, split="train")
        self.order = sample_order(shards)

    def check(self, name: str, found: dict[str, Any]) -> None:
        labels = found["labels"]
        if found["images"] != len(labels) or len(labels) % BATCH:
            raise WrongOutput(f"{name} gave {found['images']} images, {len(labels)} labels")
        if not set(labels) <= set(self.index.label.tolist()):
            raise WrongOutput(f"{name} gave labels that no image has")
        if CONTENDERS[name].in_our_order:
            right = [int(self.index.label[self.order.at(p)[1]]) for p in range(len(labels))]
            if labels != right:
                raise WrongOutput(f"{name} gave other labels than the index")


def print_rates(runs: dict[str, list[dict[str, float]]], *, side: int = SIDE) -> None:
    first = next(iter(runs))
    print(f"\n{'img/s':18} {'min':>6} {'median':>7} {'max':>6} {'x ' + first:>13} {'start s':>8}")
    for name, contender in CONTENDERS.items():
        if name not in runs:
            print(f"{name:18} left out: {left_out(name)}")
            continue
        rates = sorted(run["rate"] for run in runs[name])
        print(
            f"{name:18} {rates[0]:6.0f} {median(rates):7.0f} {rates[-1]:6.0f} "
            f"{ratio(runs, name, first)[0]:13.2f} "
            f"{median(run['start_s'] for run in runs[name]):8.2f}  {contender.what}"
        )
    ours = next(name for name in DECODERS if name in runs)
    if "webdataset" in runs:
        found = ratio(runs, ours, "webdataset")
        print_goal(f"{ours} / webdataset", found, goal=6.0)
    else:
        print(f"{ours} / webdataset: not compared, webdataset is left out")
    rivals = [name for name in RIVALS if name in runs]
    if not rivals:
        print(f"{ours} / the best rival: not compared, all are left out")
        return
    best = max(rivals, key=lambda name: median(run["rate"] for run in runs[name]))
    print_goal(
        f"{ours} / {best}, the best rival",
        ratio(runs, ours, best),
        goal=2.5 if side == SIDE else 1.7,
    )


def ratio(runs: dict[str, list[dict[str, float]]], name: str, other: str) -> list[float]:
    """Median, least and largest over the rounds, each compared within itself."""
    ratios = [a["rate"] / b["rate"] for a, b in zip(runs[name], runs[other], strict=True)]
    return [median(ratios), min(ratios), max(ratios)]


def print_goal(what: str, found: list[float], *, goal: float) -> None:
    verdict = "reached" if found[0] >= goal else "MISSED"
    print(f"{what}: {found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f}); goal {goal}: {verdict}")


def measure_parse(shards: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of every sample: webdataset in tar order, ours in the order of training."""
    runs: dict[str, list[dict[str, float]]] = {"webdataset": [], "index": []}
    for _ in range(options.rounds):
        for name, found in runs.items():
            found.append(child(properties, f"parse_{name}", shards, fresh=not options.toy))
    counts = {(run["samples"], run["bytes"]) for found in runs.values() for run in found}
    if len(counts) != 1:
        raise WrongOutput(f"samples and bytes read differ: {sorted(counts)}")
    print("\nreading bytes alone, one process, samples/s")
    for name, found in runs.items():
        print(f"{name:12} {median(run['rate'] for run in found):9,.0f}")
    print_goal("index / webdataset", ratio(runs, "index", "webdataset"), goal=5.0)
    return runs


def measure_resume(shards: Path, options: argparse.Namespace) -> dict[str, Any]:
    order = child(
        properties,
        "resume_order",
        shards,
        "--passes",
        2 * options.rounds,
        fresh=not options.toy,
    )
    times: dict[str, list[float]] = {"0.01": [], "0.9": []}
    for _ in range(options.rounds):
        for share, found in times.items():
            arguments = ["--share", share, "--workers", options.workers, "--decoder", "auto"]
            found.append(
                child(properties, "resume_shards", shards, *arguments, fresh=not options.toy)[
                    "seconds"
                ]
            )
    early, late = (median(times[share]) for share in times)
    print(
        "\nfirst batch after a resume at 1 % and 90 % of an epoch; goal for the ratio 1.2 at most"
    )
    print(
        f"order of 14.2 M samples: {order['early_ms']:.1f} and {order['late_ms']:.1f} ms, ratio "
        f"{order['late_ms'] / order['early_ms']:.2f}"
    )
    print(f"these shards: {early:.2f} and {late:.2f} s, ratio {late / early:.2f}")
    return {"order": order, "shards": times}


def measure_memory(shards: Path, options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--workers", options.workers, "--decoder", "auto"]
    found = child(properties, "memory", shards, *arguments, "--passes", options.passes, fresh=True)
    print(
        f"\nmemory of ours with its workers, {found['images']:,} images: at most "
        f"{found['first_tenth']:.0f} MiB in the first tenth, {found['last_tenth']:.0f} in the last"
    )
    return found


def environment(options: argparse.Namespace) -> dict[str, Any]:
    with open("/proc/cpuinfo") as lines:
        models = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": ", ".join(sorted(models)),
        "cores": NUM_CORES,
        "system": platform.platform(),
        "python": platform.python_version(),
        **found,
        "images": "given photographs" if options.images else "noise",
        "encoding": "PNG" if options.png or options.png_side else "JPEG",
        "output": side(options),
        "page cache": "warm",
        "load before": os.getloadavg()[0],
        "workers": options.workers,
        "rounds": options.rounds,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.set_defaults(noise={})
    parser.add_argument("--images", type=Path, help="folder of JPEG photographs; default: noise")
    parser.add_argument("--png", action="store_true", help="encode the photographs as PNG")
    parser.add_argument("--png-side", type=int, help="PNG of this many pixels a side; output too")
    parser.add_argument(
        "--total-mib", type=float, default=300, help="total size; images are repeated"
    )
    parser.add_argument("--shard-mib", type=int, default=SHARD_MIB)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=8, help="measured seconds per loader and round"
    )
    parser.add_argument("--passes", type=int, default=3, help="passes over all images, for memory")
    parser.add_argument(
        "--check-images", type=int, default=512, help="images to compare with Pillow"
    )
    parser.add_argument("--only", help="some of: " + ",".join(MEASUREMENTS))
    parser.add_argument("--work", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to show that it works")
    parser.add_argument(
        "--corrupt", choices=("pixels", "labels", "count"), help="corrupt batches; must fail"
    )
    options = parser.parse_args()
    if options.toy:
        tiny = {
            "rounds": 1,
            "total_mib": 3,
            "shard_mib": 1,
            "seconds": 0,
            "passes": 1,
            "check_images": 64,
        }
        parser.set_defaults(**tiny, workers=1, noise={"width": 160, "height": 120, "num": 8})
        options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(MEASUREMENTS)
    unknown = sorted(set(options.only) - set(MEASUREMENTS))
    if unknown:
        raise UserError(f"{', '.join(unknown)}", where="--only", allowed=", ".join(MEASUREMENTS))
    for name in ("workers", "rounds"):
        if getattr(options, name) < 1:
            raise UserError(f"{getattr(options, name)}", where=f"--{name}", allowed="1 or more")
    check_results_path(options.json)
    return options


if __name__ == "__main__":
    run_script(main)
