"""Format and destination of progress lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vitscale.tracking import console
from vitscale.tracking.console import Console, format_duration, item_progress, plain_line


def test_plain_line_keeps_its_format() -> None:
    line = plain_line(
        step=120,
        total_steps=2000,
        loss=1.23449,
        lr=1e-3,
        images_per_s=811.7,
        data_wait=0.031,
        eta_s=80.4,
    )
    assert line == "step 120/2000 loss 1.2345 lr 1.0e-03 img/s 812 wait 3% eta 0:01:20"
    assert format_duration(90061) == "25:01:01"


def test_lines_go_to_output_and_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start in (0, 10):  # a resume appends to the same log
        with Console(tmp_path, total_steps=20, start_step=start, is_writer=True) as lines:
            lines.message("reading 3 shards")
            lines.update(start + 10, loss=1.0, lr=1e-3, images_per_s=5.0)
    with Console(tmp_path, total_steps=20, is_writer=False) as silent:
        silent.message("hello")
    log = (tmp_path / "logs/rank0.log").read_text()
    assert capsys.readouterr().out == log
    clock = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert re.findall(clock + r"step (\d+)/20 loss", log, re.M) == ["10", "20"]
    assert len(re.findall(clock + "reading 3 shards$", log, re.M)) == 2


def test_the_first_step_does_not_count_for_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles, and may take as long as hundreds of others."""
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with Console(tmp_path, total_steps=110, is_writer=True) as lines:
        now[0] = 600.0
        lines.end_warm_up(1)
        lines.update(1, loss=1.0, lr=1e-3, images_per_s=5.0)
        now[0] = 618.0
        lines.update(10, loss=1.0, lr=1e-3, images_per_s=5.0)
    alone, later = capsys.readouterr().out.splitlines()
    assert alone.endswith("eta 18:10:00") and later.endswith("eta 0:03:20")


def test_progress_of_items_has_a_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with item_progress("verify", total=90, unit="tars") as advance:
        for now[0], num in ((1.0, 10), (10.0, 20), (11.0, 60)):
            advance(num)
    assert capsys.readouterr().out.splitlines() == [
        "verify: 30 of 90, 2 tars/s, 30 s left",
        "verify: 90 of 90, 7 tars/s, 0 s left",
    ]
    with item_progress("short", total=2) as advance:
        advance(2)
    assert capsys.readouterr().out == ""
