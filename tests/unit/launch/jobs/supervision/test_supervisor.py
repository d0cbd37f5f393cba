"""What the supervisor refuses to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.attempts import Ending
from launch.jobs.supervision import supervisor


def test_a_job_without_its_pickle_is_not_started_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch had accepted it when its submission was killed."""
    monkeypatch.setattr(supervisor, "PICKLE_S", 0.0)
    monkeypatch.setattr(supervisor, "PICKLE_PAUSE_S", 0.0)
    found = supervisor._cut_off(tmp_path, "17")
    assert found is not None and (found.ending, found.exit_code) == (Ending.BAD_INPUT, 2)
    (tmp_path / "17_submitted.pkl").touch()
    assert supervisor._cut_off(tmp_path, "17") is None
