"""Trainings that are signalled, lose a rank or meet NaN stop or go on as they should, and say why.

Left out: ranks that are killed, and what a resume must equal (test_resume).
"""

import os
import signal
import socket
import subprocess
import sys

import pytest
import yaml

from tests.support.levels import by_level
from tests.support.ranks.fault_runs import (
    LOGGED,
    fault,
    micro_step,
    newest_step,
    output,
    wait_all,
    wait_and_end_others,
)
from tests.support.ranks.run_states import differences, read_state
from tests.support.tables import every
from tests.support.waiting import PATIENCE_S
from vitscale.distributed.processes import free_port

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow
HERE = socket.gethostname()


# A save after a signal ends a log interval, which an uninterrupted training may not end there.
EVERY_STEP = "tracking.log_every_steps=1"
# Place, number of the call and signal by rank; exit codes; the committed step: the one after the
# signal's, since ranks agree in the background.
SIGNALS = yaml.safe_load("""
bursts on both ranks: [{0: &burst [batch, 13, burst], 1: *burst}, [75, 75], 8]
on one rank only: [{1: [backward, 15, SIGTERM]}, [75, 75], 9]
in a save: [{0: [write, 3, SIGUSR2]}, [75, 75], 11]
# Too late to stop anything: the run is finished.
in the last step: [{1: [backward, 47, burst]}, [0, 0], 24]
# Before a handler is installed, SIGTERM ends the process.
before training: [{1: [start, 1, SIGTERM]}, [-9, -15], 0]
""")


@every(
    case=by_level(
        SIGNALS,
        fast=["bursts on both ranks"],
        slow=SIGNALS.keys() - {"bursts on both ranks"},
    )
)
def test_stop_signals(fault_runs, tmp_path, case):
    faults, codes, step = SIGNALS[case]
    planted = {rank: [fault(*where)] for rank, where in faults.items()}
    # Ranks stop together; before they have met, the launcher must end the other one.
    grace_s = 30
    if case == "before training":
        grace_s = 0
    settings = ()
    if step % LOGGED:
        settings = (EVERY_STEP,)
    world = fault_runs.start(tmp_path, *settings, faults=planted)
    assert wait_and_end_others(world, grace_s=grace_s) == codes, output(tmp_path)

    # A signal during a save takes effect one or two steps later.
    latest = step
    if case == "in a save":
        latest += 2
    assert step <= newest_step(tmp_path) <= latest
    fault_runs.assert_resumes_exactly(tmp_path, *settings)


@slow
def test_loader_workers(fault_runs, tmp_path):
    """A killed one is named; all ignore the signals of a launcher."""
    planted = {1: [fault("batch", micro_step(7), "kill worker")]}
    world = fault_runs.start(tmp_path, faults=planted)
    assert wait_and_end_others(world, grace_s=10)[1] > 0
    assert "a loader worker died" in world[1].output()
    fault_runs.assert_resumes_exactly(tmp_path)

    # SLURM sends a stop to all processes: the rank decides when its workers are to end.
    signalled = [fault("batch", micro_step(7), "SIGTERM worker")]
    planted = {0: signalled, 1: signalled}
    assert fault_runs.run(tmp_path / "signals", faults=planted) == [0, 0]


# rank, fault, its exit code if it is certain. No launcher ends the other one.
LOST = yaml.safe_load("""
rank 1 stopped: [1, stop, -9]
rank 0 stopped: [0, stop, -9]
rank 1 hangs: [1, hang, null]
rank 1 killed: [1, kill, -9]
rank 0 crashes: [0, crash, -11]
# An exit code of 0 in the middle of training.
rank 0 leaves: [0, leave, 0]
""")


@every(
    case=by_level(LOST, fast=["rank 1 stopped"], slow=LOST.keys() - {"rank 1 stopped"})
)
def test_surviving_rank_ends_and_names_the_other(fault_runs, tmp_path, case):
    rank, do, code = LOST[case]
    place = "forward"
    reason = "sent no heartbeat"
    # Its heartbeats go on, so only the wait of the others shows it.
    if do == "hang":
        place = "batch"
        reason = "kept the others waiting"
    planted = {rank: [fault(place, micro_step(8), do)]}
    world = fault_runs.start(tmp_path, "engine.timeout_min=0.15", faults=planted)
    survivor = world[1 - rank]
    assert survivor.wait(timeout_s=PATIENCE_S) > 0
    assert f"rank {rank} on {HERE} has {reason}" in survivor.output()
    world[rank].send_signal(signal.SIGKILL)
    ended_with = wait_all(world)[rank]
    assert code is None or ended_with == code
    fault_runs.assert_resumes_exactly(tmp_path)


@slow
def test_updates_with_nan_are_skipped_and_named(fault_runs, tmp_path):
    planted = {1: [fault("forward", micro_step(8, number=1), "NaN")]}
    assert fault_runs.run(tmp_path, faults=planted) == [0, 0], output(tmp_path)
    text = output(tmp_path)
    assert "1 updates skipped" in text
    # With the samples somebody can look for the image that causes it.
    assert "on rank 1; samples '" in text
    state = read_state(tmp_path / "run")
    trained = [row for row in state.journal if "train/loss" in row]

    # At steps 4, 5, 8, 10, 12, 15, 16, 20 and 24.
    skipped = [row["train/skipped_steps"] for row in trained]
    assert skipped == [0] * 2 + [1] * 7
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())

    # A training that never recovers ends, instead of skipping updates for days.
    planted = {1: [fault("forward", "every", "NaN")]}
    assert fault_runs.run(tmp_path / "all", faults=planted) == [76, 76]
    text = output(tmp_path / "all")
    assert "10 updates in a row were skipped, the last at step 10" in text
    assert "samples of that step: '" in text


# Rank 0 of two joins, and waits for a second instead of minutes.
JOIN = """
from vitscale.distributed import processes, world
world.INIT_TIMEOUT_MIN = 0.02
def join():
    world.process_group(device='cpu', timeout_min=1, num_threads=1).__enter__()
processes.run_rank_script(join)
"""


def test_a_rank_that_never_starts_is_named(tmp_path):
    variables = yaml.safe_load("""
    RANK: "0"
    LOCAL_RANK: "0"
    WORLD_SIZE: "2"
    LOCAL_WORLD_SIZE: "2"
    MASTER_ADDR: 127.0.0.1
    """)
    variables["MASTER_PORT"] = str(free_port())
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "not all of 2 ranks started within 0.02 min; missing: 1" in done.stderr


ALL = "tensors: ema, exp_avg, exp_avg_sq, model"
# Parts of the state that a resume drops, or keys that ignore the position: what must differ.
# Without this the comparison of all tests here could be one that sees nothing.
DROPPED = {
    "weights": ALL,
    "second moments": ALL,
    "average of the weights": "tensors: ema",
    "step count of the optimiser": "progress optimizer_steps",
    "data position": ALL,
    "dropout and drop path key": ALL,
}


@slow
@every(mutant=DROPPED)
def test_dropped_state_is_noticed(fault_runs, killed_copy, mutant):
    ranks = fault_runs.start(killed_copy, mutant=mutant)
    assert wait_all(ranks) == [0, 0], ranks[0].output()
    ours = read_state(killed_copy / "run")
    lines = differences(ours, fault_runs.uninterrupted())
    assert any(DROPPED[mutant] in line for line in lines), lines
