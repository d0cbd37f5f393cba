"""Kill training runs at random moments and compare their results with undisturbed runs.

    python benchmarks/faults/kill_storm.py --kills 200 --seed 1 --ledger storm.jsonl

Every run is tiny and real: pretrain/main.py on two ranks, with loader workers, augmentation, mixup,
dropout, drop path, an average of the weights and accumulation, under each ZeRO stage in turn. A
rank, a loader worker or all ranks get SIGKILL, or bursts of SIGTERM and SIGUSR2, during start,
training and saves. The same command restarts the run until it is done. Then model, moments,
average, progress, journal and every batch must equal those of an undisturbed run, bit by bit. The
first difference, hang, lost step, or restart that fails ends the benchmark with exit code 1 and
keeps the folder.

Owns: the loop, the checks after each fault, the ledger, the summary.
Leaves out: faults (`faults.injection`), starting ranks (`warm_ranks`), comparing (`run_states`).

--seed decides the plan; which instruction a kill interrupts depends on timing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

try:
    from benchmarks.faults.injection import (
        Attempt,
        InjectedFault,
        PlannedFault,
        await_moment,
        draw_fault,
        inject,
    )
    from tests.support.ranks.run_states import RunState, differences, read_state, recorded_batches
    from tests.support.ranks.warm_ranks import ROOT, WarmStarter, end_session, session_of
    from vitscale.checkpoint.folders import newest_checkpoint
    from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

NUM_RANKS, INTERVAL, ACCUMULATION = 2, 7, 2
SETTINGS = (
    *("schedule.epochs=null", "schedule.warmup_steps=5", "data.global_batch=32"),
    *("engine.max_micro_batch=8", "engine.num_threads=1", "engine.device=cpu"),
    # Decides how soon a silent rank is detected.
    "engine.timeout_min=0.5",
    *("model.width=48", "model.depth=2", "model.mlp_width=96"),
    *("model.dropout=0.1", "model.drop_path=0.1", "optim.ema.decay=0.98"),
    *("data.augment.randaugment.magnitude=10", "data.mixing.mixup_alpha=0.8"),
    # Saves, log lines and evaluations fall on different steps.
    *(f"checkpoint.every_steps={INTERVAL}", "tracking.log_every_steps=5"),
    *("evaluate=[{name: classification, every_steps: 25}]", "tracking.uri=null"),
)
VARIANTS = {
    "ZeRO 1": ("engine.zero_stage=1", "data.num_workers=1"),
    "ZeRO 0, 2 workers": ("engine.zero_stage=0", "data.num_workers=2"),
    "ZeRO 2": ("engine.zero_stage=2", "data.num_workers=1"),
    "ZeRO 3": ("engine.zero_stage=3", "data.num_workers=1"),
}
# A closed connection means that the other rank died, a signal that a worker died.
EXIT_TIMEOUT_S = 60.0
TRAINING_TIMEOUT_S = 600.0
ORPHAN_TIMEOUT_S = 30.0
ATTEMPTS_WITHOUT_PROGRESS = 40


class CheckFailed(Exception):
    """A property that must hold does not."""


@dataclass(kw_only=True)
class Totals:
    """The content of the summary."""

    kills: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    trainings: int = 0
    attempts: int = 0
    lost_steps: list[int] = field(default_factory=list)


def main() -> None:
    options = parse_arguments()
    work = Path(options.work or tempfile.mkdtemp(prefix="storm-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    shards = options.shards.resolve() if options.shards else make_shards(work)
    storm = Storm(options=options, work=work, shards=shards)
    start = time.monotonic()
    try:
        while storm.totals.kills < options.kills:
            storm.training()
    except CheckFailed as error:
        print(summary(storm.totals, minutes=(time.monotonic() - start) / 60), flush=True)
        print(f"FAILED (--seed {options.seed}): {error}\nkept: {work}", file=sys.stderr)
        raise SystemExit(1) from None
    print(summary(storm.totals, minutes=(time.monotonic() - start) / 60))
    if not options.work:
        shutil.rmtree(work)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        epilog="--seed decides the plan; which instruction a kill interrupts depends on timing.",
    )
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs to send (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ledger", type=Path, help="JSON lines: one per fault and per run")
    parser.add_argument("--steps", type=int, default=60, help="steps of one run (60)")
    parser.add_argument("--shards", type=Path, help="default: the digits, made here")
    parser.add_argument("--work", help="folder for the runs, kept; default: temporary")
    options = parser.parse_args()
    if options.kills < 1 or options.steps <= INTERVAL:
        raise UserError(
            f"--kills {options.kills} --steps {options.steps}",
            allowed=f"at least 1 kill and {INTERVAL + 1} steps",
        )
    return options


def make_shards(work: Path) -> Path:
    """The embedded digits as shards, made by the scripts."""
    shards = work / "shards"
    if not shards.exists():
        config = ROOT / "configs/data/digits.yaml"
        for script, *arguments in (
            ["data_prep/make_corpus.py", "digits", work / "images"],
            ["data_prep/make_shards.py", "--config", config]
            + [f"source.path={work / 'images'}", f"output={shards}"],
        ):
            command = [sys.executable, ROOT / str(script), *map(str, arguments)]
            subprocess.run(command, check=True, cwd=work, stdout=subprocess.DEVNULL)
    return shards


@dataclass(kw_only=True)
class Storm:
    """All runs of one call."""

    options: argparse.Namespace
    work: Path
    shards: Path
    totals: Totals = field(default_factory=Totals)
    undisturbed: dict[str, tuple[RunState, float]] = field(default_factory=dict)
    """By variant: its final state, and the seconds until its first batch."""

    def training(self) -> None:
        """Train one run from its first start to its end, and compare it."""
        number = self.totals.trainings
        variant = list(VARIANTS)[number % len(VARIANTS)]
        # A server for each run: another hash seed, other addresses.
        with WarmStarter() as starter:
            if variant not in self.undisturbed:
                self.undisturbed[variant] = self.reference(starter, variant)
            state, start_s = self.undisturbed[variant]
            place = self.work / f"training-{number}"
            rng = random.Random(f"{self.options.seed} {number}")
            self.train_with_faults(starter, place, variant, rng=rng, start_s=start_s)
            ours = read_state(place / "run", records=place)
            unequal = differences(ours, state)
        row = {"training": number, "variant": variant, "equal": not unequal}
        self.note(row | {"different": unequal})
        if unequal:
            raise CheckFailed("\n  ".join([f"training {number} ({variant}) differs:", *unequal]))
        self.totals.trainings += 1
        print(f"training {number} ({variant}): equal; {self.totals.kills} kills so far", flush=True)
        shutil.rmtree(place)

    def reference(self, starter: WarmStarter, variant: str) -> tuple[RunState, float]:
        place = self.work / f"undisturbed {variant}"
        attempt = self.start(starter, place, variant)
        start = time.monotonic()
        while not attempt.num_batches() and not attempt.ended():
            time.sleep(0.01)
        start_s = time.monotonic() - start
        codes = [rank.wait(timeout_s=TRAINING_TIMEOUT_S) for rank in attempt.ranks]
        if codes != [0, 0]:
            raise CheckFailed(
                f"undisturbed {variant}: exit codes {codes}\n{attempt.ranks[0].output()}"
            )
        return read_state(place / "run", records=place), start_s

    def start(self, starter: WarmStarter, place: Path, variant: str) -> Attempt:
        """The same command every time."""
        place.mkdir(exist_ok=True)
        command = [ROOT / "tests/support/ranks/recorded_rank.py", ROOT / "pretrain/main.py"]
        command += [
            "--config",
            ROOT / "configs/digits/pretrain.yaml",
            *SETTINGS,
            *VARIANTS[variant],
        ]
        command += [f"schedule.steps={self.options.steps}", f"data.path={self.shards}"]
        ranks = starter.start(
            [*command, f"output={place / 'run'}"],
            num_ranks=NUM_RANKS,
            folder=place,
            environment={"VITSCALE_RECORD": str(place)},
        )
        self.totals.attempts += 1
        return Attempt(ranks=ranks, folder=place / "run", records=place)

    def train_with_faults(
        self,
        starter: WarmStarter,
        place: Path,
        variant: str,
        *,
        rng: random.Random,
        start_s: float,
    ) -> None:
        """Inject faults and restart until training is done."""
        committed, idle, leaders = 0, 0, []
        while True:
            attempt = self.start(starter, place, variant)
            leaders += [rank.pid for rank in attempt.ranks]
            fault = draw_fault(
                rng,
                num_ranks=NUM_RANKS,
                start_s=1.5 * start_s,
                interval=INTERVAL * ACCUMULATION * NUM_RANKS,
            )
            injected = None
            if idle < ATTEMPTS_WITHOUT_PROGRESS and await_moment(fault, attempt):
                injected = inject(fault, attempt)
            start = time.monotonic()
            codes = exit_codes(attempt, fault if injected is not None and injected.killed else None)
            now = self.validate(attempt, fault, injected, codes, committed=committed)
            if injected is not None:
                self.record(
                    fault, injected, attempt, codes, committed=now, start=start, variant=variant
                )
            idle = idle + 1 if now == committed else 0
            committed = now
            if all(code == 0 for code in codes):
                break
        await_no_orphans(leaders)

    def validate(
        self,
        attempt: Attempt,
        fault: PlannedFault,
        injected: InjectedFault | None,
        codes: list[int],
        *,
        committed: int,
    ) -> int:
        """The newest committed step. Raises CheckFailed."""
        details = f"{fault}\n{injected}\nexit codes {codes}\n{attempt.ranks[0].output()[-3000:]}"
        checkpoint, complaints = newest_checkpoint(attempt.folder / "checkpoints")
        now = 0 if checkpoint is None else checkpoint.step
        if complaints or now < committed:
            raise CheckFailed(f"committed step {committed}, now {now}: {complaints}\n{details}")
        if injected is None and codes != [0, 0]:
            raise CheckFailed(f"an undisturbed start failed\n{details}")
        if (
            injected is not None
            and not injected.killed
            and set(codes) - {0, EXIT_STOPPED_RESUMABLE}
        ):
            # Before the handlers are installed, SIGTERM ends the process.
            if fault.moment != "start":
                raise CheckFailed(f"signals alone did not end in a checkpoint\n{details}")
        if lost_steps(attempt, committed=now) > 2 * INTERVAL:
            raise CheckFailed(f"more steps lost than an interval and a save\n{details}")
        return now

    def record(
        self,
        fault: PlannedFault,
        injected: InjectedFault,
        attempt: Attempt,
        codes: list[int],
        *,
        committed: int,
        start: float,
        variant: str,
    ) -> None:
        self.totals.kills += injected.killed
        name = f"{fault.victim} at {fault.moment}"
        self.totals.faults[name] = self.totals.faults.get(name, 0) + 1
        lost = lost_steps(attempt, committed=committed)
        self.totals.lost_steps.append(lost)
        row = {
            "training": self.totals.trainings,
            "variant": variant,
            "moment": fault.moment,
            "hit": injected.hit,
            "kills": injected.killed,
            "exit_codes": codes,
            "launcher_s": fault.launcher_s,
            "ended_after_s": round(time.monotonic() - start, 2),
            "committed_step": committed,
            "lost_steps": lost,
        }
        self.note(row)

    def note(self, row: dict[str, Any]) -> None:
        """Append to the ledger, a whole line at a time."""
        if self.options.ledger is None:
            return
        row = {"time": round(time.time(), 1), "seed": self.options.seed, **row}
        with open(self.options.ledger, "a") as file:
            file.write(json.dumps(row) + "\n")


def lost_steps(attempt: Attempt, *, committed: int) -> int:
    """Steps that were done after the newest commit."""
    begun: dict[int, int] = {}
    for (rank, step, _), _ in recorded_batches(attempt.records):
        begun[rank] = step
    return max(0, min(begun.values(), default=0) - committed)


def exit_codes(attempt: Attempt, fault: PlannedFault | None) -> list[int]:
    """Wait for all ranks. Without a launcher, a rank that does not exit by itself is an error."""
    ranks, wait_s = attempt.ranks, TRAINING_TIMEOUT_S if fault is None else EXIT_TIMEOUT_S
    try:
        if fault is not None and fault.launcher_s is not None:
            # As launch/local.py and srun --kill-on-bad-exit do. Workers must end by themselves.
            await_first_exit(attempt)
            with suppress(TimeoutError):
                return [rank.wait(timeout_s=fault.launcher_s / len(ranks)) for rank in ranks]
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        return [rank.wait(timeout_s=wait_s) for rank in ranks]
    except TimeoutError as error:
        output = "\n".join(rank.output()[-3000:] for rank in ranks)
        for rank in ranks:
            end_session(rank.pid)
        raise CheckFailed(f"hangs: {error}\n{fault}\n{output}") from None


def await_first_exit(attempt: Attempt) -> None:
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while not attempt.ended():
        if time.monotonic() > deadline:
            raise TimeoutError("no rank ends")
        time.sleep(0.02)


def await_no_orphans(leaders: list[int]) -> None:
    deadline = time.monotonic() + ORPHAN_TIMEOUT_S
    while left := [pid for leader in leaders for pid in session_of(leader)]:
        if time.monotonic() > deadline:
            raise CheckFailed(f"processes left behind: {left}")
        time.sleep(0.2)


def summary(totals: Totals, *, minutes: float) -> str:
    lost = totals.lost_steps
    rows = [f"  {name}: {number}" for name, number in sorted(totals.faults.items())]
    return "\n".join(
        [
            f"{totals.kills} SIGKILLs in {totals.attempts} starts, {minutes:.1f} min; "
            f"{totals.trainings} runs equal undisturbed ones bit by bit",
            *rows,
            f"steps lost per fault: mean {sum(lost) / max(1, len(lost)):.1f}, most "
            f"{max(lost, default=0)}; {INTERVAL} between saves",
        ]
    )


if __name__ == "__main__":
    run_script(main)
