"""A kill storm: trainings killed at random moments until N kills are through; nothing may differ.

    python benchmarks/kill_storm.py --kills 200 --seed 1 --ledger storm.jsonl

Every training is tiny and real: pretrain/main.py on two ranks, with loader workers, augmentation,
mixup, dropout, drop path, an average of the weights and accumulation, under each ZeRO stage in
turn. It is struck (SIGKILL of a rank, of a loader worker, of all; bursts of SIGTERM and SIGUSR2),
during start, training and saves, and started again by the same command until it is done.
Then model, moments, average, progress, journal and every batch that was taken have to equal those
of an undisturbed training, bit by bit. The first inequality, hang, lost step, or start that needs a
hand ends the storm with exit code 1 and keeps the folder.

Owns: the loop, what has to hold after each strike, the ledger, the summary.
Leaves out: strikes (`storm_strikes`), starting (`warm_ranks`), comparing (`run_states`).

--seed decides what is planned; the clock decides on which instruction a blow falls.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    from benchmarks.faults.strikes import Blow, Life, Strike, await_moment, draw_strike, strike_down
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
    # How soon a silent rank is noticed follows from it.
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
# The other rank learns of a death from a closed connection, a rank of its worker's from a signal.
ENDING_S = 60.0
TRAINING_S = 600.0
# Loader workers look every 5 s whether their rank lives.
ORPHANS_S = 30.0
LIVES_WITHOUT_PROGRESS = 40


class Broken(Exception):
    """Something did not hold."""


@dataclass(kw_only=True)
class Count:
    """What the summary tells."""

    kills: int = 0
    strikes: dict[str, int] = field(default_factory=dict)
    trainings: int = 0
    lives: int = 0
    lost_steps: list[int] = field(default_factory=list)


def main() -> None:
    options = parse_arguments()
    work = Path(options.work or tempfile.mkdtemp(prefix="storm-")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    shards = options.shards.resolve() if options.shards else make_shards(work)
    storm = Storm(options=options, work=work, shards=shards)
    start = time.monotonic()
    try:
        while storm.count.kills < options.kills:
            storm.training()
    except Broken as error:
        print(summary(storm.count, minutes=(time.monotonic() - start) / 60), flush=True)
        print(f"BROKEN (--seed {options.seed}): {error}\nkept: {work}", file=sys.stderr)
        raise SystemExit(1) from None
    print(summary(storm.count, minutes=(time.monotonic() - start) / 60))
    if not options.work:
        shutil.rmtree(work)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        epilog="--seed decides what is planned; the clock decides where a blow falls.",
    )
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs to go through (200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ledger", type=Path, help="JSON lines: one per strike and training")
    parser.add_argument("--steps", type=int, default=60, help="steps of one training (60)")
    parser.add_argument("--shards", type=Path, help="default: the digits, made here")
    parser.add_argument("--work", help="folder for the trainings, kept; default: temporary")
    options = parser.parse_args()
    if options.kills < 1 or options.steps <= INTERVAL:
        raise UserError(
            f"--kills {options.kills} --steps {options.steps}",
            allowed=f"at least 1 kill and {INTERVAL + 1} steps",
        )
    return options


def make_shards(work: Path) -> Path:
    """The embedded digits as shards, by the scripts that people run."""
    shards = work / "shards"
    if not shards.exists():
        config = ROOT / "configs/data/digits.yaml"
        for script, *arguments in (
            ["data_prep/make_digits.py", work / "images"],
            ["data_prep/make_shards.py", "--config", config]
            + [f"source.path={work / 'images'}", f"output={shards}"],
        ):
            command = [sys.executable, ROOT / str(script), *map(str, arguments)]
            subprocess.run(command, check=True, cwd=work, stdout=subprocess.DEVNULL)
    return shards


@dataclass(kw_only=True)
class Storm:
    """All trainings of one call."""

    options: argparse.Namespace
    work: Path
    shards: Path
    count: Count = field(default_factory=Count)
    undisturbed: dict[str, tuple[RunState, float]] = field(default_factory=dict)
    """By variant: what it comes to, and the seconds until its first batch."""

    def training(self) -> None:
        """One training from its first start to its end, and the comparison."""
        number = self.count.trainings
        variant = list(VARIANTS)[number % len(VARIANTS)]
        # A server for each training: another hash seed, other addresses.
        with WarmStarter() as starter:
            if variant not in self.undisturbed:
                self.undisturbed[variant] = self.reference(starter, variant)
            state, start_s = self.undisturbed[variant]
            place = self.work / f"training-{number}"
            chance = random.Random(f"{self.options.seed} {number}")
            self.storm_through(starter, place, variant, chance=chance, start_s=start_s)
            ours = read_state(place / "run", records=place)
            unequal = differences(ours, state)
        row = {"training": number, "variant": variant, "equal": not unequal}
        self.note(row | {"different": unequal})
        if unequal:
            raise Broken("\n  ".join([f"training {number} ({variant}) differs:", *unequal]))
        self.count.trainings += 1
        print(f"training {number} ({variant}): equal; {self.count.kills} kills so far", flush=True)
        shutil.rmtree(place)

    def reference(self, starter: WarmStarter, variant: str) -> tuple[RunState, float]:
        place = self.work / f"undisturbed {variant}"
        life = self.start(starter, place, variant)
        start = time.monotonic()
        while not life.num_batches() and not life.ended():
            time.sleep(0.01)
        start_s = time.monotonic() - start
        codes = [rank.wait(timeout_s=TRAINING_S) for rank in life.ranks]
        if codes != [0, 0]:
            raise Broken(f"undisturbed {variant}: exit codes {codes}\n{life.ranks[0].output()}")
        return read_state(place / "run", records=place), start_s

    def start(self, starter: WarmStarter, place: Path, variant: str) -> Life:
        """The same command every time."""
        place.mkdir(exist_ok=True)
        command = [ROOT / "tests/support/ranks/recorded_rank.py", ROOT / "pretrain/main.py"]
        command += ["--config", ROOT / "configs/demo/pretrain.yaml", *SETTINGS, *VARIANTS[variant]]
        command += [f"schedule.steps={self.options.steps}", f"data.path={self.shards}"]
        ranks = starter.start(
            [*command, f"output={place / 'run'}"],
            num_ranks=NUM_RANKS,
            folder=place,
            environment={"VITSCALE_RECORD": str(place)},
        )
        self.count.lives += 1
        return Life(ranks=ranks, folder=place / "run", records=place)

    def storm_through(
        self,
        starter: WarmStarter,
        place: Path,
        variant: str,
        *,
        chance: random.Random,
        start_s: float,
    ) -> None:
        """Strike, start again, until the training is done."""
        committed, idle, leaders = 0, 0, []
        while True:
            life = self.start(starter, place, variant)
            leaders += [rank.pid for rank in life.ranks]
            strike = draw_strike(
                chance,
                num_ranks=NUM_RANKS,
                start_s=1.5 * start_s,
                interval=INTERVAL * ACCUMULATION * NUM_RANKS,
            )
            blow = None
            if idle < LIVES_WITHOUT_PROGRESS and await_moment(strike, life):
                blow = strike_down(strike, life)
            start = time.monotonic()
            codes = ending(life, strike if blow is not None and blow.killed else None)
            now = self.judge(life, strike, blow, codes, committed=committed)
            if blow is not None:
                self.record(strike, blow, life, codes, committed=now, start=start, variant=variant)
            idle = idle + 1 if now == committed else 0
            committed = now
            if all(code == 0 for code in codes):
                break
        await_no_orphans(leaders)

    def judge(
        self, life: Life, strike: Strike, blow: Blow | None, codes: list[int], *, committed: int
    ) -> int:
        """The newest committed step. Raises Broken."""
        told = f"{strike}\n{blow}\nexit codes {codes}\n{life.ranks[0].output()[-3000:]}"
        checkpoint, complaints = newest_checkpoint(life.folder / "checkpoints")
        now = 0 if checkpoint is None else checkpoint.step
        if complaints or now < committed:
            raise Broken(f"committed step {committed}, now {now}: {complaints}\n{told}")
        if blow is None and codes != [0, 0]:
            raise Broken(f"a start that nobody disturbed did not go through\n{told}")
        if blow is not None and not blow.killed and set(codes) - {0, EXIT_STOPPED_RESUMABLE}:
            # Before the handlers are there, SIGTERM ends a process as it ends any.
            if strike.moment != "start":
                raise Broken(f"signals alone did not end in a checkpoint\n{told}")
        if lost_steps(life, committed=now) > 2 * INTERVAL:
            raise Broken(f"more lost than an interval and a save\n{told}")
        return now

    def record(
        self,
        strike: Strike,
        blow: Blow,
        life: Life,
        codes: list[int],
        *,
        committed: int,
        start: float,
        variant: str,
    ) -> None:
        self.count.kills += blow.killed
        name = f"{strike.victim} at {strike.moment}"
        self.count.strikes[name] = self.count.strikes.get(name, 0) + 1
        lost = lost_steps(life, committed=committed)
        self.count.lost_steps.append(lost)
        row = {
            "training": self.count.trainings,
            "variant": variant,
            "moment": strike.moment,
            "hit": blow.hit,
            "kills": blow.killed,
            "exit_codes": codes,
            "launcher_s": strike.launcher_s,
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


def lost_steps(life: Life, *, committed: int) -> int:
    """Steps that were through and are behind the newest commit."""
    begun: dict[int, int] = {}
    for (rank, step, _), _ in recorded_batches(life.records):
        begun[rank] = step
    return max(0, min(begun.values(), default=0) - committed)


def ending(life: Life, strike: Strike | None) -> list[int]:
    """Exit codes. Without a launcher, a rank that does not end by itself breaks the storm."""
    ranks, wait_s = life.ranks, TRAINING_S if strike is None else ENDING_S
    try:
        if strike is not None and strike.launcher_s is not None:
            # As launch/local.py and srun --kill-on-bad-exit do. Workers are left to themselves.
            await_first_end(life)
            with suppress(TimeoutError):
                return [rank.wait(timeout_s=strike.launcher_s / len(ranks)) for rank in ranks]
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        return [rank.wait(timeout_s=wait_s) for rank in ranks]
    except TimeoutError as error:
        output = "\n".join(rank.output()[-3000:] for rank in ranks)
        for rank in ranks:
            end_session(rank.pid)
        raise Broken(f"hangs: {error}\n{strike}\n{output}") from None


def await_first_end(life: Life) -> None:
    deadline = time.monotonic() + ENDING_S
    while not life.ended():
        if time.monotonic() > deadline:
            raise TimeoutError("no rank ends")
        time.sleep(0.02)


def await_no_orphans(leaders: list[int]) -> None:
    deadline = time.monotonic() + ORPHANS_S
    while left := [pid for leader in leaders for pid in session_of(leader)]:
        if time.monotonic() > deadline:
            raise Broken(f"processes left behind: {left}")
        time.sleep(0.2)


def summary(count: Count, *, minutes: float) -> str:
    lost = count.lost_steps
    rows = [f"  {name}: {number}" for name, number in sorted(count.strikes.items())]
    return "\n".join(
        [
            f"{count.kills} SIGKILLs in {count.lives} starts, {minutes:.1f} min; {count.trainings} "
            "trainings went through and equal undisturbed ones bit by bit",
            *rows,
            f"steps lost by a strike: mean {sum(lost) / max(1, len(lost)):.1f}, most "
            f"{max(lost, default=0)}; {INTERVAL} between saves",
        ]
    )


if __name__ == "__main__":
    run_script(main)
