"""Which run folders names mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs.status.finding import find_runs
from launch.jobs.status.reading import read_status
from launch.jobs.status.text import headline
from vitscale.config.errors import UserError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs: one trained, one submitted, two of a chain; and what is none."""
    monkeypatch.chdir(tmp_path)
    for path in ("vit/config.yaml", "chain/a/journal.jsonl", "chain/b/events.jsonl"):
        file = tmp_path / "runs" / path
        file.parent.mkdir(parents=True)
        file.touch()
    for folder in ("runs/submitted/slurm", "runs/mlartifacts/1", "images"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_results_and_artifacts_are_told_from_runs(tmp_path: Path) -> None:
    found = tmp_path / "found"
    evaluation = found / "evaluation"
    artifact = found / "mlflow-artifacts/0123/artifacts/config.yaml"
    for folder in (evaluation, artifact.parent):
        folder.mkdir(parents=True)
    artifact.write_text("name: vit\n")
    (evaluation / "journal.jsonl").write_text('{"step": 16, "time": 1.0, "val/top1": 0.5}\n')
    (evaluation / "results.json").write_text("{}")
    assert find_runs([str(found)]) == [evaluation]
    status = read_status(evaluation, jobs=(), now=2.0)
    assert headline(status, now=62.0).startswith("finished, ")
    assert "step" not in headline(status, now=62.0)


def test_all_runs_below_runs_are_found() -> None:
    names = ["chain/a", "chain/b", "submitted", "vit"]
    assert find_runs([]) == [Path("runs") / name for name in names]


def test_names_are_paths_or_runs_or_folders_of_runs() -> None:
    assert find_runs(["vit", "runs/vit"]) == [Path("runs/vit")]
    assert find_runs(["chain"]) == [Path("runs/chain/a"), Path("runs/chain/b")]


@pytest.mark.parametrize(
    ("names", "report"),
    [
        (["images"], "images is no run folder"),
        (["vitt"], r"no such run: vitt\n.*\n.*did you mean vit\?"),
        (["x", "y"], r"(?s)no such run: x.*no such run: y"),
        (["runs/vit/config.yaml"], "is a file, not a run folder"),
    ],
)
def test_a_name_that_is_no_run_is_an_error(names: list[str], report: str) -> None:
    with pytest.raises(UserError, match=report):
        find_runs(names)


def test_a_folder_without_runs_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here / "images")
    with pytest.raises(UserError, match="no run folder below"):
        find_runs([])
