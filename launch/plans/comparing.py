"""Compare finished runs: the run type and its job, `launch/compare.py` on their folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from vitscale.config.section import Run
from vitscale.runs.launching import LaunchSettings, launch_problems
from vitscale.tracking.source_version import PROJECT_ROOT

PAGE_NAME = "compare.html"


class ComparisonRun(Run):
    """Finished runs -> a page that compares them."""

    stage: Literal["comparison"] = "comparison"
    name: str
    output: str
    """Folder of the page."""
    runs: tuple[str, ...] = Field(min_length=1, strict=False)
    """Run folders; differences are relative to the first."""
    launch: LaunchSettings = LaunchSettings()

    @property
    def folder(self) -> str:
        return self.output

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from launch_problems(self.launch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonJob:
    """Small, picklable, without torch. All paths are absolute."""

    runs: tuple[str, ...]
    page: str

    def __call__(self) -> int:
        script = str(PROJECT_ROOT / "launch/compare.py")
        command = [sys.executable, script, *self.runs, "--output", self.page]
        code = subprocess.run(command).returncode
        if code:
            # The script has reported its error; no traceback is needed.
            raise SystemExit(code)
        return code


def comparison_job(run: ComparisonRun) -> ComparisonJob:
    return ComparisonJob(
        runs=tuple(str(Path(folder).absolute()) for folder in run.runs),
        page=str(Path(run.folder).absolute() / PAGE_NAME),
    )
