"""Faults at random moments: all ranks end in time, and the run resumes to undisturbed bits.

    pytest tests/scripts/training/test_kill_storm.py --storm-kills 200 --storm-seed 1

Every run is tiny and real (see `fault_runs`). In one test a rank, a loader worker or all ranks get
SIGKILL, or bursts of SIGTERM and SIGUSR2, under each ZeRO stage in turn. In the other, one rank is
at fault at a known place; a third one kills self-distillation at ZeRO 3. The same command restarts
the run until it is done. The seed decides the plan; which instruction a kill interrupts depends on
timing.
"""

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.scripts.training.test_resume import OBJECTIVES
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
# So many faults in a row may come before the first save; then a start is left alone.
STARTS_WITHOUT_PROGRESS = 40
pytestmark = [pytest.mark.exhaustive, pytest.mark.distributed, pytest.mark.timeout(0)]


def test_runs_killed_at_random_moments_end_with_the_same_bits(
    fault_runs, tmp_path, pytestconfig
):
    seed = pytestconfig.getoption("--storm-seed")
    least = pytestconfig.getoption("--storm-kills")
    stages = [(f"engine.zero_stage={stage}",) for stage in STAGES]
    storm(fault_runs, tmp_path, stages, least=least, seed=seed)


def test_dino_is_killed_fifty_times(fault_runs, tmp_path, pytestconfig):
    """With teacher, heads, centres, masks and KoLeo: all that has a state or is drawn."""
    seed = pytestconfig.getoption("--storm-seed")
    settings = (*OBJECTIVES["dino"], "engine.zero_stage=3")
    storm(fault_runs, tmp_path, [settings], least=50, seed=seed)


def storm(
    fault_runs: FaultRuns,
    tmp_path: Path,
    trained: Sequence[tuple[str, ...]],
    *,
    least: int,
    seed: int,
):
    """Run trainings with these settings in turn, until there were at least so many kills.

    Raises AssertionError for one that does not end with the bits of an undisturbed one.
    """
    kills = 0
    trainings = 0
    while kills < least:
        folder = tmp_path / str(trainings)
        # Each training has a plan of its own, which does not depend on those before it.
        rng = random.Random(f"{seed} {trainings}")

        # A save after a signal ends a log interval: every step is one.
        own = trained[trainings % len(trained)]
        settings = (*own, "engine.timeout_min=0.5", "tracking.log_every_steps=1")
        committed = 0
        idle = 0
        is_done = False
        while not is_done:
            ranks = fault_runs.start(folder, *settings)
            moment = "none"
            if idle < STARTS_WITHOUT_PROGRESS:
                moment = draw(rng, MOMENTS)
            before = committed
            killed, committed, is_done = strike(
                ranks, folder, moment, rng, committed=before
            )
            kills += killed
            idle += 1
            if committed > before:
                idle = 0
        ours = read_state(folder / "run")
        expected = fault_runs.uninterrupted(*settings)
        assert differences(ours, expected) == [], f"training {trainings}"
        trainings += 1
        print(f"training {trainings} ({own[-1]}): equal; {kills} kills", flush=True)


def strike(
    ranks: list[WarmRank],
    folder: Path,
    moment: str,
    rng: random.Random,
    *,
    committed: int,
) -> tuple[int, int, bool]:
    """Inject a fault into one start.

    Returns the number of kills, the newest committed step, and whether the training is done.
    """
    killed = 0
    within_s = PATIENCE_S
    victim = draw(rng, VICTIMS)
    is_hit = await_moment(ranks, folder, moment, rng)
    if is_hit:
        killed = inject(victim, ranks, rng)
        within_s = EXIT_S

    # Before the rendezvous, only a launcher can know that a rank is gone.
    patience_s = None
    if killed and (moment == "start" or rng.random() < 0.7):
        patience_s = rng.uniform(0, 3)
    await_end(ranks, ranks, within_s=within_s, patience_s=patience_s)

    codes = [rank.poll() for rank in ranks]
    text = f"{victim} at {moment}: exit codes {codes}\n{ranks[0].output()[-3000:]}"
    if not is_hit:
        assert codes == [0, 0], text
    elif not killed and moment != "start":
        # Before it has handlers, SIGTERM ends the process.
        assert set(codes) <= {0, EXIT_STOPPED_RESUMABLE}, text
    wait_until(
        lambda: not any(session_of(rank.pid) for rank in ranks),
        else_say=lambda: "processes are left behind",
    )

    # What was committed stays: level R0 of docs/reliability.md.
    checkpoint, complaints = newest_checkpoint(folder / "run/checkpoints")
    step = 0
    if checkpoint is not None:
        step = checkpoint.step
    text = f"{committed}, now {step}: {complaints}\n{text}"
    assert not complaints and step >= committed, text
    return killed, step, codes == [0, 0]


def draw(rng: random.Random, shares: dict[str, int]) -> str:
    (drawn,) = rng.choices([*shares], weights=[*shares.values()])
    return drawn


def await_moment(
    ranks: list[WarmRank], folder: Path, moment: str, rng: random.Random
) -> bool:
    """Wait for a random moment of a start; False when the run was over first."""

    def are_running():
        return all(rank.poll() is None for rank in ranks)

    rows = num_rows(folder) + rng.randrange(15)
    seen = saves_begun(folder)
    left = rng.randrange(3)
    # A start takes seconds, a step or a save some hundredths: the kill falls anywhere in it.
    longest = {"start": 3.0, "training": 0.05, "save": 0.03}.get(moment, 0.0)
    while are_running():
        begun = saves_begun(folder)
        left -= len(begun - seen)
        seen |= begun
        due = {"start": True, "training": num_rows(folder) > rows, "save": left < 0}
        if due.get(moment, False):
            time.sleep(rng.uniform(0, longest))
            return are_running()
        time.sleep(0.002)
    return False


