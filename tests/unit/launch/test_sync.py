"""Which runs are copied into a store, and how a run is said to have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.comparison.runs import DEFAULT_URI, default_uri
from launch.comparison.sync import _ending, sync
from launch.jobs.attempts import Ending, Outcome, begin_attempt, end_attempt
from launch.jobs.states import read_state
from vitscale.config.errors import UserError, UserErrors
from vitscale.tracking.run_facts import RunRecord
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker


def record(**changes: Any) -> RunRecord:
    return RunRecord(**({"name": "a", "experiment": "b", "tags": {}} | changes))


def ending_of(folder: Path, found: RunRecord | None) -> str:
    return _ending(read_state(folder, []), found)[0]


@pytest.mark.parametrize(
    ("status", "expected"), [("PAUSED", "PAUSED"), ("FAILED", "FAILED"), ("RUNNING", "KILLED")]
)
def test_a_run_ended_as_it_says(tmp_path: Path, status: str, expected: str) -> None:
    """One that still says that it runs was killed."""
    ended = None if status == "RUNNING" else 10.0
    assert ending_of(tmp_path, record(status=status, ended=ended)) == expected


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (Ending.STOPPED, "PAUSED"),
        (Ending.FAILED, "FAILED"),
        (Ending.KILLED, "KILLED"),
        (Ending.DONE, "FINISHED"),
        (None, "KILLED"),
    ],
)
def test_a_later_attempt_says_more(tmp_path: Path, ending: Ending | None, expected: str) -> None:
    attempt = begin_attempt(tmp_path, cluster="local", job_id="1")
    if ending is not None:
        end_attempt(attempt, tmp_path, Outcome(ending=ending, reason="", exit_code=1))
    assert ending_of(tmp_path, record(status="PAUSED", ended=10.0)) == expected
    assert ending_of(tmp_path, None) == expected


def run_folder(folder: Path) -> Path:
    with Tracker(
        folder, settings=TrackingSettings(uri=None), name="a", stage="pretrain", tags={},
        resume_step=0, is_writer=True,
    ) as tracker:  # fmt: skip
        tracker.log({"train/loss": 1.0}, step=1)
    (folder / "config.yaml").write_text("stage: pretrain\nname: a\n")
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
    with pytest.raises(UserError, match="not a tracking URI"):
        sync([str(good), "--uri", "nonsense"])


@pytest.mark.slow
def test_a_failing_server_gives_one_message(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(UserError, match="(?s)did not take .*same command again"):
        sync([str(folder), "--uri", "http://127.0.0.1:1"])
    assert {path.name for path in folder.iterdir()} == before


def test_the_site_file_names_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site.yaml"
    monkeypatch.setenv("VITSCALE_SITE", str(site))
    site.write_text("tracking: {uri: http://mlflow:5000}")
    assert default_uri() == "http://mlflow:5000"
    site.write_text("launch: {partition: gpu}")
    assert default_uri() == DEFAULT_URI
    site.write_text("tracking: 3")
    with pytest.raises(UserErrors, match="tracking is a whole number"):
        default_uri()
