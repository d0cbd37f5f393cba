"""Format and destination of progress lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vitscale.tracking import console
from vitscale.tracking.console import Console, item_progress, plain_line


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock."""
    times = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: times[0])
    return times


def test_lines_go_to_output_and_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"loss": 1.23449, "lr": 1e-3, "images_per_s": 811.7, "data_wait": 0.031}
    line = plain_line(step=1, total_steps=2000, eta_s=90061.4, **values)
    for _ in range(2):  # a resume appends to the same log
        with Console(tmp_path, is_writer=True) as lines:
            lines.message(line)
        with Console(tmp_path, is_writer=False) as silent:
            silent.message("hello")
    log = (tmp_path / "logs/rank0.log").read_text()
    assert capsys.readouterr().out == log
    expected = "step 1/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 25:01:01"
    assert re.fullmatch(rf"(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {expected}\n){{2}}", log)


def test_progress_of_items_has_a_rate(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    with item_progress("verify", total=90, unit="tars") as advance:
        for now[0], num in ((1.0, 10), (10.0, 20), (11.0, 60)):
            advance(num)
    with item_progress("short", total=2) as advance:
        advance(2)
    assert capsys.readouterr().out.splitlines() == [
        "verify: 30 of 90, 3 tars/s, 20 s left",
        "verify: 90 of 90, 8 tars/s, 0 s left",
    ]
