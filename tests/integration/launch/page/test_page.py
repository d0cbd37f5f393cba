"""The comparison page in a browser: drawn, operated with mouse, touch and keys, at two widths."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
# Of A4 at 96 dots per inch, without margins.
PAPER_WIDTH = 716
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


def plot(tab: Browser, chart: str = "train/loss") -> dict[str, float]:
    """The box of a chart's plotting area, scrolled into view."""
    card = f"document.querySelector('[data-chart=\"{chart}\"]')"
    tab.value(f"{card}.scrollIntoView({{block: 'center'}})")
    tab.wait(f"{card}.querySelector('.u-over')")
    return dict(tab.value(f"{card}.querySelector('.u-over').getBoundingClientRect().toJSON()"))


def x_label(tab: Browser, chart: str = "train/loss") -> Any:
    """Heading of the first column of a chart's table, which has the unit of the x axis."""
    return tab.value(f"document.querySelector('[data-chart=\"{chart}\"] .values th').textContent")


def steps_in_table(tab: Browser) -> list[float]:
    """The x of the rows of a chart's table: what of the curve is in view."""
    rows = "document.querySelectorAll('[data-chart=\"train/loss\"] .values tbody th')"
    return [float(text) for text in tab.value(f"[...{rows}].map((cell) => cell.textContent)")]


def open_table(tab: Browser) -> None:
    tab.value("document.querySelector('[data-chart=\"train/loss\"] details').open = true")
    tab.wait("document.querySelector('[data-chart=\"train/loss\"] .values th')")


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


def test_the_x_axis_switches(wide: Browser) -> None:
    open_table(wide)
    assert (x_label(wide), steps_in_table(wide)[-1]) == ("steps", NUM_STEPS)
    wide.value("document.querySelector('[value=samples]').click()")
    wide.wait("document.querySelector('[data-chart=\"train/loss\"] th').textContent === 'samples'")
    last = "document.querySelector('[data-chart=\"train/loss\"] tbody tr:last-child th')"
    assert wide.value(f"{last}.textContent") == "24k"
    wide.value("document.querySelector('[value=hours]').click()")
    wide.wait("document.querySelector('[data-chart=\"train/loss\"] th').textContent === 'hours'")
    assert steps_in_table(wide)[-1] == pytest.approx(50, rel=0.01)
    assert not wide.value("document.querySelector('[value=flops]')")  # unknown: not offered


def test_a_run_is_hidden_everywhere_at_once(wide: Browser) -> None:
    open_table(wide)
    shown = (
        "[...document.querySelectorAll('main [data-run=\"1\"]')].filter((e) => e.checkVisibility())"
    )
    assert wide.value(f"{shown}.length") > 5
    wide.value("document.querySelector('[data-toggle=\"1\"]').click()")
    wide.wait(f"{shown}.length === 0")
    heads = "document.querySelectorAll('[data-chart=\"train/loss\"] thead th').length"
    wide.wait(f"{heads} === 3")
    wide.value("document.querySelector('[data-toggle=\"1\"]').click()")
    wide.wait(f"{shown}.length > 5 && {heads} === 4")


def test_tables_sort_and_filter(wide: Browser) -> None:
    names = "[...document.querySelectorAll('#verdict tbody th .cell')].map((e) => e.textContent)"
    assert wide.value(names) == [EVIL, "fast-rate", "slow-rate"]
    heads = "[...document.querySelectorAll('#verdict thead button')]"
    head = f"{heads}.find((e) => e.textContent.startsWith('val/top1'))"
    wide.value(f"{head}.click()")
    assert wide.value(names) == ["slow-rate", "fast-rate", EVIL]
    assert wide.value(f"{head}.closest('th').ariaSort") == "ascending"
    wide.value(f"{head}.click()")
    assert wide.value(names) == [EVIL, "fast-rate", "slow-rate"]
    rows = "document.querySelectorAll('#parameters tbody tr:not([hidden]) th')"
    rows = f"[...{rows}].map((e) => e.textContent)"
    assert wide.value(rows) == ["optim.lr"]
    wide.value("document.querySelector('#only-differing').click()")
    assert len(wide.value(rows)) == 3
    wide.value(
        "{ const box = document.querySelector('#parameters [type=search]');"
        " box.value = 'batch'; box.dispatchEvent(new Event('input')); }"
    )
    assert wide.value(rows) == ["data.global_batch"]


