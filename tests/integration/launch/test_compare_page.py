"""The comparison page in a real browser: charts drawn, hostile names shown as text."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launch.comparison.differences import compare
from launch.comparison.page import render
from launch.comparison.runs import ComparedRun
from tests.support.waiting import PATIENCE_S
from vitscale.tracking.journal import Row

EVIL = "<img src=x onerror=document.title='evil'></script><script>document.title='evil'</script>"


@pytest.mark.slow
def test_a_browser_draws_the_charts_and_shows_hostile_names_as_text(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        if os.environ.get("VITSCALE_REQUIRE_ALL") == "1":
            pytest.fail("no chromium on this machine")
        pytest.skip("no chromium on this machine")
    runs = []
    for number, label in enumerate(("slow", EVIL)):
        rows = [
            Row(
                step=step,
                time=60.0 * step,
                metrics={"train/loss": 3 / (1 + number + step / 99), "val/top1": step / 1e4}
                | ({f"val/{EVIL}": math.inf if step % 2 else 1.0} if step > 900 else {}),
            )
            for step in range(1, 1000)
        ]
        params = {"optim.lr": str(number), f"note.{EVIL}": EVIL}
        runs.append(ComparedRun(label=label, source=EVIL, params=params, rows=tuple(rows)))
    page = tmp_path / "compare.html"
    page.write_text(render(compare(runs)))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--proxy-server=127.0.0.1:9"]
    options += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=20000"]
    shown = subprocess.run(
        [chromium, *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout
    assert shown.count('class="main-svg"') >= 2 * 3
    assert shown.count('class="js-line"') >= 2 * 2
    body = shown.partition("<body")[2].partition("<script")[0]
    assert "<img" not in body and "evil" not in shown.partition("<title>")[2].partition("<")[0][:9]
    assert 'class="legendtext"' in body and "&lt;img src=x" in body.partition("legendtext")[2]
