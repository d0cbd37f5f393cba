"""Messages during a preparation."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from data_prep.pipeline import listing
from data_prep.pipeline.phases import PHASES, PhaseProgress
from data_prep.pipeline.workspace import Preparation
from tests.support.corpora.image_corpus import corpus
from tests.support.corpora.preparing import prepare_here, run_of
from vitscale.tracking import console

TITLES = [phase.title for phase in PHASES]


@pytest.fixture(autouse=True)
def every_update_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 0.0)


def test_listing_shows_containers_and_inputs_also_inside_a_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(corpus(tmp_path / "images", num=5), tmp_path / "shards")
    p = prepare_here(run, until="list inputs")
    counters = [TITLES.index("list inputs"), 0, 1, TITLES.index("list inputs"), 0, 1]
    progress = PhaseProgress(p, PHASES, counters)
    units = listing.scan_units(p)
    for unit in units[:2]:  # the files beside the classes, and one class
        listing.scan(p, unit)
    counters[1] = 65_536
    progress.update()
    listing.scan(p, units[2])
    progress.close()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "list inputs: 2 of 3 containers, 65,541 inputs, 0 s"
    assert said[1:] == ["list inputs: 3 of 3 containers, 10 inputs, 0 s"]


@pytest.mark.parametrize("title", [phase.title for phase in PHASES if phase.weight is None])
def test_steps_without_a_known_end_show_their_time(
    title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p = prepare_here(
        run_of(corpus(tmp_path / "images", num=1), tmp_path / "s"), until="count inputs"
    )
    progress = PhaseProgress(p, PHASES, [TITLES.index(title), 0, 1])
    progress.update()
    progress.close()
    assert capsys.readouterr().out == f"{title}: 0 s\n" * 2


def test_short_steps_print_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 5.0)
    line = console.ElapsedProgress("find duplicates")
    line.update()
    line.close()
    assert capsys.readouterr().out == ""


def test_storage_errors_are_left_to_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(corpus(tmp_path / "images"), tmp_path / "shards")
    p = prepare_here(run, until="count inputs")
    progress = PhaseProgress(p, PHASES, [TITLES.index("list inputs"), 0, 1])

    def stale(p: Preparation, unit: str) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Preparation, "has_result", stale)
    progress.update()
    progress.update()
    progress.close()
