"""Run steps of data preparation in the test process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.make_shards import STEPS
from data_prep.steps.work import WorkFolder, open_work_folder, run_steps
from vitscale.runs.data_prep import DataPrepRun


def run_of(path: Path, output: Path, **sections: Any) -> DataPrepRun:
    """`sections`: more settings, such as shards={"min_shards": 2}."""
    sections["source"] = {"path": str(path), **sections.get("source", {})}
    return DataPrepRun.model_validate({"output": str(output), **sections})


def prepare_here(run: DataPrepRun, *, until: str | None = None) -> WorkFolder:
    """Work through the steps before the one named `until`, or all; no process is started."""
    titles = [step.title for step in STEPS]
    wanted = STEPS if until is None else STEPS[: titles.index(until)]
    work = WorkFolder(run)
    open_work_folder(work)
    run_steps(work, wanted, num_workers=1)
    return work
