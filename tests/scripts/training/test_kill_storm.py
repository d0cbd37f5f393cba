"""Faults at random moments: all ranks end in time, and the run resumes to undisturbed bits.

    pytest tests/scripts/training/test_kill_storm.py --storm-kills 200 --storm-seed 1

Every run is tiny and real (see `fault_runs`). In one test a rank, a loader worker or all ranks get
SIGKILL, or bursts of SIGTERM and SIGUSR2, under each ZeRO stage in turn. In the other, one rank is
at fault at a known place. The same command restarts the run until it is done. The seed decides the
plan; which instruction a kill interrupts depends on timing.
"""

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.ranks.fault_runs import FaultRuns, fault, output
from tests.support.ranks.run_states import differences, read_state
from tests.support.ranks.warm_ranks import WarmRank, end_session, session_of
from tests.support.waiting import PATIENCE_S, stacks, wait_until
from vitscale.checkpoint.folders import newest_checkpoint
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.distributed.processes import node_name

STAGES = (1, 0, 2, 3)
# Out of 100.
MOMENTS = {"start": 12, "training": 43, "save": 45}
VICTIMS = {"rank": 45, "worker": 25, "all ranks": 15, "signals": 15}
# A closed connection means that the other rank died, a signal that a worker died.
EXIT_S = 120.0
STARTS_WITHOUT_PROGRESS = 40
pytestmark = [pytest.mark.exhaustive, pytest.mark.distributed, pytest.mark.timeout(0)]


def test_runs_killed_at_random_moments_end_with_the_same_bits(
    fault_runs: FaultRuns, tmp_path, pytestconfig
):
    seed = pytestconfig.getoption("--storm-seed")
    kills = 0
    trainings = 0
    while kills < pytestconfig.getoption("--storm-kills"):
        place = tmp_path / str(trainings)
        zero = f"engine.zero_stage={STAGES[trainings % 4]}"
        rng = random.Random(f"{seed} {trainings}")

        # A save after a signal ends a log interval: every step is one.
        settings = (zero, "engine.timeout_min=0.5", "tracking.log_every_steps=1")
        committed = idle = done = 0
        while not done:
            ranks = fault_runs.start(place, *settings)
            moment = "none" if idle == STARTS_WITHOUT_PROGRESS else draw(rng, MOMENTS)
            killed, now, done = strike(ranks, place, moment, rng, committed=committed)
            kills += killed
            idle = idle + 1 if now == committed else 0
            committed = now
        expected = fault_runs.uninterrupted(*settings)
        assert differences(read_state(place / "run"), expected) == [], (
            f"training {trainings}"
        )
        trainings += 1
        print(f"training {trainings} ({zero}): equal; {kills} kills", flush=True)


def strike(
    ranks: list[WarmRank],
    place: Path,
    moment: str,
    rng: random.Random,
    *,
    committed: int,
) -> tuple[int, int, bool]:
    """Inject a fault into one start.

    Returns the number of kills, the newest committed step, and whether the training is done.
    """
    killed = 0
    victim = draw(rng, VICTIMS)
    hit = await_moment(ranks, place, moment, rng)
    if hit:
        killed = inject(victim, ranks, rng)

    # Before the rendezvous, only a launcher can know that a rank is gone.
    has_launcher = killed and (moment == "start" or rng.random() < 0.7)
    patience_s = rng.uniform(0, 3) if has_launcher else None
    await_end(
        ranks, ranks, within_s=EXIT_S if hit else PATIENCE_S, patience_s=patience_s
    )
    codes = [rank.poll() for rank in ranks]
    said = f"{victim} at {moment}: exit codes {codes}\n{ranks[0].output()[-3000:]}"
    if not hit:
        assert codes == [0, 0], said
    elif (
        not killed and moment != "start"
    ):  # before it has handlers, SIGTERM ends the process
        assert set(codes) <= {0, EXIT_STOPPED_RESUMABLE}, said
    wait_until(
        lambda: not any(session_of(rank.pid) for rank in ranks),
        else_say=lambda: "processes are left behind",
    )
    checkpoint, complaints = newest_checkpoint(place / "run/checkpoints")
    now = 0 if checkpoint is None else checkpoint.step
    assert not complaints and now >= committed, (
        f"{committed}, now {now}: {complaints}\n{said}"
    )
    return killed, now, codes == [0, 0]


def draw(rng: random.Random, shares: dict[str, int]) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def await_moment(
    ranks: list[WarmRank], place: Path, moment: str, rng: random.Random
) -> bool:
    """Wait for a random moment of a start; False when the run was over first."""
    rows = num_rows(place) + rng.randrange(15)
    seen = saves_begun(place)
    left = rng.randrange(3)
    longest = {"start": 3.0, "training": 0.05, "save": 0.03}.get(moment, 0.0)
    while not any(rank.poll() is not None for rank in ranks):
        now = saves_begun(place)
        left = left - len(now - seen)
        seen = seen | now
        due = {"start": True, "training": num_rows(place) > rows, "save": left < 0}
        if due.get(moment, False):
            time.sleep(rng.uniform(0, longest))
            return not any(rank.poll() is not None for rank in ranks)
        time.sleep(0.002)
    return False


def num_rows(place: Path) -> int:
    """Steps in the journal."""
    path = place / "run/journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saves_begun(place: Path) -> set[str]:
    """Temporary folders of running or interrupted saves."""
    return {path.name for path in (place / "run/checkpoints").glob("*.tmp")}


