"""Killed, hung and signalled ranks and workers, and NaN, in real training runs.

Each case injects one fault at one known place, then runs the same command again. The final state
(weights, moments, average, counters, journal) must equal an uninterrupted training's bit by bit.
Left out: faults of files and folders (test_storage_faults), of every system call of a save
(test_checkpoint_faults), at random moments (test_kill_storm).
"""

from __future__ import annotations

import random
import signal
import socket
from pathlib import Path

import pytest

from tests.support.levels import by_level
from tests.support.ranks.fault_runs import (
    INTERVAL,
    STEPS,
    FaultRuns,
    Faults,
    fault,
    micro_step,
    newest_step,
    output,
    wait_all,
    wait_and_end_others,
)
from tests.support.ranks.run_states import differences, read_state
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow
exhaustive = pytest.mark.exhaustive
HERE = socket.gethostname()

# rank, place, number of the call, its step
KILLS = {
    "in the backward pass": (1, "backward", micro_step(8), 8),
    "in the forward pass": (0, "forward", micro_step(8), 8),
    "before an update": (1, "step", micro_step(9, number=1), 9),
    "waiting for data": (1, "batch", micro_step(12, number=1), 12),
    "at a log line": (0, "log", 3, 8),
    "in an evaluation": (1, "evaluated batch", micro_step(12, number=1) + 4, 12),
    "at start": (0, "start", 1, 1),
    "before a save": (0, "export", 2, 10),
    "before its tensor file": (1, "write", 2, 10),
    "before a commit": (0, "rename", 2, 10),
    "before retention": (0, "prune", 3, 15),
    "in the last save": (0, "rename", 5, STEPS),
}
SLOW_KILLS = {"in an evaluation", "before its tensor file", "before a commit", "in the last save"}


