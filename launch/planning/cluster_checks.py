"""Check what is around a run: SLURM's limits, installed versions, the tracking server."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, requires, version
from textwrap import shorten
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from packaging.requirements import Requirement

from launch.jobs.preparation import LaunchableRun
from launch.jobs.queue import NoAnswerError, ask_slurm
from launch.planning.checks import Check, caught, ok, warning
from launch.planning.partitions import SHOW_PARTITIONS, partition_problems
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.launching import LaunchSettings
from vitscale.tracking.run_facts import redact

PROJECT = "vitscale"
SHOWN_VERSIONS = ("torch", "deepspeed", "submitit", "mlflow")
SERVER_SECONDS = 3.0


def cluster_checks(run: LaunchableRun) -> list[Check]:
    """Rows about SLURM, versions and the tracking server; in seconds even if none answers."""
    rows = caught("SLURM limits", lambda: slurm_limits(run.launch))
    rows += caught("versions", lambda: versions(requires(PROJECT) or [], run.launch))
    if not isinstance(run, DataPrepRun):
        rows += tracking_server(run.tracking.uri)
    return rows


def slurm_limits(launch: LaunchSettings) -> Iterator[Check]:
    """Raise UserErrors for a job that its partition could never start."""
    if shutil.which("sbatch") is None:
        yield ok("SLURM limits", "not checked: no SLURM on this machine")
        return
    try:
        ask_slurm(*SHOW_PARTITIONS)
    except NoAnswerError as error:
        text = shorten(str(error), 100)
        yield warning("SLURM limits", f"not checked: {text}", next_step="try again later")
        return
    if problems := partition_problems(launch):
        raise UserErrors(problems)
    cores = launch.tasks_per_node * launch.cpus_per_task
    yield ok(
        "SLURM limits",
        f"{launch.nodes} node(s) x {cores} core(s), {launch.gpus_per_node} GPU(s), "
        f"{launch.timeout_min} min in {launch.partition or 'the default partition'}",
    )


def versions(wanted: list[str], launch: LaunchSettings) -> Iterator[Check]:
    """Compare installed packages with the project's requirements.

    wanted: as in pyproject.toml, `torch>=2.11`. Those of extras are left out.
    """
    if launch.python is not None:
        yield ok("versions", f"not checked: the job runs {launch.python}")
        return
    errors, shown = [], {}
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            found = ""
        # A local build such as 2.14.0+cu130, or a nightly one.
        if not found or not requirement.specifier.contains(found, prereleases=True):
            errors.append(
                UserError(
                    f"{found or 'is not installed'}",
                    where=requirement.name,
                    allowed=str(requirement.specifier),
                    next_step="pip install -e .",
                )
            )
        elif requirement.name in SHOWN_VERSIONS:
            shown[requirement.name] = found
    if errors:
        raise UserErrors(errors)
    names = ", ".join(f"{name} {shown[name]}" for name in SHOWN_VERSIONS if name in shown)
    yield ok("versions", f"python {platform.python_version()}, {names}")


def tracking_server(uri: str | None) -> list[Check]:
    """Ask the server for its health. A run survives without it, so no answer is a warning."""
    name = "tracking"
    if uri is None:
        return [ok(name, "journal.jsonl only (tracking.uri is null)")]
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return [ok(name, redact(uri))]
    shown = redact(uri)
    host = parts.netloc.rpartition("@")[2]
    problem = server_problem(f"{parts.scheme}://{host}{parts.path.rstrip('/')}/health")
    if problem is None:
        return [ok(name, f"{shown} answers")]
    return [
        warning(
            name,
            f"{shown}: {problem}; the run would keep its metrics in journal.jsonl",
            next_step="start the server or correct tracking.uri; metrics are sent when it answers",
        )
    ]


def server_problem(url: str) -> str | None:
    """Why a server does not work; None if it answers, be it with a refusal of this page."""
    try:
        with urlopen(url, timeout=SERVER_SECONDS):
            return None
    except HTTPError as error:
        return f"answers {error.code} {error.reason}" if error.code >= 500 else None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return f"does not answer ({reason})"
