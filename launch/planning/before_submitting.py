"""Run the checks of `launch/doctor.py` before a job is submitted."""

from __future__ import annotations

import sys
from collections.abc import Container

from launch.jobs.preparation import LaunchableRun
from launch.planning.checks import raise_errors
from launch.planning.cluster_checks import cluster_checks
from launch.planning.run_checks import run_checks


def check(run: LaunchableRun, *, leave_out: Container[str] = ()) -> None:
    """Print the warnings. Raise UserErrors with the errors.

    leave_out: checks whose warnings are not printed.
    """
    checks = [*run_checks(run), *cluster_checks(run)]
    raise_errors(checks)
    for each in checks:
        if each.result == "warning" and each.name not in leave_out:
            warn(f"{each.name}: {each.detail}\n  next: {each.next_step}")


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
