"""Run phases of data preparation in the test process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.pipeline.phases import PHASES
from data_prep.pipeline.runner import work_through_phases
from data_prep.pipeline.work_units import WorkFolder
from data_prep.pipeline.workspace import Preparation, preparation_folder
from vitscale.runs.data_prep import DataPrepRun


def run_of(path: Path, output: Path, **sections: Any) -> DataPrepRun:
    """`sections`: more settings, such as shards={"min_shards": 2}."""
    sections["source"] = {"path": str(path), **sections.get("source", {})}
    return DataPrepRun.model_validate({"output": str(output), **sections})


def prepare_here(run: DataPrepRun, *, until: str | None = None) -> Preparation:
    """Work through the phases before the one named `until`, or all; no process is started."""
    titles = [phase.title for phase in PHASES]
    wanted = PHASES if until is None else PHASES[: titles.index(until)]
    preparation_folder(Path(run.output)).mkdir(parents=True, exist_ok=True)
    work_through_phases(run, wanted, reached=[0], worker=0, start=0)
    return preparation(run)


def preparation(run: DataPrepRun) -> Preparation:
    return Preparation(run, WorkFolder(preparation_folder(Path(run.output))))
