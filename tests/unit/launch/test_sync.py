"""Which runs are copied into a store, and how a run is said to have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.comparison.sync import final_status, sync
from launch.jobs.attempts import Ending, Outcome, begin_attempt, end_attempt
from launch.jobs.states import read_state
from vitscale.config.errors import UserError, UserErrors
from vitscale.tracking.run_facts import RunRecord
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

SAID = {"PAUSED": "PAUSED", "FAILED": "FAILED", "RUNNING": "KILLED", None: "KILLED"}
# Of a run that said PAUSED, before a later attempt.
LATER = {Ending.STOPPED: "PAUSED", Ending.FAILED: "FAILED"}


def test_a_run_ended_as_it_says_or_as_its_last_attempt_shows(tmp_path: Path) -> None:
    def status(said: str | None) -> str:
        times = {} if said == "RUNNING" else {"ended": 10.0}
        record = RunRecord(tracking_id="x", name="a", status=said, **times)  # type: ignore[arg-type]
        return final_status(read_state(tmp_path, []), record if said else None)

    assert {said: status(said) for said in SAID} == SAID
    found = {}
    for ending in LATER:
        attempt = begin_attempt(tmp_path, cluster="local", job_id="1")
        end_attempt(attempt, tmp_path, Outcome(ending=ending, reason="", exit_code=1))
        found[ending] = status("PAUSED")
    assert found == LATER


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("stage: pretrain\nname: a\n")
    with Tracker(
        folder, settings=TrackingSettings(uri=None), name="a", stage="pretrain", tags={},
        resume_step=0, is_writer=True,
    ) as tracker:  # fmt: skip
        tracker.log({"train/loss": 1.0}, step=1)
    return folder


def test_what_is_no_run_is_refused_before_any_write(tmp_path: Path) -> None:
    good = run_folder(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.yaml").write_text("stage: pretrain\n")
    (run_folder(tmp_path / "odd") / "config.yaml").write_text("- 1\n")
    store = tmp_path / "store.db"
    names = [str(good), str(tmp_path / "bad"), str(tmp_path / "odd")]
    with pytest.raises(UserErrors) as caught:
        sync([*names, "--uri", f"sqlite:///{store}"])
    text = caught.value.text()
    assert "bad/journal.jsonl" in text and "odd/config.yaml" in text
    assert not store.exists()


@pytest.mark.slow
def test_a_failing_server_gives_one_message(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(UserError, match="(?s)did not take .*same command again"):
        sync([str(folder), "--uri", "http://127.0.0.1:1"])
    assert {path.name for path in folder.iterdir()} == before