def inject(victim: str, ranks: list[WarmRank], rng: random.Random) -> int:
    """Number of processes that got SIGKILL; 0 for signals alone."""
    rank = rng.choice(ranks)
    kill_too = rng.random() < 0.5
    pids = [rank.pid]
    if victim == "signals":
        for _ in range(rng.randrange(2, 7)):
            rng.choice([rank, *ranks]).send_signal(
                rng.choice([signal.SIGTERM, signal.SIGUSR2])
            )
            time.sleep(rng.uniform(0, 0.01))
        pids = [rank.pid] if kill_too else []
    elif victim == "all ranks":
        pids = [each.pid for each in ranks]
    elif victim == "worker" and (workers := rank.workers()):
        pids = [rng.choice(workers)]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def await_end(
    waiting: list[WarmRank],
    ranks: list[WarmRank],
    *,
    within_s: float,
    patience_s: float | None,
) -> None:
    """Raise AssertionError with stacks unless the ranks of `waiting` end in time.

    patience_s: after the first end, as launch/local.py and srun --kill-on-bad-exit do, all ranks
    are killed, and workers must end by themselves; None: without a launcher.
    """
    begun = first_end = time.monotonic()
    while left := [rank for rank in waiting if rank.poll() is None]:
        now = time.monotonic()
        assert now < begun + within_s, "hangs: " + stacks([rank.pid for rank in left])
        if all(rank.poll() is None for rank in ranks):
            first_end = now
        elif patience_s is not None and now > first_end + patience_s:
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        time.sleep(0.02)


# Of each phase of a training: the places of a fault, and the number of the call.
PHASES = {
    "start": {"start": range(1, 2)},
    "training": dict.fromkeys(("batch", "forward", "backward", "step"), range(7, 20)),
    "save": dict.fromkeys(("export", "write", "rename", "prune"), range(2, 5)),
    "evaluation": {"evaluation": range(1, 3), "evaluated batch": range(40, 46)},
    "end": {"close": range(1, 2), "leave": range(1, 2)},
}
HARMS = ("raise", "EIO", "kill", "crash", "leave", "exit 3", "stop", "hang")
# From the fault until all other ranks are gone, and what a launcher waits after the first one.
GONE_S = 20.0
GRACE_S = 5.0
# For 2 to 4 ranks.
SETTINGS = "data.global_batch=24"


class Case(NamedTuple):
    phase: str
    place: str
    nth_call: int
    do: str
    rank: int
    num_ranks: int
    has_launcher: bool


def test_one_rank_at_fault_is_named_and_ends_the_others(
    fault_runs: FaultRuns, tmp_path, pytestconfig
):
    seed = pytestconfig.getoption("--storm-seed")
    failed = []
    for number in range(pytestconfig.getoption("--storm-kills")):
        case = draw_case(random.Random(f"{seed} {number}"))
        folder = tmp_path / str(number)
        planted = {case.rank: [fault(case.place, case.nth_call, case.do)]}
        ranks = fault_runs.start(
            folder,
            SETTINGS,
            "engine.timeout_min=0.2",
            faults=planted,
            num_ranks=case.num_ranks,
        )
        try:
            check_end(case, ranks, folder)
            fault_runs.assert_resumes_exactly(
                folder, SETTINGS, num_ranks=case.num_ranks
            )
            print(f"{number}: {case}", flush=True)
        except (AssertionError, TimeoutError) as error:
            failed.append(f"{number}: {case}: {error}\n{output(folder)[-9000:]}")
            print(f"FAILED {failed[-1]}", flush=True)
        finally:
            for rank in ranks:
                end_session(rank.pid)
    assert not failed, f"{len(failed)} failed\n" + "\n".join(failed)


def draw_case(rng: random.Random) -> Case:
    phase = rng.choice([*PHASES])
    do = rng.choice(HARMS)
    place = rng.choice([*PHASES[phase]])
    num_ranks = rng.randint(2, 4)
    nth = rng.choice(PHASES[phase][place])
    rank = 0 if place in ("rename", "prune") else rng.randrange(num_ranks)
    if place in (
        "write",
        "rename",
        "prune",
    ):  # which are tried again, and may take an hour
        do = {"EIO": "raise", "hang": "stop"}.get(do, do)
    return Case(phase, place, nth, do, rank, num_ranks, has_launcher=rng.random() < 0.5)


def check_end(case: Case, ranks: list[WarmRank], folder: Path) -> None:
    """Raise AssertionError unless all end in time with their workers, and the culprit is named."""
    others = [rank for rank in ranks if rank.rank != case.rank]
    waiting = others if case.do == "stop" and not case.has_launcher else ranks
    wait_until(
        lambda: (folder / "fault").exists() or all(rank.poll() == 0 for rank in ranks)
    )
    patience_s = GRACE_S if case.has_launcher else None
    await_end(waiting, ranks, within_s=GONE_S, patience_s=patience_s)
    ranks[case.rank].send_signal(signal.SIGKILL)
    wait_until(lambda: not any(session_of(rank.pid) for rank in ranks))
    if not case.has_launcher and case.phase != "end":
        assert all(rank.poll() for rank in others), "a rank ended with code 0"
        named = rf"rank {case.rank} on {node_name()} .*?( \(.*)\n"
        said = re.findall(named, "".join(rank.output() for rank in others))
        assert said and (case.phase == "start" or "step " in said[0]), f"named: {said}"
