"""The comparison page in a browser, at two widths."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.comparison.differences import compare
from launch.comparison.page.data import PNG_START
from launch.comparison.page.write import write_report
from launch.comparison.runs import ComparedRun
from launch.jobs.attempts import ATTEMPT
from tests.integration.launch.page.browser import Browser, browser, chromium_path
from vitscale.distributed.failures.events import append_event
from vitscale.tracking.journal import Row

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
LABELS = ("slow-rate", "fast-rate", EVIL)
NUM_STEPS = 3000
CHARTS = "document.querySelectorAll('#charts .chart:not([hidden])')"
DRAWN = "[...document.querySelectorAll('#charts .plot .uplot')].length"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


def make_run(root: Path, number: int) -> ComparedRun:
    """A run with 3,000 points; its accuracy is higher the higher its number."""
    folder = root / str(number)
    (folder / "pictures").mkdir(parents=True)
    assert PNG.startswith(PNG_START)
    (folder / "pictures/test_predictions.png").write_bytes(PNG)
    attempt = {"number": 1, "cluster": "slurm", "job_id": "7", "restart": 0, "num_tasks": 1}
    attempt |= {"started": 0.0, "ended": 9e3, "first_step": 0, "reason": EVIL, "ending": "done"}
    append_event(folder, ATTEMPT, attempt)
    rows = []
    for step in range(1, NUM_STEPS + 1):
        metrics = {"train/loss": 3 / (1 + number + step / 99) + 0.01 * (step % 7), "odd/zero": 0.0}
        if step % 500 == 0:
            metrics |= {"val/top1": 0.2 + 0.1 * number + step / 1e4, f"val/{EVIL}": math.inf}
        rows.append(Row(step=step, time=60.0 * step, metrics=metrics))
    params = {"optim.lr": str(0.1 * number), "data.global_batch": "8", f"note.{EVIL}": EVIL}
    return ComparedRun(
        label=LABELS[number],
        source=EVIL,
        folder=folder,
        status=None,
        params=params,
        rows=tuple(rows),
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    comparison = compare([make_run(root, number) for number in range(3)])
    return write_report(comparison, path=root / "compare.html")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium_path() is None:
        if os.environ.get("VITSCALE_REQUIRE_CHROMIUM") == "1":
            pytest.fail("no chromium on this machine")
        pytest.skip("no chromium on this machine")
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def wide(chromium: Browser, page: Path) -> Browser:
    chromium.open(page, width=1280, height=1600)
    chromium.wait(f"{DRAWN} >= 2")
    return chromium


@pytest.mark.parametrize(("width", "mobile", "dark"), [(1280, False, False), (390, True, True)])
def test_the_page_draws_without_errors(
    chromium: Browser, page: Path, width: int, mobile: bool, dark: bool
) -> None:
    chromium.open(page, width=width, mobile=mobile, dark=dark)
    for number in range(chromium.value(f"{CHARTS}.length")):
        chromium.value(f"{CHARTS}[{number}].scrollIntoView()")
        chromium.wait(f"{CHARTS}[{number}].dataset.drawn")
    ink = """[...document.querySelectorAll('.chart canvas')].map((canvas) => {
      const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      return data.some((value) => value !== 0);
    })"""
    inked = chromium.value(ink)
    assert len(inked) >= 2 and all(inked)  # the hostile metric has no finite value: no canvas
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert not chromium.problems


def test_hostile_names_are_shown_as_text(wide: Browser) -> None:
    assert wide.value("document.querySelector('h2').textContent").strip().startswith(EVIL)
    assert EVIL in wide.value("document.querySelector('.chips').textContent")
    assert EVIL in wide.value("document.querySelector('#attempts').textContent")
    assert wide.value("[...document.images].every((image) => image.src.startsWith('data:'))")
    assert not wide.problems
