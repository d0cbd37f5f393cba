"""launch/replay.py on real runs of two ranks, as they are and with one flipped bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks.fault_runs import FaultRuns, fault
from tests.support.ranks.rank_processes import ROOT
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SETTINGS = ("schedule.steps=12", "checkpoint.every_steps=4", "tracking.log_every_steps=3")
# Of step 12, after those of steps 4 and 8.
LAST_SAVE = 3


def replay(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch/replay.py"), str(run), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=run.parent, timeout=PATIENCE_S
    )


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(each): (each.stat().st_mtime_ns, each.read_bytes()) for each in files}


@pytest.fixture(scope="module")
def good(fault_runs: FaultRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    fault_runs.finish(folder, *SETTINGS)
    return folder / "run"


@pytest.fixture(scope="module")
def flipped(fault_runs: FaultRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One bit of a moment of rank 1 is flipped before the save of step 12."""
    folder = tmp_path_factory.mktemp("flipped")
    fault_runs.finish(folder, *SETTINGS, faults={1: [fault("export", LAST_SAVE, "flip moment")]})
    return folder / "run"


def test_replay_of_a_sound_run_is_equal_and_leaves_it_alone(good: Path) -> None:
    before = contents(good)
    done = replay(good)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == (
        f"equal: steps 8 to 12 of {good} on 2 rank(s); compared: journal, checkpoint of step 12"
    )
    assert contents(good) == before
    assert not list(good.parent.glob("run-replay-*"))


def test_replay_names_step_rank_and_tensor_of_a_flipped_bit(flipped: Path) -> None:
    done = replay(flipped, "--twice")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    start = lines.index("  step 12: 1 tensor(s) differ, saved by rank(s) 1")
    assert lines[start + 1].startswith("  step 12: rank 1: exp_avg.")
    assert ", element " in lines[start + 1] and "(1 of " in lines[start + 1]
    assert not any("journal" in line for line in lines[start:])
    assert lines[-1].startswith("two replays are equal: the run itself was wrong")


def test_without_a_checkpoint_the_journal_alone_is_compared(flipped: Path) -> None:
    """The flip of step 12 is after it."""
    output = flipped.parent / "kept"
    done = replay(flipped, "--from-step", "8", "--to-step", "10", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compared: journal; the checkpoint of step 10 is not kept" in done.stdout
    assert (output / "checkpoints/step-00000010/manifest.json").is_file()


def test_bad_arguments_say_what_is_allowed(good: Path) -> None:
    other = good.parent / "other.yaml"
    other.write_text((good / "config.yaml").read_text().replace("  lr: 0.001\n", "  lr: 0.002\n"))
    for arguments, expected in (
        (("--from-step", "5"), ("no checkpoint of step 5", "0 (the start), 8, 12")),
        (("--from-step", "8", "--to-step", "8"), ("8 is not after step 8",)),
        (("--to-step", "40", "--from-step", "12"), ("neither a checkpoint of step 40",)),
        (("--config", str(other)), ("optim.lr: 0.001 -> 0.002", "--config")),
        (("--output", str(good)), ("cannot create the folder of the replay",)),
        (("--slurm", "--output", str(good.parent / "s")), ("1 tasks, but these steps", "on 2")),
    ):
        done = replay(good, *arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert all(text in done.stderr for text in expected), (arguments, done.stderr)
    missing = replay(good.parent / "none")
    assert missing.returncode == 2 and "no such run folder" in missing.stderr
