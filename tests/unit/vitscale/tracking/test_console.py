"""Format and destination of the progress line."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from vitscale.tracking import console
from vitscale.tracking.console import (
    ElapsedProgress,
    ProgressLine,
    format_duration,
    item_progress,
    plain_line,
)


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


def test_without_a_terminal_lines_go_to_output_and_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start in (0, 10):  # a resume appends to the same log
        with ProgressLine.open(
            folder=tmp_path, total_steps=20, start_step=start, is_writer=True
        ) as progress:
            progress.message("reading 3 shards")
            progress.advance(start + 5)
            progress.update(start + 10, loss=1.0, lr=1e-3, images_per_s=5.0)
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
    with ProgressLine.open(folder=tmp_path, total_steps=110, is_writer=True) as progress:
        for step, time_s in ((1, 600.0), (5, 608.0), (10, 618.0)):
            now[0] = time_s
            progress.advance(step)
            if step != 5:
                progress.update(step, loss=1.0, lr=1e-3, images_per_s=5.0)
    alone, later = capsys.readouterr().out.splitlines()
    assert alone.endswith("eta 18:10:00") and later.endswith("eta 0:03:20")


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine.open(folder=tmp_path, total_steps=2, is_writer=False) as progress:
        progress.message("hello")
        progress.update(1, loss=1.0, lr=1e-3, images_per_s=5.0)
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminals_get_a_live_line_with_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with ProgressLine.open(
        folder=tmp_path, total_steps=20, title="vit", is_writer=True
    ) as progress:
        progress.message("reading 3 shards")
        progress.update(10, loss=1.25, lr=1e-3, images_per_s=5.0)
    with item_progress("verify", total=9, unit="tars") as advance:
        advance(4)
    monkeypatch.setattr(console, "SHORT_S", 0.0)
    elapsed = ElapsedProgress("find duplicates")
    elapsed.update("3 pairs")
    elapsed.close("4 pairs")
    shown = terminal.getvalue()
    for text in ("reading 3 shards", "10/20", "loss 1.2500", "verify", "4/9", "0 tars/s"):
        assert text in shown
    assert "find duplicates 4 pairs, 0 s" in shown
    log = (tmp_path / "logs/rank0.log").read_text().splitlines()
    assert log[0].endswith(" reading 3 shards") and " step 10/20 loss 1.2500" in log[1]
