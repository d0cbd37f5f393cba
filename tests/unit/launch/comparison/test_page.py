"""The page: which run is best and why, what it holds, and what it admits."""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

from launch.comparison.differences import compare
from launch.comparison.page import MAX_PICTURE_BYTES, MAX_POINTS, PNG_START, render
from launch.comparison.runs import ComparedRun, load_runs
from vitscale.tracking.journal import Row
from vitscale.tracking.run_facts import DatasetFacts
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

EVIL = "</script><!--<script>alert(1)</script>&<img src=x onerror=alert(1)> $\\x$ \x07"


def run(
    label: str,
    *metrics: dict[str, float],
    folder: Path | None = None,
    **params: str,
) -> ComparedRun:
    rows = tuple(Row(step=i, time=float(i), metrics=each) for i, each in enumerate(metrics, 1))
    params = {key.replace("__", "."): value for key, value in params.items()}
    return ComparedRun(label=label, source="", folder=folder, status=None, params=params, rows=rows)


def verdict(*runs: ComparedRun) -> str:
    found = re.search(r'<p class="verdict">(.*?)<h2>', render(compare(runs)), re.DOTALL)
    assert found
    return re.sub(r"<[^>]*>", "", found[1])


def figures(page: str) -> list[dict[str, Any]]:
    found = re.findall(r'data-figure="([^"]*)"', page)
    return [json.loads(html.unescape(figure)) for figure in found]


def test_runs_are_ranked_by_accuracy_before_loss() -> None:
    text = verdict(
        run("a", {"val/loss": 0.1, "val/top1": 0.5}, optim__lr="1", name="a"),
        run("b", {"val/loss": 0.3, "val/top1": 0.75}, optim__lr="2", name="b"),
    )
    assert text.splitlines()[0] == "b is best: val/top1 0.75; next is a, 0.5."
    assert "They differ in optim.lr." in text


def test_groups_of_seeds_are_ranked_by_their_means() -> None:
    text = verdict(
        *(run(f"low-{i}", {"val/top1": v}, seed=str(i), lr="1") for i, v in enumerate((0.2, 0.9))),
        *(run(f"high-{i}", {"val/top1": v}, seed=str(i), lr="2") for i, v in enumerate((0.6, 0.7))),
    )
    assert "high-0 and 1 more is best: val/top1 0.65 ± 0.071; next is low-0 and 1 more" in text
    assert "differ in lr." in text and "within the spread of the seeds (0.49)" in text


def test_unequal_numbers_of_samples_are_named() -> None:
    short = run("a", {"val/top1": 0.5}, data__global_batch="8")
    long = run("b", {"val/top1": 0.6}, data__global_batch="16")
    assert "not seen equally many samples: compare them with --at samples" in verdict(short, long)


def test_charts_hold_every_run() -> None:
    """Long ones as means within their extremes, and values that are not finite are left out."""
    long = [{"train/loss": float(i % 7), "odd/zero": 0.0} for i in range(2000)]
    page = render(compare([run("a", *long), run("b", {"train/loss": float("nan")})]))
    (figure,) = figures(page)
    band, mean = figure["data"][:2]
    assert mean["name"] == "a" and len(mean["x"]) == MAX_POINTS and figure["data"][2]["x"] == []
    assert max(band["y"]) == 6 and min(band["y"]) == 0 and 2.5 <= min(mean["y"]) <= 3.5
    assert figure["layout"]["xaxis"]["title"]["text"] == "steps"
    assert "Always 0, and left out: odd/zero." in page


def test_hostile_names_are_text() -> None:
    evil = [run(EVIL, {EVIL: 0.5, "val/top1": float(i)}, lr=str(i), x=EVIL) for i in (1, 2)]
    page = render(compare(evil))
    before = page.partition("<script>")[0]
    assert "<img src=x" not in before and "<!--" not in before and page.count("<script>") == 2
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy and policy.count("'sha256-") == 2
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")
    for figure in figures(page):
        assert not re.search("<[a-z!/]", json.dumps(figure))


def test_a_run_says_when_by_whom_and_from_what(tmp_path: Path) -> None:
    """From its folder, and the same from MLflow."""
    with Tracker.open(
        folder=tmp_path / "run",
        settings=TrackingSettings(uri=f"sqlite:///{tmp_path}/mlflow.db", system_metrics=False),
        run_name="run", stage="pretrain", params={}, tags={}, config_yaml="name: run\n",
        resume_step=0, is_writer=True, say=lambda text: None,
        datasets=(
            DatasetFacts(name="digits/train", digest="d" * 64, source="x", context="training",
                         num_samples=1437, num_classes=10),
            DatasetFacts(name="digits/test", digest="e" * 64, source="x", context="validation",
                         num_samples=360, num_classes=10),
        ),
    ) as tracker:  # fmt: skip
        tracker.log({"val/top1": 0.5}, step=1)
    [found] = load_runs([str(tmp_path / "run")], uri=None)
    [stored] = load_runs(["run"], uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert found.origin == stored.origin
    day, *_, data, author = found.origin.split("; ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day) and author.startswith("by ")
    assert data == "digits/train, 1,437 images, dddddddddddd"
    assert found.origin in render(compare([found]))


def test_pictures_of_runs_are_side_by_side(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        folder = tmp_path / name / "pictures"
        folder.mkdir(parents=True)
        (folder / "worst_classes.png").write_bytes(PNG_START + name.encode())
        runs.append(run(name, {"x": 1.0}, folder=folder.parent))
    (tmp_path / "b/pictures/a_first.png").write_bytes(PNG_START)
    (tmp_path / "b/pictures/large.png").write_bytes(PNG_START + bytes(MAX_PICTURE_BYTES))
    (tmp_path / "b/pictures/no_png.png").write_bytes(b"<svg/>")
    page = render(compare(runs))
    assert re.findall("<h3>(.*)</h3>", page) == ["worst classes", "a first"]
    found = re.findall(r'data:image/png;base64,([^"]*)', page.partition("<script>")[0])
    assert [base64.b64decode(each)[-1:] for each in found] == [b"a", b"b", b"\n"]
    assert "2 pictures are too large or no PNG" in page
