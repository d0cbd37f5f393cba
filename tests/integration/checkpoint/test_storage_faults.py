"""Damaged, missing, full and read-only storage during a real training run.

As in test_faults: one fault, then the same command again; the outcome must equal that of the
uninterrupted run bit by bit.
Left out: every system call of a save, and power loss (test_checkpoint_faults).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import mounted
from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.levels import by_level
from tests.support.ranks.fault_runs import (
    FaultRuns,
    copy_run,
    fault,
    micro_step,
    newest_step,
    output,
    release_hold,
    wait_all,
    wait_and_end_others,
    wait_for_hold,
)
from tests.support.ranks.run_states import differences, journal_rows, read_state
from tests.support.waiting import wait_until

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow
exhaustive = pytest.mark.exhaustive
NEWEST, OLDER = "step-00000015", "step-00000010"


def overwrite(path: Path, *, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(data)


def _cut_tensors(checkpoints: Path) -> None:
    path = checkpoints / NEWEST / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _flip_bit(checkpoints: Path) -> None:
    path = checkpoints / NEWEST / "rank-00000.safetensors"
    last = path.read_bytes()[-1]
    overwrite(path, at=-1, data=bytes([last ^ 1]))


def _mix_steps(checkpoints: Path) -> None:
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        shutil.copy(checkpoints / OLDER / name, checkpoints / NEWEST / name)


def _empty(checkpoints: Path) -> None:
    for path in (checkpoints / NEWEST).iterdir():
        path.unlink()


# Damage to the newest checkpoint (step 15); the previous one is of step 10.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "tensor file cut in half": _cut_tensors,
    "one bit of a tensor file": _flip_bit,
    "tensor file missing": lambda c: (c / NEWEST / "rank-00001.safetensors").unlink(),
    "manifest missing": lambda c: (c / NEWEST / "manifest.json").unlink(),
    "manifest cut": lambda c: os.truncate(c / NEWEST / "manifest.json", 300),
    "manifest of another step": lambda c: shutil.copy(
        c / OLDER / "manifest.json", c / NEWEST / "manifest.json"
    ),
    "tensors of another step": _mix_steps,
    "empty folder": _empty,
}


@pytest.mark.parametrize(
    "case",
    by_level(DAMAGES, fast={"one bit of a tensor file"}, slow={"tensors of another step"}),
)
def test_damaged_checkpoint_is_skipped_with_a_message(
    fault_runs: FaultRuns, killed_copy: Path, case: str
) -> None:
    DAMAGES[case](killed_copy / "run/checkpoints")
    said = fault_runs.assert_resumes_exactly(killed_copy)
    assert "skipping damaged checkpoint" in said and NEWEST in said
    assert "at step 10\n" in said


@slow
def test_unavailable_storage_at_a_restart_loses_nothing(
    fault_runs: FaultRuns, killed_copy: Path
) -> None:
    """The tensors of both checkpoints: the run is refused and changes nothing until they return."""
    names = [f"{step}/rank-00000.safetensors" for step in (NEWEST, OLDER)]
    checkpoints, away = killed_copy / "run/checkpoints", killed_copy / "away"
    for name in names:
        (away / name).parent.mkdir(parents=True)
        (checkpoints / name).rename(away / name)
    rows = journal_rows(killed_copy / "run")
    assert fault_runs.run(killed_copy) == [2, 2]
    said = output(killed_copy)
    assert "holds checkpoints, but none that can be read" in said and "Traceback" not in said
    assert all(step in said for step in (NEWEST, OLDER))
    assert journal_rows(killed_copy / "run") == rows
    for name in names:
        (away / name).rename(checkpoints / name)
    assert "at step 15\n" in fault_runs.assert_resumes_exactly(killed_copy)


@slow
def test_clocks_and_leftovers_have_no_effect(fault_runs: FaultRuns, killed_copy: Path) -> None:
    checkpoints = killed_copy / "run/checkpoints"
    os.utime(checkpoints / OLDER, (2**31, 2**31))
    os.utime(checkpoints / NEWEST, (1, 1))
    (checkpoints / ".step-00000020.0123abcd-4.tmp").mkdir()
    (checkpoints / ".step-00000020.0123abcd-4.tmp/rank-00000.safetensors").write_bytes(b"half")
    (checkpoints / "step-99999999.tmp").mkdir()
    (checkpoints / "latest").write_text("step-00000010")
    with open(killed_copy / "run/journal.jsonl", "a") as file:
        file.write('{"step": 16, "time": 1.0, "train/lo')
    said = fault_runs.assert_resumes_exactly(killed_copy)
    assert "at step 15\n" in said and "damaged" not in said


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass  # full
    return path


@pytest.mark.parametrize("fault_name", by_level(["full", "read-only"], slow={"full"}))
def test_failed_checkpoint_storage_ends_the_run(
    fault_runs: FaultRuns, tmp_path: Path, fault_name: str
) -> None:
    checkpoints = tmp_path / "run/checkpoints"
    with mounted(checkpoints, "tmpfs", "-t", "tmpfs", "-o", "size=8m"):
        ranks = fault_runs.start(tmp_path, faults={1: [fault("backward", micro_step(8), "hold")]})
        wait_for_hold(tmp_path, ranks)
        # Its commit goes on in the background while the rank is held.
        wait_until(lambda: newest_step(tmp_path) == 5, else_say=ranks[0].output)
        filler = fill(checkpoints) if fault_name == "full" else None
        if filler is None:
            remount(checkpoints, "ro")
        release_hold(tmp_path)
        assert wait_all(ranks) == [74, 74]
        assert ranks[0].output().count("warning: ") == 2, "of three saves that fail"
        assert "checkpoint cannot be written" in ranks[0].output()
        assert "Traceback" not in ranks[0].output()
        assert newest_step(tmp_path) == 5
        if filler is None:
            remount(checkpoints, "rw")
        else:
            filler.unlink()
        fault_runs.assert_resumes_exactly(tmp_path)


@exhaustive
def test_full_disk_of_the_run_folder_ends_the_run(fault_runs: FaultRuns, tmp_path: Path) -> None:
    """Journal and log cannot be written either."""
    with mounted(tmp_path / "run", "tmpfs", "-t", "tmpfs", "-o", "size=8m"):
        ranks = fault_runs.start(tmp_path, faults={1: [fault("backward", micro_step(8), "hold")]})
        wait_for_hold(tmp_path, ranks)
        filler = fill(tmp_path / "run")
        release_hold(tmp_path)
        codes = wait_and_end_others(ranks, grace_s=30)
        assert codes[0] > 0 and codes[1] != 0
        assert "No space left on device" in ranks[0].output()
        assert newest_step(tmp_path) == 5
        filler.unlink()
        fault_runs.assert_resumes_exactly(tmp_path)


@pytest.mark.parametrize("rank", by_level([0, 1], slow=[1]))
def test_training_goes_on_after_a_save_that_fails_on_one_rank(
    fault_runs: FaultRuns, tmp_path: Path, rank: int
) -> None:
    """After four attempts; in the save before it, the third one succeeds."""
    # Two files of rank 0 in every save, one of rank 1.
    second = {0: 5, 1: 4}[rank]
    calls = [1, 2, *range(second, second + 4)]
    faults = {rank: [fault("write", call, "EIO") for call in calls]}
    assert fault_runs.run(tmp_path, "checkpoint.keep=9", faults=faults) == [0, 0]
    said = "checkpoint cannot be written (Input/output error); training goes on"
    assert output(tmp_path).count(said) == 1
    saved = {path.name[-2:] for path in tmp_path.glob("run/checkpoints/step-*")}
    assert saved == {"05", "15", "20", "24"}
    fault_runs.assert_resumes_exactly(tmp_path)


@pytest.mark.parametrize("case", by_level(["cut", "missing"], slow={"cut"}))
def test_shard_lost_before_a_restart_is_refused(
    fault_runs: FaultRuns, tmp_path: Path, case: str
) -> None:
    shards = shutil.copytree(fault_runs.shards, tmp_path / "shards")
    ranks = fault_runs.start(
        tmp_path, faults={1: [fault("backward", micro_step(8), "kill")]}, shards=shards
    )
    wait_and_end_others(ranks)
    rows = journal_rows(tmp_path / "run")
    lost = shards / "train-000001.tar"
    whole = lost.read_bytes()
    if case == "cut":
        os.truncate(lost, len(whole) // 2)
    else:
        lost.unlink()
    assert fault_runs.run(tmp_path, shards=shards) == [2, 2]
    assert lost.name in output(tmp_path)
    assert journal_rows(tmp_path / "run") == rows
    lost.write_bytes(whole)
    ours = fault_runs.finish(tmp_path, shards=shards)
    assert differences(ours, fault_runs.uninterrupted()) == []


@pytest.mark.parametrize("num_shards", by_level([1, 4], slow=[1]))
def test_overwritten_shard_is_named(fault_runs: FaultRuns, tmp_path: Path, num_shards: int) -> None:
    """One: unreadable samples are replaced until there are too many. All: none is readable."""
    shards = shutil.copytree(fault_runs.shards, tmp_path / "shards")
    planted = {0: [fault("batch", micro_step(7), "hold")]}
    settings = ["data.max_unreadable_fraction=0"]
    ranks = fault_runs.start(tmp_path, *settings, faults=planted, shards=shards)
    wait_for_hold(tmp_path, ranks)
    damaged = sorted(shards.glob("train-*.tar"))[:num_shards]
    for path in damaged:
        overwrite(path, at=0, data=b"\xff" * path.stat().st_size)
    release_hold(tmp_path)
    codes = wait_and_end_others(ranks, grace_s=30)
    assert (2 if num_shards == 1 else 1) in codes and 0 not in codes
    assert any(path.name in output(tmp_path) for path in damaged)
    assert newest_step(tmp_path) == 5
    for path in damaged:
        shutil.copy(fault_runs.shards / path.name, path)
    ours = fault_runs.finish(tmp_path, *settings, shards=shards)
    assert differences(ours, fault_runs.uninterrupted()) == []


@slow
def test_fewer_samples_than_ranks_resume_exactly(fault_runs: FaultRuns, tmp_path: Path) -> None:
    """One sample is repeated: fewer shards and samples than ranks and workers."""
    shards = write_shard_folder(
        tmp_path / "shards", num_per_class=1, num_shards=1, classes=("cat",)
    )
    settings = ["data.val_split=null", "evaluate=[{name: classification}]", "data.num_workers=2"]
    whole = fault_runs.finish(tmp_path / "whole", *settings, shards=shards)
    ranks = fault_runs.start(
        tmp_path / "killed",
        *settings,
        faults={1: [fault("backward", micro_step(13), "kill")]},
        shards=shards,
    )
    wait_and_end_others(ranks)
    ours = fault_runs.finish(tmp_path / "killed", *settings, shards=shards)
    assert differences(ours, whole) == []


@exhaustive
def test_second_job_in_the_folder_is_refused(fault_runs: FaultRuns, tmp_path: Path) -> None:
    ranks = fault_runs.start(tmp_path, faults={0: [fault("backward", micro_step(8), "hold")]})
    wait_for_hold(tmp_path, ranks)
    assert fault_runs.run(tmp_path) == [2, 2]
    assert "another job is training in this run folder" in output(tmp_path)
    release_hold(tmp_path)
    assert wait_all(ranks) == [0, 0]
    assert differences(read_state(tmp_path / "run"), fault_runs.uninterrupted()) == []


@pytest.mark.parametrize(
    "num_ranks, stage", by_level([(1, 0), (1, 1), (4, 2), (2, 3)], slow=[(1, 1), (4, 2)])
)
def test_killed_run_resumes_on_another_layout(
    fault_runs: FaultRuns, tmp_path: Path, num_ranks: int, stage: int
) -> None:
    """Without dropout, which is drawn per rank: losses within 1e-5, the same samples."""
    still = ["model.dropout=0", "model.drop_path=0"]
    whole = fault_runs.uninterrupted(*still)
    template = fault_runs.folder / "killed without dropout"
    if not template.exists():
        planted = {1: [fault("backward", micro_step(17), "lag and kill")]}
        wait_and_end_others(fault_runs.start(template, *still, faults=planted))
    place = copy_run(template, tmp_path)
    layout = f"engine.zero_stage={stage}"
    ours = fault_runs.finish(place, *still, layout, num_ranks=num_ranks)
    assert "at step 15\n" in output(place)
    key = "train/loss"
    found, wanted = ([row[key] for row in each.journal if key in row] for each in (ours, whole))
    assert len(found) == 6 and found == pytest.approx(wanted, rel=1e-5)


@slow
def test_unavailable_tracking_server_changes_nothing(fault_runs: FaultRuns, tmp_path: Path) -> None:
    gone = "tracking.uri=http://127.0.0.1:9"
    planted = {1: [fault("backward", micro_step(13), "kill")]}
    wait_and_end_others(fault_runs.start(tmp_path, gone, faults=planted))
    ours = fault_runs.finish(tmp_path, gone)
    assert differences(ours, fault_runs.uninterrupted()) == []
    assert "MLflow" in output(tmp_path)
