"""Measure growth with ten times the images, and runs that are killed and resumed.

Owns: growth of time and memory, and whether a killed run ends with the same bytes.
Leaves out: speed beside others (`sharding_speed`).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.faults.process_runs import (
    ROOT,
    drop_page_cache,
    run_and_kill,
    run_command,
    run_watched,
)
from benchmarks.sharding.commands import make_shards_command
from benchmarks.sharding.output_checks import (
    WrongOutput,
    check_shards,
    corrupt,
    folder_digests,
    tar_folder_digests,
)

GROWTH = 10
TIME_GOAL, MEMORY_GOAL = 10.5, 1.1
# Small tars: the small corpus is divided among processes too, and a kill hits many of them.
SHARD_MIB = 4


def write_glyphs(output: Path, *, classes: int, options: argparse.Namespace) -> Path:
    """A corpus of one tar per class; returns the folder of tars."""
    script = str(ROOT / "benchmarks/corpora/glyph_corpus.py")
    run_command(
        [sys.executable, script, str(output), f"--classes={classes}"]
        + [f"--images-per-class={options.images_per_class}", f"--drawing={options.drawing}"]
    )
    return output / "tars"


def tars_command(source: Path, output: Path) -> list[str]:
    options = ("source.kind=class_tars", "images.check=header")
    return make_shards_command(source, output, *options, shard_mib=SHARD_MIB)


def measure_growth(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time and, in a separate round, memory at n and 10 n images."""
    small = max(1, options.classes // GROWTH)
    measured: dict[str, Any] = {"sizes": {}}
    sources, digests = {}, {}
    for name, classes in (("n", small), ("10 n", options.classes)):
        sources[name] = write_glyphs(work / f"glyphs {name}", classes=classes, options=options)
        digests[name] = tar_folder_digests(sources[name])
        measured["sizes"][name] = {
            "classes": classes,
            "images": len(digests[name]),
            "seconds": [],
            "cpu_seconds": [],
        }
    # Measuring memory takes a few per cent of one core: a round of its own, except with --toy.
    for turn in range(1 if options.toy else options.rounds + 1):
        for name, source in sources.items():
            output, entry = work / "grown", measured["sizes"][name]
            if options.cold:
                drop_page_cache()
            before = sum(os.times()[:4])
            if turn == 0:
                seconds, memory = run_watched(tars_command(source, output))
                entry["process_mib"], entry["tree_mib"] = memory.process, memory.tree
            else:
                seconds = run_command(tars_command(source, output))
            if turn or options.toy:
                entry["seconds"].append(seconds)
                entry["cpu_seconds"].append(sum(os.times()[:4]) - before)
            if options.corrupt:
                corrupt(output)
            check_shards(output, digests=digests[name])
            shutil.rmtree(output)
    for source in sources.values():
        shutil.rmtree(source.parent)
    return measured


def print_growth(measured: dict[str, Any]) -> None:
    columns = f"{'classes':>8} {'images':>9} {'median s':>9} {'images/s':>9} {'cpu s':>7}"
    print(f"\n{'':6} {columns} {'largest process MiB':>20} {'all together MiB':>17}")
    for name, entry in measured["sizes"].items():
        seconds, cpu = median(entry["seconds"]), median(entry["cpu_seconds"])
        print(
            f"{name:6} {entry['classes']:8,} {entry['images']:9,} {seconds:9.2f} "
            f"{entry['images'] / seconds:9,.0f} {cpu:7.1f} {entry['process_mib']:20.0f} "
            f"{entry['tree_mib']:17.0f}"
        )
    small, large = measured["sizes"].values()
    exact = large["images"] / small["images"] / GROWTH
    times, cpu_times = (
        [b / a / exact for a, b in zip(small[key], large[key], strict=True)]
        for key in ("seconds", "cpu_seconds")
    )
    memories = [large[key] / small[key] for key in ("process_mib", "tree_mib")]
    print(
        f"time(10 n) / time(n): {median(times):.2f} ({min(times):.2f} to {max(times):.2f}), of "
        f"processor time {median(cpu_times):.2f}; "
        f"goal {TIME_GOAL}: {'reached' if median(times) <= TIME_GOAL else 'MISSED'}"
    )
    print(
        f"memory(10 n) / memory(n): largest process {memories[0]:.2f}, all together "
        f"{memories[1]:.2f}; goal {MEMORY_GOAL}: "
        f"{'reached' if max(memories) <= MEMORY_GOAL else 'MISSED'}"
    )


def measure_resume(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Kill at a random moment, run again, compare every byte with the undisturbed run."""
    classes = max(1, options.classes // GROWTH)
    source = write_glyphs(work / "glyphs", classes=classes, options=options)
    undisturbed_s = run_command(tars_command(source, work / "undisturbed"))
    expected = folder_digests(work / "undisturbed")
    rng = random.Random(options.seed)
    trials: list[dict[str, Any]] = []
    num_killed = 0
    # A drawn moment may be after the end: such trials are reported and do not count.
    while num_killed < options.kills and len(trials) < 3 * options.kills:
        output = work / "killed"
        after_s = rng.uniform(0, undisturbed_s)
        was_killed = run_and_kill(tars_command(source, output), after_s=after_s)
        num_killed += was_killed
        if was_killed and output.exists() and folder_digests(output) != expected:
            raise WrongOutput(f"{output} has its final name and is incomplete")
        again_s = run_command(tars_command(source, output))
        if options.corrupt:
            corrupt(output)
        found = folder_digests(output)
        wrong = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
        if wrong:
            raise WrongOutput(f"after a kill at {after_s:.2f} s these differ: {', '.join(wrong)}")
        trials.append({"killed": was_killed, "after_s": after_s, "again_s": again_s})
        shutil.rmtree(output)
    shutil.rmtree(source.parent)
    return {"undisturbed_s": undisturbed_s, "files": len(expected), "trials": trials}


def print_resume(measured: dict[str, Any]) -> None:
    trials = measured["trials"]
    killed = [trial for trial in trials if trial["killed"]]
    print(
        f"\nkilled {len(killed)} times in {len(trials)} trials at a random moment of "
        f"{measured['undisturbed_s']:.1f} s and run again: all {measured['files']} files are "
        "equal to those of the undisturbed run"
    )
    for trial in sorted(killed, key=lambda trial: trial["after_s"]):
        print(f"  killed after {trial['after_s']:5.2f} s, then {trial['again_s']:5.2f} s")
