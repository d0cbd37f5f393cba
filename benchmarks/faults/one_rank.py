"""Let one rank fail at every point of a training, and check that the others end and say why.

    python benchmarks/faults/one_rank.py --cases 500 --seed 1 --ledger one_rank.jsonl
    python benchmarks/faults/one_rank.py --table one_rank.jsonl

A case is drawn from the seed and its number: a place in the training, what happens there (an
exception, a hang, a stop, an exit, a kill), in which rank or loader worker, on 2 or 4 ranks, with
ZeRO 0, 1 or 3, for a supervised, MAE or distillation run. All runs are real. Checked are: all ranks
and their children are gone in time; the record names rank, node and kind; every survivor names the
rank; and the same command then trains to the end of an undisturbed run, bit by bit. Failed cases
are printed with the stacks of what still ran, and decide the exit code.

Owns: the cases, the checks, the ledger, the table.
Leaves out: faults (`patched_rank`), starting ranks (`warm_ranks`), comparing (`run_states`).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from benchmarks.faults.hang_loop import make_shards
from tests.hang_watch import stacks
from tests.support.ranks.patched_rank import FAULT_MARK
from tests.support.ranks.run_states import RunState, differences, read_state
from tests.support.ranks.warm_ranks import ROOT, WarmRank, WarmStarter, end_session, session_of
from vitscale.distributed.failures.events import Failure, cause, read_failures

STEPS, INTERVAL, EVALUATED = 8, 3, 3
SETTINGS = (
    *(f"schedule.steps={STEPS}", "schedule.epochs=null", "schedule.warmup_steps=2"),
    *("data.global_batch=16", "engine.max_micro_batch=4", "engine.num_threads=1"),
    # Decide how soon a hang is detected.
    *("engine.timeout_min=0.2", "data.timeout_s=6", "engine.device=cpu"),
    *("model.width=24", "model.depth=2", "model.mlp_width=48", "model.drop_path=0.0"),
    *(f"checkpoint.every_steps={INTERVAL}", "tracking.log_every_steps=2", "tracking.uri=null"),
    "optim.ema.decay=0.9",
)
KNN = {"name": "knn", "max_bank_images": 64, "every_steps": EVALUATED}
CLASSIFICATION = {"name": "classification", "every_steps": EVALUATED}
# What each changes in configs/digits/pretrain.yaml, by section.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "supervised": {"evaluate": [CLASSIFICATION, KNN]},
    "mae": {
        "objective": {"name": "mae", "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2},
        "model": {"positions": "sincos2d_mae"},
        "evaluate": [KNN],
    },
    "distillation": {
        "objective": {"name": "distillation"},
        "model": {"distillation_token": True},
        "evaluate": [CLASSIFICATION, KNN],
    },
}
SIZES = "schedule.resolutions=[{image_size: 8, until: 0.5, max_micro_batch: 8}, {image_size: 16}]"
# Of one rank, in the order of a run. Steps with saves and evaluations: 3, 6, 8.
EVALUATIONS = SAVES = 3
# Place in words -> places of `patched_rank`, and how often one of them is reached.
MICRO, STEP = "once a micro-batch", "once a step"
PLACES: dict[str, tuple[tuple[str, ...], int | str]] = {
    "a worker starts": (("worker start", "worker process"), 1),
    "a worker reads": (("worker image",), MICRO),
    "a batch is read": (("batch",), MICRO),
    "forward": (("block",), MICRO),
    "backward": (("backward", "gradient"), MICRO),
    "update": (("step", "average"), STEP),
    "evaluation": (("results",), EVALUATIONS),
    "evaluation of the average": (("results",), EVALUATIONS),
    "feature extraction": (("features",), 2 * EVALUATIONS),
    "snapshot": (("export",), SAVES),
    "write of a save": (("write",), SAVES),
    "commit of a save": (("commit", "rename"), SAVES),
    "logging": (("log",), STEPS // 2),
    "the tracker": (("tracker",), STEPS // 2),
    "change of the image size": (("change",), 1),
    "pictures": (("pictures",), 1),
    "the last step": (("step", "end"), 0),
}
IN_FIRST_RANK = ("commit of a save", "the tracker")
IN_WORKER = ("a worker starts", "a worker reads")
# In words -> action of `patched_rank`, kinds of the record that are right.
FAULTS = {
    "raises": ("raise", ("other", "worker")),
    "hangs": ("hang", ("hang", "worker")),
    "is stopped": ("stop", ("hang", "killed from outside", "worker")),
    "exits with 0": ("leave", ("killed from outside", "worker")),
    "exits with 3": ("exit 3", ("killed from outside", "worker")),
    "is killed": ("kill", ("killed from outside", "worker")),
}
WAITS = ("hangs", "is stopped")
# Promised, from the fault: the rank itself, the others, and all of them after a hang.
OWN_S, OTHERS_S, HANG_S = 10.0, 20.0, 30.0
LIMIT_S, RUN_S = 90.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One rank that fails once."""

    place: str
    fault: str
    rank: int
    num_ranks: int
    zero_stage: int
    objective: str
    num_workers: int
    code_place: str
    """Of `patched_rank.PLACES`."""
    nth: int

    @property
    def configuration(self) -> tuple[str, ...]:
        """The objective, and the settings on which the end of the run depends."""
        sizes = (SIZES,) if self.place == "change of the image size" else ()
        return (self.objective, f"engine.zero_stage={self.zero_stage}", *sizes)

    @property
    def in_worker(self) -> bool:
        return self.code_place.startswith("worker ") and self.code_place != "worker process"

    @property
    def name(self) -> str:
        who = f"{'a worker of ' if self.in_worker else ''}rank {self.rank} of {self.num_ranks}"
        where = f"{self.place} ({self.code_place}, call {self.nth})"
        what = f"{self.objective}, ZeRO {self.zero_stage}, {self.num_workers} workers"
        return f"{where}: {who} {self.fault}; {what}"


