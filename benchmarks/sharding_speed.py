"""Compare data_prep/make_shards.py with plain copying, webdataset's ShardWriter and Pillow.

    python benchmarks/sharding_speed.py --images PHOTOS --work /big/disk --json results.json

Owns: which measurements run, in what order, and the tables. Everything runs in turn (A B C A B C),
each time into a fresh folder, and every output is read back and compared by hash outside the timed
part; a wrong byte ends the benchmark with exit code 1. A goal that is missed does not.
Leaves out: the contenders (`sharding.contenders`), growth and kills (`sharding.growth`).

Source files are in the page cache unless --cold is given. Numbers are of this machine as it is:
the load by others is printed, and results taken beside other work mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    from benchmarks.corpora.photo_folder import (
        PhotoFolder,
        given_photos,
        noise_photos,
        part_of,
        write_photo_folder,
    )
    from benchmarks.faults.process_runs import (
        CommandFailed,
        check_results_path,
        drop_page_cache,
        run_command,
    )
    from benchmarks.sharding.commands import make_shards_command
    from benchmarks.sharding.contenders import (
        NUM_CORES,
        copy_into_one_file,
        copy_with_all_cores,
        cp,
        decode_from_memory,
        flush,
        shard_writer,
        start_seconds,
        versions,
    )
    from benchmarks.sharding.growth import (
        measure_growth,
        measure_resume,
        print_growth,
        print_resume,
    )
    from benchmarks.sharding.output_checks import (
        WrongOutput,
        check_copied_folder,
        check_one_file,
        check_plain_tars,
        check_shards,
        corrupt,
    )
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

Check = Callable[[PhotoFolder, Path], None]
Run = Callable[[PhotoFolder, Path], float]
DECODE_SHARD_MIB, ONE_SHARD_MIB = 16, 1 << 20


def header(source: PhotoFolder, output: Path) -> float:
    return run_command(make_shards_command(source.root, output, "images.check=header"))


def decode(source: PhotoFolder, output: Path) -> float:
    # Small shards, so each core has as many as with a large corpus.
    return _checked(source, output, "decode", shard_mib=DECODE_SHARD_MIB)


def decode_one_shard(source: PhotoFolder, output: Path) -> float:
    """Idle cores decode for the process that has the only shard."""
    return _checked(source, output, "decode", shard_mib=ONE_SHARD_MIB)


def strict(source: PhotoFolder, output: Path) -> float:
    return _checked(source, output, "strict", shard_mib=DECODE_SHARD_MIB)


def _checked(source: PhotoFolder, output: Path, check: str, *, shard_mib: int) -> float:
    option = f"images.check={check}"
    return run_command(make_shards_command(source.root, output, option, shard_mib=shard_mib))


def decoder(source: PhotoFolder, output: Path) -> float:
    output.mkdir()
    return decode_from_memory(source)


def check_nothing(source: PhotoFolder, output: Path) -> None:
    """The decoder writes nothing; an image that it cannot decode ends its process."""


def check_prepared(source: PhotoFolder, output: Path) -> None:
    check_shards(output, digests=source.digests)


# Name -> (timed part, check, what it is). The first five read all photographs, the others a part.
CONTENDERS: dict[str, tuple[Run, Check, str]] = {
    "copy": (copy_into_one_file, check_one_file, "files into one file, fsync, 1 process"),
    "copy_all": (copy_with_all_cores, check_one_file, f"the same, {NUM_CORES} processes"),
    "cp": (cp, check_copied_folder, "cp -r, not flushed"),
    "shardwriter": (shard_writer, check_plain_tars, "webdataset.ShardWriter, not flushed"),
    "header": (header, check_prepared, "make_shards.py images.check=header, whole command"),
    "decoder": (decoder, check_nothing, f"Pillow decodes from memory, {NUM_CORES} processes"),
    "decode": (decode, check_prepared, "make_shards.py images.check=decode, whole command"),
    "decode_one": (decode_one_shard, check_prepared, "the same into one shard"),
    "strict": (strict, check_prepared, "make_shards.py images.check=strict, whole command"),
}
OF_PART = ("decoder", "decode", "decode_one", "strict")
SCALE = ("scaling", "resume")
# (contender, compared with, goal, stretch goal): rate of the first over rate of the second.
GOALS = (
    ("header", "copy", 0.85, 0.95),
    ("header", "shardwriter", 2.0, 4.0),
    ("decode", "decoder", 0.85, None),
    ("decode_one", "decoder", 0.85, None),
    ("strict", "decoder", 0.85, None),
)


def main() -> None:
    options = parse_arguments()
    results: dict[str, Any] = {"environment": environment(options)}
    print("\n".join(f"{name}: {value}" for name, value in results["environment"].items()))
    options.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="sharding-", dir=options.work)).resolve()
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
    names = [name for name in CONTENDERS if name in options.only]
    if names:
        photos = given_photos(options.images) if options.images else noise_photos()
        total = int(options.total_mib * 2**20)
        source = write_photo_folder(work / "photos", photos, total_bytes=total)
        part = part_of(source, work / "part", num=options.decode_images)
        for group in (
            [name for name in names if name not in OF_PART],
            [name for name in names if name in OF_PART],
        ):
            if group:
                folder = part if group[0] in OF_PART else source
                rates = take_turns(group, folder, work, options)
                results["part" if folder is part else "all"] = rates
                print_rates(rates)
        shutil.rmtree(source.root)
    if "scaling" in options.only:
        results["scaling"] = measure_growth(work, options)
        print_growth(results["scaling"])
    if "resume" in options.only:
        results["resume"] = measure_resume(work, options)
        print_resume(results["resume"])


def take_turns(
    names: list[str], source: PhotoFolder, work: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Wall-clock and processor seconds of every contender in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names:
            run, check, _ = CONTENDERS[name]
            output = work / f"{name}.out"
            if options.cold:
                drop_page_cache()
            before = cpu_seconds()
            seconds[name].append(run(source, output))
            cpu[name].append(cpu_seconds() - before)
            print(f"  round {turn + 1}: {name} {seconds[name][-1]:.2f} s", flush=True)
            if name == "cp":
                seconds.setdefault("cp_flushed", []).append(seconds["cp"][-1] + flush(output))
            if options.corrupt and name != "decoder":
                corrupt(output)
            check(source, output)
            shutil.rmtree(output)
            os.sync()  # unwritten pages must not slow the next contender
        if any(CONTENDERS[name][1] is check_prepared for name in names):
            seconds.setdefault("start", []).append(start_seconds(source.root, work / "none"))
    return {
        "files": len(source.digests),
        "bytes": source.num_bytes,
        "seconds": seconds,
        "cpu_seconds": cpu,
    }


def cpu_seconds() -> float:
    """Of this process and of its finished children."""
    return sum(os.times()[:4])


def print_rates(measured: dict[str, Any]) -> None:
    seconds, num_bytes = measured["seconds"], measured["bytes"]
    print(f"\n{measured['files']:,} files, {num_bytes / 1e6:,.0f} MB")
    columns = f"{'MB/s: min':>9} {'median':>8} {'max':>8} {'files/s':>8} {'median s':>9}"
    print(f"{'':12} {columns} {'cpu s':>7}")
    for name, times in seconds.items():
        if name == "start":
            continue
        rates = sorted(num_bytes / 1e6 / t for t in times)
        what = CONTENDERS[name][2] if name in CONTENDERS else "cp -r, then flushed"
        cpu = median(measured["cpu_seconds"].get(name) or [float("nan")])
        print(
            f"{name:12} {rates[0]:9.0f} {median(rates):8.0f} {rates[-1]:8.0f} "
            f"{measured['files'] / median(times):8,.0f} {median(times):9.2f} {cpu:7.2f}  {what}"
        )
    if "start" in seconds:
        print(f"of make_shards.py, start (interpreter, imports): {median(seconds['start']):.2f} s")
    for name, other, goal, stretch_goal in GOALS:
        if name in seconds and other in seconds:
            print_ratio(seconds, name, other, goal, stretch_goal)


def print_ratio(
    seconds: dict[str, list[float]], name: str, other: str, goal: float, stretch_goal: float | None
) -> None:
    whole = [b / a for a, b in zip(seconds[name], seconds[other], strict=True)]
    ran = [
        b / (a - start)
        for a, b, start in zip(seconds[name], seconds[other], seconds["start"], strict=True)
    ]
    verdict = "reached" if median(whole) >= goal else "MISSED"
    more = f", stretch goal {stretch_goal}" if stretch_goal else ""
    print(
        f"{name} / {other}: {median(whole):.2f} ({min(whole):.2f} to {max(whole):.2f}); "
        f"without start {median(ran):.2f}; goal {goal}{more}: {verdict}"
    )


def environment(options: argparse.Namespace) -> dict[str, Any]:
    with open("/proc/cpuinfo") as lines:
        models = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(models)),
        "cores": NUM_CORES,
        "system": platform.platform(),
        **versions(),
        "page cache": "dropped before each run" if options.cold else "warm",
        "images": "given photographs" if options.images else "noise of the same size",
        "load before": os.getloadavg()[0],
        "rounds": options.rounds,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    everything = (*CONTENDERS, *SCALE)
    parser.add_argument("--images", type=Path, help="folder of JPEG photographs; default: noise")
    parser.add_argument(
        "--total-mib", type=float, default=1200, help="total size; images are repeated"
    )
    parser.add_argument(
        "--decode-images", type=int, default=3000, help="number of images to decode"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="some of: " + ",".join(everything))
    parser.add_argument(
        "--work", type=Path, default=Path("runs"), help="folder on the disk to measure"
    )
    parser.add_argument(
        "--cold", action="store_true", help="drop the page cache first (needs root)"
    )
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--drawing", choices=("glyphs", "shapes"), default="glyphs")
    parser.add_argument(
        "--classes", type=int, default=20_992, help="classes of the corpus of drawings"
    )
    parser.add_argument("--images-per-class", type=int, default=10)
    parser.add_argument("--kills", type=int, default=10, help="number of kills in resume")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to show that it works")
    parser.add_argument(
        "--corrupt", action="store_true", help="flip a bit of each output; must fail"
    )
    options = parser.parse_args()
    if options.toy:
        tiny = {"rounds": 1, "total_mib": 4, "decode_images": 16, "kills": 1, "classes": 200}
        parser.set_defaults(**tiny, images_per_class=2, drawing="shapes")
        options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(everything)
    unknown = sorted(set(options.only) - set(everything))
    if unknown:
        raise UserError(f"{', '.join(unknown)}", where="--only", allowed=", ".join(everything))
    if options.cold and os.geteuid() != 0:
        raise UserError("dropping the page cache needs root", where="--cold")
    check_results_path(options.json)
    return options


if __name__ == "__main__":
    run_script(main)
