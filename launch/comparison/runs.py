"""Find the runs to compare and read them.

Owns: finding a run by folder, name or MLflow id; reading its parameters and metrics.
Leaves out: comparing (`differences`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from launch.jobs.queue import NoAnswerError, user_jobs
from launch.jobs.status.states import read_state
from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.loader import read_site
from vitscale.config.redaction import redact, short_reason
from vitscale.config.source import read_yaml
from vitscale.tracking.journal import JOURNAL_NAME, Row, read_rows
from vitscale.tracking.mlflow_store import StoredRun, find_stored_run, find_stored_runs
from vitscale.tracking.run_facts import (
    CONFIG_ARTIFACT,
    absolute_uri,
    flatten_params,
    origin_line,
    read_record,
    sqlite_path,
)

RUNS_FOLDER = Path("runs")
DEFAULT_URI = "sqlite:///runs/mlflow.db"
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run to compare. `source` names where its metrics were read."""

    label: str
    source: str
    folder: Path | None
    status: str | None
    params: dict[str, str]
    rows: tuple[Row, ...]
    origin: str = ""
    """When, from which commit, on which data and by whom it was made."""

    @property
    def last_step(self) -> int:
        return max(row.step for row in self.rows)

    @property
    def wall_s(self) -> float:
        """Seconds from the first to the last line, including pauses between jobs."""
        times = [row.time for row in self.rows]
        return max(times) - min(times)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        points = [(row.step, row.metrics[key]) for row in self.rows if key in row.metrics]
        return [step for step, _ in points], [value for _, value in points]


def default_uri() -> str:
    """The MLflow store without --uri: `tracking.uri` of the site file, else runs/mlflow.db.

    Raises UserErrors if the site file has errors.
    """
    errors: list[UserError] = []
    site = read_site(errors=errors).values
    if errors:
        raise UserErrors(errors)
    uri = site.get("tracking", {}).get("uri")
    return uri if isinstance(uri, str) else DEFAULT_URI


def load_runs(names: Sequence[str], *, uri: str | None) -> list[ComparedRun]:
    """Find and read every run; the folder of a chain stands for the runs below it.

    Raises UserErrors that name all runs not found.
    """
    runs, errors = [], []
    for each in (run for name in names for run in _runs_below(name)):
        try:
            runs.append(_load_run(each, uri=uri))
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else UserErrors(errors)
    return _with_distinct_labels(runs)


def _runs_below(name: str) -> list[str]:
    """The runs of a chain; the name itself if it means something else."""
    for folder in (Path(name), RUNS_FOLDER / name):
        if folder.is_dir() and not (folder / JOURNAL_NAME).is_file():
            journals = (*folder.glob(f"*/{JOURNAL_NAME}"), *folder.glob(f"*/*/{JOURNAL_NAME}"))
            return sorted(str(path.parent) for path in journals) or [name]
    return [name]


def search_runs(query: str, *, uri: str | None) -> list[ComparedRun]:
    """Runs of an MLflow store that its filter finds, newest first, at most 50.

    query: MLflow's filter string, see `MlflowClient.search_runs`.
    Raises UserError if none is found.
    """
    uri = default_uri() if uri is None else uri
    stored = _asked(uri, lambda uri: find_stored_runs(uri, query, say=lambda text: None))
    runs = [_record(run) for run in stored or [] if run.rows]
    if not runs:
        raise UserError(f"no run with metrics matches {query!r}", where="--filter")
    return _with_distinct_labels(runs)


def _with_distinct_labels(runs: list[ComparedRun]) -> list[ComparedRun]:
    seen: dict[str, int] = {}
    distinct = []
    for run in runs:
        seen[run.label] = number = seen.get(run.label, 0) + 1
        distinct.append(run if number == 1 else replace(run, label=f"{run.label} ({number})"))
    return distinct


def _load_run(name: str, *, uri: str | None) -> ComparedRun:
    known: list[str] = []
    if uri is not None:
        record, known = _read_mlflow(name, uri)
        if record is not None:
            return record
    for folder in (Path(name), RUNS_FOLDER / name):
        if folder.is_dir():
            return _read_folder(folder)
    if uri is None:
        record, known = _read_mlflow(name, default_uri())
        if record is not None:
            return record
    known += sorted(path.parent.name for path in RUNS_FOLDER.glob(f"*/{JOURNAL_NAME}"))
    known = list(dict.fromkeys(known))
    close = nearest(Path(name).name, known)
    raise UserError(
        f"no such run: {name!r}" + (f"; did you mean {close}?" if close else ""),
        where="RUN",
        allowed=f"a run folder, or one of: {', '.join(known[:20])}" if known else "a run folder",
        next_step="give a folder that contains journal.jsonl, or an MLflow store with --uri",
    )


def _read_folder(folder: Path) -> ComparedRun:
    journal = folder / JOURNAL_NAME
    rows = tuple(row for row, _ in read_rows(journal)) if journal.is_file() else ()
    if not rows:
        reason = "has no readable line" if journal.is_file() else "does not exist"
        raise UserError(
            f"no metrics to compare: {journal} {reason}",
            where="RUN",
            next_step="give the output folder of a training run that has logged at least one step",
        )
    config, record = folder / CONFIG_ARTIFACT, read_record(folder)
    return ComparedRun(
        label=folder.resolve().name,
        source=str(folder),
        folder=folder,
        status=_status(folder),
        params=flatten_params(read_config(config)[1]) if config.is_file() else {},
        rows=rows,
        origin=origin_line(record.tags, record.datasets, time_s=rows[0].time) if record else "",
    )


def _status(folder: Path) -> str:
    try:
        jobs = user_jobs()
    except NoAnswerError:
        jobs = None
    return str(read_state(folder.resolve(), jobs).state)


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Text and values of a run's configuration; no values if it has no keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path)) from None
    values = read_yaml(text, name=str(path))
    return text, values if isinstance(values, dict) else {}


def _read_mlflow(name: str, uri: str) -> tuple[ComparedRun | None, list[str]]:
    found = _asked(uri, lambda uri: find_stored_run(uri, name, say=lambda text: None))
    if found is None:
        return None, []
    stored, known = found
    if stored is None:
        return None, known
    if not stored.rows:
        raise UserError(f"the MLflow run {name!r} has no metrics", where="RUN")
    return _record(stored), known


def _asked(uri: str, ask: Callable[[str], Answer]) -> Answer | None:
    """The store's answer; None if there is no store. Raises UserError for one that fails."""
    uri = absolute_uri(uri, where="--uri")
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        return None
    try:
        return ask(uri)
    # Any failure of the server or its database is reported as a problem of the address.
    except Exception as error:
        raise UserError(
            f"MLflow at {redact(uri)} cannot be read: {short_reason(error)}",
            where="--uri",
            next_step="check the address, or give run folders instead",
        ) from None


def _record(stored: StoredRun) -> ComparedRun:
    return ComparedRun(
        label=stored.name,
        source=f"MLflow run {stored.run_id}",
        folder=None,
        status=stored.status.lower(),
        params=stored.params,
        rows=tuple(stored.rows),
        origin=origin_line(stored.tags, stored.datasets, time_s=stored.rows[0].time),
    )