def draw(seed: int, number: int) -> Case:
    """A case; places and faults follow one another, so that all pairs have equal shares."""
    rng = random.Random(f"{seed} {number}")
    pairs = [(place, fault) for place in PLACES for fault in FAULTS]
    random.Random(seed).shuffle(pairs)
    place, fault = pairs[number % len(pairs)]
    code_places, calls = PLACES[place]
    num_ranks = rng.choice((2, 2, 2, 4))
    accumulation = 4 // num_ranks
    code_place = rng.choice(code_places)
    if calls == MICRO:
        # A micro-batch has 4 images; with two blocks, 4 calls reach into the second one, too.
        each = {"worker image": 4, "block": 2, "gradient": 2}.get(code_place, 1)
        calls = STEPS * accumulation * each
    elif calls == STEP:
        # The engine's step is called for every micro-batch.
        calls = STEPS * (accumulation if code_place == "step" else 1)
    nth = rng.randint(1, max(1, int(calls)))
    if place.startswith("evaluation"):
        nth = 2 * nth - (place == "evaluation")
    if place == "the last step":
        nth = STEPS * accumulation if code_place == "step" else 1
    objective = rng.choice(tuple(OBJECTIVES))
    if place in ("change of the image size", "pictures"):
        objective = {"pictures": "mae"}.get(place, "supervised")
    return Case(
        place=place,
        fault=fault,
        rank=0 if place in IN_FIRST_RANK else rng.randrange(num_ranks),
        num_ranks=num_ranks,
        zero_stage=rng.choice((0, 1, 3)),
        objective=objective,
        num_workers=1 if place in IN_WORKER else rng.choice((0, 1, 2)),
        code_place=code_place,
        nth=nth,
    )


