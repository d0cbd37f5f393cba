"""The job of a comparison: `launch/compare.py` on the runs of earlier stages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.chains.settings import ComparisonRun
from launch.chains.states import PAGE_NAME
from vitscale.tracking.source_version import PROJECT_ROOT


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