def test_hovering_shows_the_values_of_all_runs(wide: Browser) -> None:
    box = plot(wide)
    wide.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 40)
    wide.mouse("mouseMoved", box["x"] + box["width"] / 2 + 2, box["y"] + 40)
    wide.wait("document.querySelector('[data-chart=\"train/loss\"] .tip:not([hidden])')")
    rows = wide.value(
        "[...document.querySelectorAll('[data-chart=\"train/loss\"] .tip tr')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert sorted(row[0] for row in rows) == sorted(LABELS)
    values = [float(row[1]) for row in rows]
    assert values == sorted(values, reverse=True) and 0.05 < values[-1] < 0.4
    step = float(rows[0][3].split()[1].replace("k", "e3"))
    assert step == pytest.approx(NUM_STEPS / 2, rel=0.02)


def test_drag_and_reset_zoom_all_charts(wide: Browser) -> None:
    open_table(wide)
    box = plot(wide)
    middle = box["y"] + box["height"] / 2
    wide.drag((box["x"] + box["width"] / 4, middle), (box["x"] + box["width"] / 2, middle))
    wide.wait("!document.querySelector('#reset').disabled")
    steps = steps_in_table(wide)
    assert steps[0] == pytest.approx(NUM_STEPS / 4, rel=0.05)
    assert steps[-1] == pytest.approx(NUM_STEPS / 2, rel=0.05)
    wide.value("document.querySelector('#reset').click()")
    wide.wait("document.querySelector('#reset').disabled")
    assert steps_in_table(wide)[-1] == NUM_STEPS


def test_log_axes_smoothing_and_compute_redraw(wide: Browser) -> None:
    for name in ("#logX", "#logY"):
        wide.value(f"document.querySelector('{name}').click()")
    wide.value(
        "{ const slider = document.querySelector('#smoothing');"
        " slider.value = 0.9; slider.dispatchEvent(new Event('input')); }"
    )
    chart = "document.querySelector('[data-chart=\"train/loss\"]')"
    wide.wait(f"{chart}.dataset.drawn === '6'")  # curves and the raw ones behind them
    few = "document.querySelector('[data-chart=\"val/top1\"]')"
    wide.value(f"{few}.scrollIntoView()")
    wide.wait(f"{few}.dataset.drawn === '3'")  # six points each are not smoothed
    wide.value("document.querySelector('[data-chart=compute]').scrollIntoView()")
    wide.wait("document.querySelector('[data-chart=compute]').dataset.drawn === '3'")
    wide.value(
        "{ const select = document.querySelectorAll('#compute select')[1];"
        " select.value = 'Hours'; select.dispatchEvent(new Event('change')); }"
    )
    wide.value("document.querySelector('[data-chart=compute] details').open = true")
    wide.wait("document.querySelector('[data-chart=compute] .values th')")
    assert x_label(wide, "compute") == "hours"
    assert not wide.problems


def test_all_charts_are_on_paper(chromium: Browser, page: Path) -> None:
    """Also those that were never in view; nothing is cut, and no control is printed."""
    chromium.open(page, width=1280, height=600)
    chromium.wait(f"{DRAWN} >= 1")
    late = "[...document.querySelectorAll('.chart')].filter((chart) => !chart.dataset.drawn).length"
    assert chromium.value(late) > 0
    chromium.value(
        "addEventListener('beforeprint', () => { window.onPaper = "
        "[...document.querySelectorAll('.uplot')].map((plot) => plot.offsetWidth); })"
    )
    assert base64.b64decode(chromium.send("Page.printToPDF")["data"]).startswith(b"%PDF")
    assert chromium.value(late) == 0
    widths = chromium.value("onPaper")
    assert len(widths) == 3 and max(widths) <= PAPER_WIDTH
    chromium.send("Emulation.setEmulatedMedia", media="print")
    shown = "document.querySelectorAll('.controls, nav, input, .quiet')"
    assert not chromium.value(f"[...{shown}].filter((each) => each.checkVisibility()).length")
    chromium.send("Emulation.setEmulatedMedia", media="")
    assert not chromium.problems
