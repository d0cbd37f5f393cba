"""Format and destination of progress lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vitscale.tracking import console
from vitscale.tracking.console import Console, format_duration, item_progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock."""
    times = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: times[0])
    return times


def test_lines_go_to_output_and_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: list[float]
) -> None:
    """The end is estimated without the first step, which compiles."""
    values = {"loss": 1.23449, "lr": 1e-3, "images_per_s": 811.7, "data_wait": 0.031}
    for start in (0, 1000):  # a resume appends to the same log
        now[0] = 0.0
        with Console(tmp_path, total_steps=2000, start_step=start, is_writer=True) as lines:
            lines.message("reading 3 shards")
            now[0] = 600.0
            lines.end_warm_up(start + 1)
            lines.update(start + 1, **values)
            now[0] = 618.0
            lines.update(start + 10, **values)
    with Console(tmp_path, total_steps=20, is_writer=False) as silent:
        silent.message("hello")
    log = (tmp_path / "logs/rank0.log").read_text()
    assert capsys.readouterr().out == log
    assert re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", log, flags=re.M).splitlines() == [
        "reading 3 shards",
        "step 1/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 333:10:00",
        "step 10/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 1:06:20",
        "reading 3 shards",
        "step 1001/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 166:30:00",
        "step 1010/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 0:33:00",
    ]
    assert format_duration(90061) == "25:01:01"


def test_progress_of_items_has_a_rate(capsys: pytest.CaptureFixture[str], now: list[float]) -> None:
    with item_progress("verify", total=90, unit="tars") as advance:
        for now[0], num in ((1.0, 10), (10.0, 20), (11.0, 60)):
            advance(num)
    with item_progress("short", total=2) as advance:
        advance(2)
    assert capsys.readouterr().out.splitlines() == [
        "verify: 30 of 90, 2 tars/s, 30 s left",
        "verify: 90 of 90, 7 tars/s, 0 s left",
    ]