class OneRank:
    """Runs cases; keeps undisturbed runs for comparison."""

    def __init__(self, starter: WarmStarter, *, shards: Path, work: Path) -> None:
        self.starter, self.shards, self.work = starter, shards, work
        self._undisturbed: dict[tuple[tuple[str, ...], int], RunState] = {}

    def check(self, case: Case, folder: Path, *, timed: bool = True) -> dict[str, Any]:
        """Times, the record and `problems` of a case; none is right.

        timed: whether the times must be as promised.
        """
        expected = self.undisturbed(case.configuration, case.num_ranks)
        folder.mkdir(parents=True)
        ranks = self.start(case.configuration, case.num_ranks, folder, case=case)
        problems: list[str] = []
        own_s, all_s = times(case, ranks, folder, problems)
        if timed:
            problems += too_late(case, own_s, all_s)
        found = cause(read_failures(folder / "run"))
        problems += wrong_record(case, found, ranks)
        unequal: list[str] = []
        try:
            self.finish(case.configuration, case.num_ranks, folder, num_workers=case.num_workers)
            unequal = differences(read_state(folder / "run"), expected)
        except (RuntimeError, ValueError) as error:
            unequal = [f"does not resume: {error}"]
        return {
            "own_s": own_s,
            "all_s": all_s,
            "cause": None if found is None else found.text,
            "problems": problems + unequal,
        }

    def undisturbed(self, configuration: tuple[str, ...], num_ranks: int) -> RunState:
        key = (configuration, num_ranks)
        if key not in self._undisturbed:
            folder = Path(tempfile.mkdtemp(dir=self.work))
            self.finish(configuration, num_ranks, folder)
            self._undisturbed[key] = read_state(folder / "run")
            shutil.rmtree(folder)
        return self._undisturbed[key]

    def finish(
        self, configuration: tuple[str, ...], num_ranks: int, folder: Path, *, num_workers: int = 0
    ) -> None:
        """Train to the end. Raises RuntimeError if a rank fails."""
        ranks = self.start(configuration, num_ranks, folder, num_workers=num_workers)
        try:
            codes = [rank.wait(timeout_s=RUN_S) for rank in ranks]
        finally:
            for rank in ranks:
                end_session(rank.pid)
        if any(codes):
            raise RuntimeError(f"exit codes {codes}\n{ranks[0].output()[-3000:]}")

    def start(
        self,
        configuration: tuple[str, ...],
        num_ranks: int,
        folder: Path,
        *,
        case: Case | None = None,
        num_workers: int = 0,
    ) -> list[WarmRank]:
        objective, *own = configuration
        settings = [*SETTINGS, *own, f"data.path={self.shards}", f"output={folder}/run"]
        if case is not None:
            num_workers = case.num_workers
        settings.append(f"data.num_workers={num_workers}")
        command: list[str | Path] = [ROOT / "pretrain/main.py", "--config"]
        command += [self._config(objective), *settings]
        faults: dict[int, list[dict[str, Any]]] = {}
        if case is not None:
            command.insert(0, ROOT / "tests/support/ranks/patched_rank.py")
            do, _ = FAULTS[case.fault]
            faults[case.rank] = [{"place": case.code_place, "nth": case.nth, "do": do}]
        return self.starter.start(
            command,
            num_ranks=num_ranks,
            folder=folder,
            environment={"VITSCALE_HOLD": str(folder)},
            own_environment=[
                {"VITSCALE_FAULTS": json.dumps(faults.get(rank, []))} for rank in range(num_ranks)
            ],
        )

    def _config(self, objective: str) -> Path:
        config = self.work / f"{objective}.yaml"
        if not config.exists():
            values = {"base": str(ROOT / "configs/digits/pretrain.yaml"), **OBJECTIVES[objective]}
            if objective == "distillation":
                folder = self.work / "teacher"
                folder.mkdir()
                self.finish(("supervised", "engine.zero_stage=1"), 1, folder)
                values["objective"] |= {"teacher": {"weights": f"{folder}/run"}}
            config.write_text(yaml.safe_dump(values))
        return config