def num_rows(folder: Path) -> int:
    """Steps in the journal."""
    path = folder / "run/journal.jsonl"
    if not path.exists():
        return 0
    return path.read_bytes().count(b"\n")


def saves_begun(folder: Path) -> set[str]:
    """Temporary folders of running or interrupted saves."""
    return {path.name for path in (folder / "run/checkpoints").glob("*.tmp")}


def inject(victim: str, ranks: list[WarmRank], rng: random.Random) -> int:
    """Number of processes that got SIGKILL; 0 for signals alone."""
    rank = rng.choice(ranks)
    kill_too = rng.random() < 0.5
    pids = [rank.pid]
    if victim == "signals":
        for _ in range(rng.randrange(2, 7)):
            # The rank that may be killed gets most of them.
            target = rng.choice([rank, *ranks])
            target.send_signal(rng.choice([signal.SIGTERM, signal.SIGUSR2]))
            time.sleep(rng.uniform(0, 0.01))
        if not kill_too:
            pids = []
    elif victim == "all ranks":
        pids = [every_rank.pid for every_rank in ranks]
    elif victim == "worker":
        # A rank that has not started its workers yet is killed itself.
        workers = rank.workers()
        if workers:
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
):
    """Raise AssertionError with stacks unless the ranks of `waiting` end in time.

    patience_s: after the first end, as launch/local.py and srun --kill-on-bad-exit do, all ranks
    are killed, and workers must end by themselves; None: without a launcher.
    """
    begun = time.monotonic()
    first_end = begun
    while left := [rank for rank in waiting if rank.poll() is None]:
        now = time.monotonic()
        assert now < begun + within_s, "hangs: " + stacks([rank.pid for rank in left])
        # It moves on as long as all run.
        if all(rank.poll() is None for rank in ranks):
            first_end = now
        elif patience_s is not None and now > first_end + patience_s:
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        time.sleep(0.02)


# Of each phase of a training: the places of a fault, and the first and last call that it may hit.
PHASES = yaml.safe_load("""
start: {start: [1, 1]}
training: {batch: [7, 19], forward: [7, 19], backward: [7, 19], step: [7, 19]}
save: {export: [2, 4], write: [2, 4], rename: [2, 4], prune: [2, 4]}
evaluation: {evaluation: [1, 2], evaluated batch: [40, 45]}
end: {close: [1, 1], leave: [1, 1]}
""")
HARMS = "raise|EIO|kill|crash|leave|exit 3|stop|hang".split("|")
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
    fault_runs, tmp_path, pytestconfig
):
    seed = pytestconfig.getoption("--storm-seed")
    failed = []
    for number in range(pytestconfig.getoption("--storm-kills")):
        case = draw_case(random.Random(f"{seed} {number}"))
        num_ranks = case.num_ranks
        folder = tmp_path / str(number)
        planted = {case.rank: [fault(case.place, case.nth_call, case.do)]}
        ranks = fault_runs.start(
            folder,
            SETTINGS,
            "engine.timeout_min=0.2",
            faults=planted,
            num_ranks=num_ranks,
        )
        try:
            check_end(case, ranks, folder)
            fault_runs.assert_resumes_exactly(folder, SETTINGS, num_ranks=num_ranks)
            print(f"{number}: {case}", flush=True)
        except (AssertionError, TimeoutError) as error:
            # Hours of cases: the others are worth more than an early end.
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
    nth = rng.randint(*PHASES[phase][place])
    # Rank 0 alone commits and removes.
    rank = 0
    if place not in ("rename", "prune"):
        rank = rng.randrange(num_ranks)
    # Storage is tried again, and may take an hour.
    if place in ("write", "rename", "prune"):
        do = {"EIO": "raise", "hang": "stop"}.get(do, do)
    has_launcher = rng.random() < 0.5
    return Case(phase, place, nth, do, rank, num_ranks, has_launcher)


def check_end(case: Case, ranks: list[WarmRank], folder: Path):
    """Raise AssertionError unless all end in time with their workers, and the culprit is named."""
    others = [rank for rank in ranks if rank.rank != case.rank]
    waiting = ranks
    patience_s = None
    if case.has_launcher:
        patience_s = GRACE_S
    elif case.do == "stop":
        # A stopped process ends only when somebody kills it.
        waiting = others

    def is_reached():
        # A call of this number may never come; the training then ends by itself.
        return (folder / "fault").exists() or all(rank.poll() == 0 for rank in ranks)

    wait_until(is_reached)
    await_end(waiting, ranks, within_s=GONE_S, patience_s=patience_s)
    ranks[case.rank].send_signal(signal.SIGKILL)
    wait_until(lambda: not any(session_of(rank.pid) for rank in ranks))

    # A launcher may kill the others before they notice; at the end nobody waits for the rank.
    if not case.has_launcher and case.phase != "end":
        assert all(rank.poll() for rank in others), "a rank ended with code 0"
        named = rf"rank {case.rank} on {node_name()} .*?( \(.*)\n"
        details = re.findall(named, "".join(rank.output() for rank in others))
        assert details, "not named"
        assert case.phase == "start" or "step " in details[0], f"named: {details}"
