"""Damaged, missing, full and read-only storage during a real training run.

As in test_resume: one fault, then the same command again; the outcome must equal that of the
uninterrupted run bit by bit.
Left out: every system call of a save, and power loss (test_checkpoint_faults).
"""

import subprocess
from pathlib import Path

import pytest

from tests.conftest import mounted
from tests.support.levels import by_level
from tests.support.light_checkpoints import flip
from tests.support.ranks.fault_runs import (
    fault,
    micro_step,
    newest_step,
    output,
    release_hold,
    wait_all,
    wait_and_end_others,
    wait_for_hold,
)
from tests.support.ranks.run_states import differences, journal_rows
from tests.support.tables import every
from tests.support.waiting import wait_until

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow
exhaustive = pytest.mark.exhaustive
# Of the training that was killed in step 17; the older one is the best by its evaluation.
NEWEST = "step-00000015"
OLDER = "step-00000012"


@slow
def test_damaged_checkpoint_is_skipped_with_a_message(fault_runs, killed_copy):
    # One bit of the last value: the file has its size, and can be read.
    path = killed_copy / f"run/checkpoints/{NEWEST}/rank-00000.safetensors"
    flip(path, -1)
    text = fault_runs.assert_resumes_exactly(killed_copy)
    assert "skipping damaged checkpoint" in text
    assert NEWEST in text
    assert "at step 12\n" in text


@slow
def test_unavailable_storage_at_a_restart_loses_nothing(fault_runs, killed_copy):
    """The tensors of both checkpoints: the run is refused and changes nothing until they return."""
    run = killed_copy / "run"
    checkpoints = run / "checkpoints"
    away = killed_copy / "away"
    names = [f"{step}/rank-00000.safetensors" for step in (NEWEST, OLDER)]
    for name in names:
        (away / name).parent.mkdir(parents=True)
        (checkpoints / name).rename(away / name)
    rows = journal_rows(run)
    assert fault_runs.run(killed_copy) == [2, 2]
    text = output(killed_copy)
    # A training from the first step on would be worse than none.
    assert "holds checkpoints, but none that can be read" in text
    assert "Traceback" not in text
    assert NEWEST in text
    assert OLDER in text
    assert journal_rows(run) == rows
    for name in names:
        (away / name).rename(checkpoints / name)
    assert "at step 15\n" in fault_runs.assert_resumes_exactly(killed_copy)


def remount(folder: Path, mode: str):
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


@slow
def test_failed_checkpoint_storage_ends_the_run(fault_runs, tmp_path):
    checkpoints = tmp_path / "run/checkpoints"
    held = {1: [fault("backward", micro_step(8), "hold")]}
    with mounted(checkpoints, "tmpfs", "-t", "tmpfs", "-o", "size=8m"):
        ranks = fault_runs.start(tmp_path, faults=held)
        wait_for_hold(tmp_path, ranks)

        # Its commit goes on in the background while the rank is held.
        wait_until(lambda: newest_step(tmp_path) == 5, else_say=ranks[0].output)
        remount(checkpoints, "ro")
        release_hold(tmp_path)
        assert wait_all(ranks) == [74, 74]
        text = ranks[0].output()
        assert text.count("warning: ") == 4, "the last of five saves ends it"
        assert "checkpoint cannot be written" in text
        assert "Traceback" not in text
        assert newest_step(tmp_path) == 5
        # What it had trained since is trained again.
        remount(checkpoints, "rw")
        fault_runs.assert_resumes_exactly(tmp_path)


@every(rank=by_level([0, 1], slow=[1]))
def test_training_goes_on_after_a_save_that_fails_on_one_rank(
    fault_runs, tmp_path, rank
):
    """After four attempts; in the save before it, the third one succeeds."""
    # Two files of rank 0 in every save, one of rank 1.
    second = {0: 5, 1: 4}[rank]
    calls = [1, 2, *range(second, second + 4)]
    faults = {rank: [fault("write", call, "EIO") for call in calls]}
    assert fault_runs.run(tmp_path, "checkpoint.keep=9", faults=faults) == [0, 0]
    warning = "checkpoint cannot be written (Input/output error); training goes on"
    assert output(tmp_path).count(warning) == 1
    # Without step 10: no rank may take its own file for a checkpoint.
    saved = {path.name[-2:] for path in tmp_path.glob("run/checkpoints/step-*")}
    assert saved == {"05", "12", "15", "20", "24"}
    fault_runs.assert_resumes_exactly(tmp_path)


@slow
def test_the_journal_is_flushed_for_every_checkpoint(fault_runs, tmp_path):
    """Where that fails the step is saved all the same, with a warning."""
    faults = {0: [fault("flush", "every", "EIO")]}
    keep_all = "checkpoint.keep=9"
    assert fault_runs.run(tmp_path, keep_all, faults=faults, num_ranks=1) == [0]
    warning = "not flushed before a commit (Input/output error)"
    # Every fifth step, the evaluation of step 12, and the last one.
    assert output(tmp_path).count(warning) == len([5, 10, 12, 15, 20, 24])
    assert newest_step(tmp_path) == 24


@slow
def test_unavailable_tracking_server_changes_nothing(fault_runs, tmp_path):
    # Nobody listens on this port.
    gone = "tracking.uri=http://127.0.0.1:9"
    planted = {1: [fault("backward", micro_step(13), "kill")]}
    wait_and_end_others(fault_runs.start(tmp_path, gone, faults=planted))
    ours = fault_runs.finish(tmp_path, gone)
    assert differences(ours, fault_runs.uninterrupted()) == []
    assert "MLflow" in output(tmp_path)
