"""The page as a file: what it holds, and what it admits."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from launch.comparison.differences import compare
from launch.comparison.page.write import FOLDER, UPLOT, render
from launch.comparison.runs import ComparedRun, load_runs
from vitscale.tracking.journal import Row
from vitscale.tracking.run_facts import DatasetFacts
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

# uPlot 1.6.32 as npm has it: sha256 of dist/uPlot.iife.min.js, dist/uPlot.min.css and LICENSE.
UPLOT_SHA256 = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
EVIL = "</script><!--<script>alert(1)</script>&<img src=x onerror=alert(1)>"


def page(*metrics: dict[str, float], label: str = "a") -> str:
    rows = tuple(Row(step=i, time=float(i), metrics=each) for i, each in enumerate(metrics, 1))
    run = ComparedRun(
        label=label, source=label, folder=None, status=None, params={label: label}, rows=rows
    )
    return render(compare([run, run]))


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_chart_library_is_the_published_one() -> None:
    hashes = {n: hashlib.sha256((FOLDER / "uplot" / n).read_bytes()).hexdigest() for n in UPLOT}
    assert hashes == UPLOT_SHA256
    assert "v1.6.32" in (FOLDER / "uplot" / UPLOT[0]).read_text()[:80]


def test_the_page_keeps_the_licence_of_the_library() -> None:
    text = page({"val/top1": 0.5})
    licence = (FOLDER / "uplot/LICENSE").read_text()
    assert "The MIT License" in licence and "Leon Sorokin" in licence
    assert " ".join(licence.replace('"', "&#34;").split()) in " ".join(text.split())


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
    [run] = load_runs([str(tmp_path / "run")], uri=None)
    [stored] = load_runs(["run"], uri=f"sqlite:///{tmp_path}/mlflow.db")
    assert run.origin == stored.origin
    day, *_, data, author = run.origin.split("; ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day) and author.startswith("by ")
    assert data == "digits/train, 1,437 images, dddddddddddd"
    assert data_of(render(compare([run])))["runs"][0]["origin"] == run.origin


def test_hostile_names_cannot_leave_the_data() -> None:
    text = page({EVIL: 0.5}, label=EVIL)
    assert EVIL not in text and "<img" not in text and "<!--" not in text
    data = data_of(text)
    assert data["runs"][0]["label"] == EVIL
    assert data["metrics"][0]["key"] == EVIL
    assert data["params"][0]["values"] == [EVIL, EVIL]


def test_the_policy_admits_the_own_scripts_alone() -> None:
    text = page({"val/top1": 0.5})
    found = re.search(r'Security-Policy" content="([^"]*)"', text)
    assert found
    policy = found[1].replace("&#39;", "'")
    assert "unsafe" not in policy and policy.startswith("default-src 'none'")
    contents = re.findall(r"<script>(.*?)</script>|<style>(.*?)</style>", text, re.DOTALL)
    assert len(contents) == 3
    for script, style in contents:
        digest = hashlib.sha256((script or style).encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_scripts_set_text_and_never_markup() -> None:
    for path in (FOLDER / "scripts").glob("*.js"):
        source = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in source, f"{path.name}: {word}"


def test_pictures_of_runs_are_side_by_side(tmp_path: Path) -> None:
    from launch.comparison.page.data import MAX_PICTURE_BYTES, PNG_START, pictures

    runs = []
    for name in ("a", "b"):
        folder = tmp_path / name / "pictures"
        folder.mkdir(parents=True)
        (folder / "worst_classes.png").write_bytes(PNG_START + name.encode())
        rows = (Row(step=1, time=0.0, metrics={"x": 1.0}),)
        runs.append(
            ComparedRun(
                label=name, source="", folder=folder.parent, status=None, params={}, rows=rows
            )
        )
    (tmp_path / "b/pictures/a_first.png").write_bytes(PNG_START)
    (tmp_path / "b/pictures/large.png").write_bytes(PNG_START + bytes(MAX_PICTURE_BYTES))
    (tmp_path / "b/pictures/no_png.png").write_bytes(b"<svg/>")
    found = pictures(runs)
    assert [row["name"] for row in found["rows"]] == ["worst classes", "a first"]
    files = found["rows"][0]["files"]
    assert [base64.b64decode(file)[-1:] for file in files] == [b"a", b"b"]
    assert found["rows"][1]["files"][0] is None
    assert found["num_left_out"] == 2
