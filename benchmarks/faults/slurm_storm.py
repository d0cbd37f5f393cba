"""Interrupt one run on a real SLURM many times and compare it with an undisturbed run.

    python benchmarks/faults/slurm_storm.py --interruptions 50 --steps 3000
    python benchmarks/faults/slurm_storm.py --kill-minutes 40 --work FOLDER

Starts a SLURM of two nodes on this machine and submits one training run. It is preempted with and
without grace time, requeued, paused, stopped at its time limit and in its first second, and its
ranks are killed. At the end the journal and the checkpoint must equal those of an undisturbed run
bit by bit, MLflow must have one run, and no process may be left. Prints a Markdown table.

With --kill-minutes, a rank, a loader worker, a node's daemon or the supervisor is killed once a
minute instead, and the time is compared with that of a run without kills. FOLDER has the runs, the
log storm.log and the table table.md.

Leaves out: kills by the minute (`slurm_kills`) and at chosen instructions (`kill_storm`).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

try:
    from benchmarks.faults.slurm_kills import kills_only
    from benchmarks.faults.slurm_run import (
        CHECKPOINT_STEPS,
        PARTITIONS,
        CheckFailed,
        Storm,
        check_end,
        check_equal,
        make_shards,
        script,
        submit,
        training,
    )
    from launch.jobs.attempts import Attempt, Ending, read_attempts
    from tests.integration.slurm.conftest import slurm_cluster
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

KINDS = (
    "preempted, grace time",
    "preempted, no grace time",
    "scontrol requeue",
    "USR2",
    "rank killed (SIGKILL)",
    "USR2 in the first second",
    "time limit",
)


def main() -> None:
    options = parse_arguments()
    work = Path(options.work or tempfile.mkdtemp(prefix="slurm-storm-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        make_shards(work)
        if options.kill_minutes:
            print(kills_only(work, minutes=options.kill_minutes, seed=options.seed))
        else:
            print(all_kinds(work, options))
    except CheckFailed as error:
        print(f"FAILED (--seed {options.seed}): {error}\nkept: {work}", file=sys.stderr)
        raise SystemExit(1) from None
    if not options.work:
        shutil.rmtree(work)


def all_kinds(work: Path, options: argparse.Namespace) -> str:
    """Interrupt a run in every way, --interruptions times. Returns the table."""
    start = time.monotonic()
    reference = work / "undisturbed"
    if not reference.exists():
        train_undisturbed(work, reference, steps=options.steps)
    with slurm_cluster(more=PARTITIONS) as cluster:
        storm = submit(cluster, work, "disturbed", steps=options.steps, seed=options.seed)
        interrupt_often(storm, options.interruptions)
        check_end(storm, work)
    check_equal(storm.run_folder, reference)
    return summary(storm, minutes=(time.monotonic() - start) / 60)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--interruptions", type=int, default=50)
    parser.add_argument("--kill-minutes", type=int, help="kill once a minute, for so long")
    parser.add_argument("--steps", type=int, default=3000, help="steps of the run (3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", help="folder for the runs, kept; default: temporary")
    options = parser.parse_args()
    if options.kill_minutes is not None and options.kill_minutes < 1:
        raise UserError(f"--kill-minutes {options.kill_minutes}", allowed="1, 2, …")
    if options.interruptions < 1 or options.steps < 20 * options.interruptions:
        raise UserError(
            f"--interruptions {options.interruptions} --steps {options.steps}",
            allowed="at least 1 interruption, and 20 steps for each",
        )
    return options


def train_undisturbed(work: Path, folder: Path, *, steps: int) -> None:
    start = time.monotonic()
    script(
        "launch/local.py", "--num-procs", 2, *training(work, folder, steps=steps),
        "tracking.uri=null", work=work, environment=dict(os.environ),
    )  # fmt: skip
    print(f"undisturbed: {steps} steps in {time.monotonic() - start:.0f} s", flush=True)


def interrupt_often(storm: Storm, number: int) -> None:
    spacing = storm.steps / (number + 1)
    for place, kind in enumerate(shuffled_kinds(number, storm.rng)):
        storm.interrupt(kind, at_step=round(spacing * (place + storm.rng.random())))


def shuffled_kinds(number: int, rng: random.Random) -> list[str]:
    """Every kind equally often. Time limits, which take up to two minutes, are not near the end of
    the run, which could end before them."""
    kinds = [KINDS[each % len(KINDS)] for each in range(number)]
    others = [kind for kind in kinds if kind != "time limit"]
    rng.shuffle(others)
    for _ in range(kinds.count("time limit")):
        others.insert(rng.randrange(1 + len(others) * 3 // 4), "time limit")
    return others


def summary(storm: Storm, *, minutes: float) -> str:
    lines = [
        "| Interruption | number | steps lost: mean, most | seconds lost: median, most |",
        "|---|---|---|---|",
    ]
    rows = {kind: [i for i in storm.interruptions if i.kind == kind] for kind in KINDS}
    for kind, found in [*rows.items(), ("all", storm.interruptions)]:
        if found:
            steps = [each.steps_lost for each in found]
            seconds = [each.seconds_lost for each in found]
            lines.append(
                f"| {kind} | {len(found)} | {statistics.mean(steps):.1f}, {max(steps)} | "
                f"{statistics.median(seconds):.1f}, {max(seconds):.1f} |"
            )
    attempts = read_attempts(storm.run_folder)
    lines.append("")
    lines.append(
        f"{len(attempts)} attempts of one job, {storm.steps} steps, a checkpoint every "
        f"{CHECKPOINT_STEPS}; {minutes:.0f} min. One MLflow run, no process left; journal and "
        f"final checkpoint equal the undisturbed run's bit by bit. Endings: {endings(attempts)}."
    )
    return "\n".join(lines)


def endings(attempts: list[Attempt]) -> str:
    counts = {ending: sum(a.ending is ending for a in attempts) for ending in Ending}
    return ", ".join(f"{ending} {number}" for ending, number in counts.items() if number)


if __name__ == "__main__":
    run_script(main)