@pytest.mark.parametrize("case", by_level(KILLS, fast={"in the backward pass"}, slow=SLOW_KILLS))
def test_killed_rank(fault_runs: FaultRuns, tmp_path: Path, case: str) -> None:
    rank, place, nth, step = KILLS[case]
    world = fault_runs.start(tmp_path, faults={rank: [fault(place, nth, "kill")]})
    assert wait_and_end_others(world)[rank] == -signal.SIGKILL
    # The save before the last one begun was certainly committed.
    least = max(0, (step - 1) // INTERVAL * INTERVAL - INTERVAL)
    assert least <= newest_step(tmp_path) <= step
    fault_runs.assert_resumes_exactly(tmp_path)


@exhaustive
@pytest.mark.timeout(0)
def test_any_failing_rank_ends_the_other_and_is_named(
    fault_runs: FaultRuns, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """At a random call of a random place: see --storm-kills and --storm-seed. No launcher helps."""
    rng = random.Random(pytestconfig.getoption("--storm-seed"))
    for number in range(pytestconfig.getoption("--storm-kills")):
        case = rng.choice([case for case in KILLS if case != "at start"])
        rank, place, nth, _ = KILLS[case]
        if place not in ("log", "rename", "prune"):
            rank, nth = rng.randrange(2), rng.randint(1, nth)
        do = rng.choice(["kill", "crash", "leave", "exit 3", "raise", "hang", "stop"])
        if place in ("write", "rename", "prune") and do == "hang":
            do = "stop"  # a save may take an hour
        folder, planted = tmp_path / str(number), {rank: [fault(place, nth, do)]}
        world = fault_runs.start(folder, "engine.timeout_min=0.2", faults=planted)
        said = f"{number}: rank {rank}, {place}, call {nth}: {do}"
        assert world[1 - rank].wait(timeout_s=90) > 0, said
        assert f"rank {rank} on {HERE}" in world[1 - rank].output(), said
        world[rank].send_signal(signal.SIGKILL)
        wait_all(world)
        fault_runs.assert_resumes_exactly(folder)
        print(said, flush=True)


@slow
def test_killed_again_while_resuming(fault_runs: FaultRuns, killed_copy: Path) -> None:
    for rank, place in enumerate(("start", "restore")):
        world = fault_runs.start(killed_copy, faults={rank: [fault(place, 1, "kill")]})
        assert wait_and_end_others(world)[rank] == -signal.SIGKILL
    fault_runs.assert_resumes_exactly(killed_copy)


@slow
@pytest.mark.parametrize("rank, do", [(0, "leave"), (1, "kill"), (0, "crash")])
def test_surviving_rank_ends_and_names_the_other(
    fault_runs: FaultRuns, tmp_path: Path, rank: int, do: str
) -> None:
    """No launcher ends it. `leave` is an exit code of 0 in the middle of training."""
    wait = "engine.timeout_min=0.2"
    world = fault_runs.start(tmp_path, wait, faults={rank: [fault("backward", micro_step(8), do)]})
    codes = wait_all(world)
    expected = {"kill": -signal.SIGKILL, "crash": -signal.SIGSEGV, "leave": 0}
    assert codes[rank] == expected[do] and codes[1 - rank] > 0
    assert f"rank {rank} on {HERE} was killed or exited" in world[1 - rank].output()
    fault_runs.assert_resumes_exactly(tmp_path)


@slow
def test_killed_loader_worker_is_named(fault_runs: FaultRuns, tmp_path: Path) -> None:
    planted = {1: [fault("batch", micro_step(7), "kill worker")]}
    world = fault_runs.start(tmp_path, faults=planted)
    assert wait_and_end_others(world, grace_s=10)[1] > 0
    assert "a loader worker died" in world[1].output()
    fault_runs.assert_resumes_exactly(tmp_path)


@slow
def test_loader_workers_ignore_sigterm(fault_runs: FaultRuns, tmp_path: Path) -> None:
    planted = {rank: [fault("batch", micro_step(7), "SIGTERM worker")] for rank in (0, 1)}
    assert fault_runs.run(tmp_path, faults=planted) == [0, 0]
    fault_runs.assert_resumes_exactly(tmp_path)


# The save after a signal ends a log interval that an uninterrupted training does not end.
EVERY_STEP = "tracking.log_every_steps=1"
# Faults by rank, exit codes, the committed step: the one after the signal's, since ranks agree in
# the background.
SIGNALS: dict[str, tuple[dict[int, Faults], list[int], int]] = {
    "bursts on both ranks": (
        {rank: [fault("batch", micro_step(7), "burst")] for rank in (0, 1)},
        [75, 75],
        8,
    ),
    "on one rank only": ({1: [fault("backward", micro_step(8), "SIGTERM")]}, [75, 75], 9),
    "in a save": ({0: [fault("write", 3, "SIGUSR2")]}, [75, 75], 11),
    "in the last step": ({1: [fault("backward", micro_step(STEPS), "burst")]}, [0, 0], STEPS),
    # Before a handler is installed, SIGTERM ends the process.
    "before training": ({1: [fault("start", 1, "SIGTERM")]}, [-9, -15], 0),
}


@pytest.mark.parametrize(
    "case",
    by_level(
        SIGNALS, fast=["bursts on both ranks"], slow=SIGNALS.keys() - {"bursts on both ranks"}
    ),
)
def test_stop_signals(fault_runs: FaultRuns, tmp_path: Path, case: str) -> None:
    planted, codes, step = SIGNALS[case]
    grace_s = 0 if case == "before training" else 30
    world = fault_runs.start(tmp_path, EVERY_STEP, faults=planted)
    assert wait_and_end_others(world, grace_s=grace_s) == codes, output(tmp_path)
    # A signal during a save takes effect one or two steps later.
    assert step <= newest_step(tmp_path) <= step + (2 if case == "in a save" else 0)
    fault_runs.assert_resumes_exactly(tmp_path, EVERY_STEP)


@slow
def test_preempted_repeatedly(fault_runs: FaultRuns, tmp_path: Path) -> None:
    for attempt in range(4):
        planted = {attempt % 2: [fault("batch", micro_step(3), "SIGTERM")]}
        assert fault_runs.run(tmp_path, EVERY_STEP, faults=planted) == [75, 75]
        assert newest_step(tmp_path) == 4 * (attempt + 1)
    fault_runs.assert_resumes_exactly(tmp_path, EVERY_STEP)


# rank, fault, message of the other rank
HUNG = {
    "rank 1 stopped": (1, "stop", f"rank 1 on {HERE} has sent no heartbeat"),
    "rank 0 stopped": (0, "stop", f"rank 0 on {HERE} was stopped or killed, or its node"),
    "rank 1 hangs": (1, "hang", f"rank 1 on {HERE} has kept the others waiting for 6 s ("),
}


@slow
@pytest.mark.parametrize("case", HUNG)
def test_hung_rank_is_named(fault_runs: FaultRuns, tmp_path: Path, case: str) -> None:
    rank, do, message = HUNG[case]
    place = "batch" if do == "hang" else "forward"
    planted = {rank: [fault(place, micro_step(8), do)]}
    world = fault_runs.start(tmp_path, "engine.timeout_min=0.15", faults=planted)
    assert world[1 - rank].wait(timeout_s=PATIENCE_S) == 1
    assert message in world[1 - rank].output()
    world[rank].send_signal(signal.SIGKILL)
    wait_all(world)
    fault_runs.assert_resumes_exactly(tmp_path)


@slow
def test_slow_rank_changes_nothing(fault_runs: FaultRuns, tmp_path: Path) -> None:
    planted = {
        0: [fault("write", 3, "lag"), fault("log", 4, "lag")],
        1: [fault("backward", 9, "lag"), fault("evaluation", 1, "lag")],
    }
    assert fault_runs.run(tmp_path, faults=planted) == [0, 0]
    fault_runs.assert_resumes_exactly(tmp_path)


NOT_FINITE = {
    "NaN loss on rank 0": (0, "NaN"),
    "infinite loss on rank 1": (1, "infinity"),
    "NaN gradient on rank 1": (1, "NaN gradient"),
}
BAD_STEP = 8


def poison(fault_runs: FaultRuns, folder: Path, rank: int, do: str, *more: str) -> str:
    planted = {rank: [fault("forward", micro_step(BAD_STEP, number=1), do)]}
    assert fault_runs.run(folder, *more, faults=planted) == [0, 0], output(folder)
    return output(folder)


@slow
@pytest.mark.parametrize("stage", [1, 3])
def test_step_with_nan_on_one_rank_is_skipped_on_all(
    fault_runs: FaultRuns, tmp_path: Path, stage: int
) -> None:
    zero = f"engine.zero_stage={stage}"
    printed = poison(fault_runs, tmp_path / "rank 1", 1, "NaN", zero)
    assert "1 updates skipped" in printed and "on rank 1; samples" in printed
    one = read_state(tmp_path / "rank 1/run")
    skipped = [row["train/skipped_steps"] for row in one.journal if "train/loss" in row]
    # At steps 4, 5, 8, 10, 12, 15, 16, 20 and 24.
    assert skipped == [0] * 2 + [1] * 7
    assert one.progress["engine"]["guard"]["skipped"] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in one.tensors.values())
    assert differences(one, fault_runs.uninterrupted(zero)) != []
    for case, (rank, do) in NOT_FINITE.items() if stage == 1 else ():
        poison(fault_runs, tmp_path / case, rank, do, zero)
        other = read_state(tmp_path / case / "run")
        unequal = [line for line in differences(other, one) if line.startswith("tensor")]
        assert unequal == [] and other.progress["engine"] == one.progress["engine"], case


@slow
def test_counters_of_skipped_steps_survive_a_kill(fault_runs: FaultRuns, tmp_path: Path) -> None:
    bad = fault("forward", micro_step(BAD_STEP), "NaN")
    assert fault_runs.run(tmp_path / "whole", faults={1: [bad]}) == [0, 0]
    killed = {1: [bad, fault("backward", micro_step(13), "kill")]}
    wait_and_end_others(fault_runs.start(tmp_path / "killed", faults=killed))
    assert newest_step(tmp_path / "killed") >= INTERVAL
    # A resume from step 5 repeats the bad step; one from step 10 does not.
    again = {1: [fault("forward", micro_step(BAD_STEP, start=5), "NaN")]}
    if newest_step(tmp_path / "killed") > BAD_STEP:
        again = {}
    ours = fault_runs.finish(tmp_path / "killed", faults=again)
    assert differences(ours, read_state(tmp_path / "whole/run")) == []


@slow
def test_repeated_nan_stops_with_step_and_samples(fault_runs: FaultRuns, tmp_path: Path) -> None:
    planted = {1: [fault("forward", "every", "NaN")]}
    codes = fault_runs.run(tmp_path, faults=planted)
    assert codes == [76, 76]
    printed = output(tmp_path)
    assert "10 updates in a row were skipped, the last at step 10" in printed
    assert "samples of that step: '" in printed
