"""Defaults from the site file: precedence, origin, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.inspection.settings import VisualizeRun
from pretrain.run import PretrainRun
from vitscale.config.errors import UserErrors
from vitscale.config.loader import load_run, load_run_file

SITE = """\
launch:
  partition: gpu
  setup: [module load cuda]
  sbatch: {mail-type: END}
tracking:
  uri: http://mlflow:5000
"""


@pytest.fixture(autouse=True)
def site(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = here / "site.yaml"
    path.write_text(SITE)
    monkeypatch.setenv("VITSCALE_SITE", str(path))
    return path


def errors(path: str = "a.yaml") -> list[str]:
    with pytest.raises(UserErrors) as caught:
        load_run(PretrainRun, path)
    return [error.text() for error in caught.value.errors]


def test_the_site_file_is_above_defaults_and_below_files(here: Path) -> None:
    (here / "b.yaml").write_text("base: a.yaml\nlaunch: {partition: low}\n")
    loaded = load_run(PretrainRun, "b.yaml", overrides=["launch.sbatch.exclusive=true"])
    assert (loaded.run.launch.partition, loaded.sources["launch.partition"]) == ("low", "b.yaml:2")
    assert loaded.run.launch.setup == ("module load cuda",)
    assert loaded.sources["launch.setup"] == "site.yaml:3"
    assert loaded.sources["launch.account"] == "default"
    assert loaded.run.launch.sbatch == {"mail-type": "END", "exclusive": True}
    assert loaded.run.tracking.uri == "http://mlflow:5000"


def test_the_site_file_has_a_usual_place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITSCALE_SITE")
    monkeypatch.setenv("HOME", str(here))
    assert load_run(PretrainRun, "a.yaml").run.launch.partition is None
    place = here / ".config/vitscale/site.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(SITE)
    assert load_run(PretrainRun, "a.yaml").run.launch.partition == "gpu"


def test_an_empty_name_means_no_site_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITSCALE_SITE", "")
    assert load_run(PretrainRun, "a.yaml").run.launch.partition is None


def test_a_resolved_file_ignores_the_site_file() -> None:
    assert load_run_file(PretrainRun, "a.yaml").launch.sbatch == {}


def test_a_run_without_the_groups_ignores_them(site: Path) -> None:
    site.write_text("launch: {partitoin: gpu}\n")
    assert load_run(VisualizeRun, None, overrides=["init=runs/a"]).run.init == "runs/a"


def test_mistakes_are_reported_with_their_place(site: Path, here: Path) -> None:
    site.write_text(
        "launch:\n  partitoin: gpu\n  account: 'a b'\n  cpus_per_task: many\n"
        "data: {num_workers: 4}\ntraking: {uri: null}\ntracking: http://mlflow\n"
    )
    (here / "b.yaml").write_text("base: a.yaml\nsede: 1\n")
    found = [text.splitlines()[0] for text in errors("b.yaml")]
    assert sorted(found) == [
        "b.yaml:2: sede: unknown key sede",
        "site.yaml:2: launch.partitoin: unknown key launch.partitoin",
        "site.yaml:3: launch.account: 'a b' is not a name",
        "site.yaml:4: launch.cpus_per_task: 'many' was read as text",
        "site.yaml:5: data: data cannot be set in a site file",
        "site.yaml:6: traking: traking cannot be set in a site file",
        "site.yaml:7: tracking: tracking is text instead of keys and values",
    ]


@pytest.mark.parametrize(
    ("content", "report"),
    [
        (None, "VITSCALE_SITE: there is no file site.yaml"),
        ("launch: [", "site.yaml:1: not readable as YAML"),
        ("- launch", "site.yaml:1: contains a list"),
    ],
)
def test_an_unreadable_site_file_is_an_error(site: Path, content: str | None, report: str) -> None:
    site.unlink() if content is None else site.write_text(content)
    assert [text[: len(report)] for text in errors()] == [report]