def times(
    case: Case, ranks: Sequence[WarmRank], folder: Path, problems: list[str]
) -> tuple[float | None, float | None]:
    """Seconds from the fault until the rank, and all, are gone with their children."""
    mark, sessions = folder / FAULT_MARK, {rank.rank: rank.pid for rank in ranks}
    gone: dict[int, float] = {}
    limit = time.monotonic() + LIMIT_S
    while len(gone) < len(ranks):
        for rank in ranks:
            if rank.rank not in gone and rank.poll() is not None and not session_of(rank.pid):
                gone[rank.rank] = time.time()
        if case.fault == "is stopped" and len(gone) == len(ranks) - 1:
            # As a launcher does; no process can end a stopped one of another node.
            ranks[case.rank].send_signal(signal.SIGKILL)
        if time.monotonic() > limit:
            problems.append(f"still there: {sorted(sessions.keys() - gone.keys())}")
            for rank in ranks:
                problems.append(stacks(session_of(rank.pid)))
                end_session(rank.pid)
            break
        time.sleep(0.02)
    if not mark.exists():
        codes = [rank.poll() for rank in ranks]
        problems.append(f"the fault did not happen: {codes}\n{ranks[0].output()[-2000:]}")
        return None, None
    start = float(mark.read_text().split()[0])
    own_s = round(gone.get(case.rank, start + LIMIT_S) - start, 2)
    all_s = round(max(gone.values(), default=start + LIMIT_S) - start, 2)
    return own_s, all_s


def too_late(case: Case, own_s: float | None, all_s: float | None) -> Iterator[str]:
    """What took longer than promised."""
    for name, seconds, promised in (
        ("the rank", own_s, HANG_S if case.fault in WAITS else OWN_S),
        ("all ranks", all_s, HANG_S if case.fault in WAITS else OTHERS_S),
    ):
        if seconds is not None and seconds > promised:
            yield f"{name} gone after {seconds} s, promised {promised:g} s"


def wrong_record(case: Case, found: Failure | None, ranks: Sequence[WarmRank]) -> Iterator[str]:
    """What the record and the survivors' output say that is not right."""
    _, kinds = FAULTS[case.fault]
    if case.code_place in ("write", "commit", "rename") and case.fault == "hangs":
        kinds = ("storage",)
    node = socket.gethostname()
    right = found is not None and found.kind in kinds and found.node == node
    if found is None or not right or found.rank != case.rank:
        yield f"the record says: {found and found.text} (rank {found and found.rank})"
    for rank in ranks:
        if rank.rank != case.rank and f"rank {case.rank} on {node}" not in rank.output():
            yield f"rank {rank.rank} does not name it:\n{rank.output()[-1500:]}"
        if rank.rank != case.rank and rank.poll() == 0:
            yield f"rank {rank.rank} ended with 0"


def table(ledger: Path) -> str:
    """Cases by place and kind: number, median and most seconds until all ranks were gone."""
    rows = [json.loads(line) for line in ledger.read_text().splitlines()]
    wrong = sum(bool(row["problems"]) for row in rows)
    lines = [
        f"| {len(rows)} cases, {wrong} with problems | " + " | ".join(FAULTS) + " |",
        "|---" * (len(FAULTS) + 1) + "|",
    ]
    for place in PLACES:
        cells = []
        for fault in FAULTS:
            own = [row for row in rows if (row["place"], row["fault"]) == (place, fault)]
            seconds = [row["all_s"] for row in own if row["all_s"] is not None]
            cells.append(
                f"{len(own)}: {statistics.median(seconds):.1f}, {max(seconds):.1f}"
                if seconds
                else "-"
            )
        lines.append(f"| {place} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ledger", type=Path, help="JSON lines, one per case")
    parser.add_argument("--table", type=Path, metavar="LEDGER", help="print a ledger's table")
    options = parser.parse_args()
    if options.table:
        print(table(options.table))
        return
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="one-rank-") as folder, WarmStarter() as starter:
        work = Path(folder)
        cases = OneRank(starter, shards=make_shards(work), work=work)
        for number in range(options.first, options.first + options.cases):
            case = draw(options.seed, number)
            found = cases.check(case, work / "case")
            num_wrong += bool(found["problems"])
            print(f"{number}: {case.name}: {found['all_s']} s", *found["problems"], sep="\n  ")
            sys.stdout.flush()
            if options.ledger:
                with open(options.ledger, "a") as file:
                    row = {"seed": options.seed, "number": number, **asdict(case), **found}
                    file.write(json.dumps(row) + "\n")
            shutil.rmtree(work / "case")
    print(f"{options.cases} cases, {num_wrong} with problems")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
