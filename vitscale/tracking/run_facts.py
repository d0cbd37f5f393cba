"""Describe a run to MLflow: parameters, tags, the record of a run in its folder, tracking URI.

Owns: flattening a configuration to parameters, removing secrets, tags about this process, what
events.jsonl has for MLflow, and the supported tracking URIs.
Leaves out: sending (`mlflow_sync`). Environment variables are never sent.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vitscale.config.errors import UserError, nearest
from vitscale.config.redaction import redact
from vitscale.config.source import shown_path
from vitscale.distributed.events import read_events
from vitscale.tracking.source_version import source_version

CONFIG_NAME = "config.yaml"
# Events of a run folder: a start of a run, its end, and an MLflow run of it.
TRACKED, ENDED, LINKED = "tracked", "ended", "mlflow"
# The training data: name, number of images, fingerprint.
DATA_TAG = "vitscale.data"

# MLflow's limits (mlflow/utils/validation.py, 3.17).
MAX_KEY_CHARS = 250
MAX_PARAM_CHARS = 6000
MAX_TAG_CHARS = 5000
# MLflow cuts longer notes without a word.
MAX_NOTE_CHARS = 8000

URI_SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")

# Settings of a model are no secrets.
_SECRET_NAME = (
    r"(?!(?:class|distillation)_token\b)"
    r"(?:[\w-]*_)?(?:password|passwd|secret|token|api_?key|credentials?)"
)
_SECRET_KEY = re.compile(rf"(?:^|\.){_SECRET_NAME}$", re.IGNORECASE)
# With the sign of a line in a patch.
_SECRET_LINE = re.compile(
    rf"^(?P<key>[+-]?\s*{_SECRET_NAME}:[ ]+)\S.*$", re.IGNORECASE | re.MULTILINE
)
_ODD_KEY_CHARS = re.compile(r"[^\w\-. :/]")


# Settings of `launch` that are sent: the rest (setup, python, sbatch, accounts) is the site's own.
_SENT_SIZES = ("nodes", "tasks_per_node", "num_tasks", "gpus_per_node", "cpus_per_task", "mem_gb")
Status = Literal["RUNNING", "PAUSED", "FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What MLflow is told of a run beside metrics and configuration, and how the run ended."""

    name: str
    experiment: str = "vitscale"
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """Description of the run, in Markdown."""
    origin: str | None = None
    """Run folder, or a checkpoint in one, that the weights come from."""
    started: float = 0.0
    """Unix seconds."""
    status: Status = "RUNNING"
    """A process that was killed outright leaves RUNNING."""
    ended: float | None = None
    """Unix seconds; None while it is RUNNING."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """An MLflow run of a run folder. The store's address is without credentials."""

    uri: str
    run_id: str


def read_record(folder: Path) -> RunRecord | None:
    """The record of the last start of a run; None if there is none."""
    record = None
    for row in read_events(folder):
        with suppress(KeyError, TypeError):
            if row["event"] == TRACKED:
                record = RunRecord(
                    name=row["name"],
                    experiment=row["experiment"],
                    tags=row["tags"],
                    note=row["note"],
                    origin=row["origin"],
                    started=row["time"],
                )
            elif row["event"] == ENDED and record is not None:
                record = replace(record, status=row["status"], ended=row["time"])
    return record


def read_links(folder: Path) -> list[Link]:
    """The MLflow runs of a folder, oldest first."""
    links = []
    for row in read_events(folder):
        if row["event"] == LINKED:
            with suppress(KeyError):
                links.append(Link(uri=row["uri"], run_id=row["run_id"]))
    return links


def shared_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the sizes alone of its section `launch`."""
    launch = config.get("launch")
    sizes = {} if launch is None else {k: launch[k] for k in _SENT_SIZES if k in launch}
    return {**config, "launch": sizes} if launch else dict(config)


def redact_yaml(text: str) -> str:
    """`redact` a configuration file, and remove values of keys with secret-like names."""
    return _SECRET_LINE.sub(r"\g<key>'***'", redact(text))


def clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags without credentials, within MLflow's limit."""
    return {key: redact(value)[:MAX_TAG_CHARS] for key, value in tags.items()}


def flatten_params(config: Mapping[str, Any]) -> dict[str, str]:
    """Nested configuration -> {dotted key: text as in YAML}, within MLflow's limits."""
    params = {}
    for key, value in _leaves(shared_config(config), ""):
        text = "***" if _SECRET_KEY.search(key) and value is not None else redact(_spell(value))
        if len(text) > MAX_PARAM_CHARS:
            note = f"... ({len(text)} characters)"
            text = text[: MAX_PARAM_CHARS - len(note)] + note
        params[_ODD_KEY_CHARS.sub("_", key)[:MAX_KEY_CHARS]] = text
    return params


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _spell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def process_tags() -> dict[str, str]:
    """Tags about this process: user, version of the code, world size, job."""
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.name": Path(sys.argv[0]).name or "python",
        "mlflow.source.type": "LOCAL",
        "vitscale.world_size": os.environ.get("WORLD_SIZE", "1"),
    }
    if version := source_version():
        tags["mlflow.source.git.commit"] = version.commit
        tags["mlflow.source.git.dirty"] = str(version.is_dirty).lower()
        tags["vitscale.code"] = version.short
    job = os.environ.get("SLURM_JOB_ID")
    if job:
        tags["mlflow.source.type"] = "JOB"
        tags["vitscale.job_id"] = job
    return tags


def origin_line(tags: Mapping[str, str], *, time_s: float) -> str:
    """When, from which commit, on which data and by whom a run was made, in one line."""
    parts = [time.strftime("%Y-%m-%d", time.localtime(time_s))]
    if commit := tags.get("mlflow.source.git.commit"):
        edited = " with edits" if tags.get("mlflow.source.git.dirty") == "true" else ""
        parts.append(f"commit {commit[:12]}{edited}")
    if data := tags.get(DATA_TAG):
        parts.append(data)
    if user := tags.get("mlflow.user"):
        parts.append(f"by {user}")
    return "; ".join(parts)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers may run under ids without a name
        return str(os.getuid())


def absolute_uri(uri: str, *, where: str = "tracking.uri") -> str:
    """`uri` with its SQLite path made absolute. Raises UserError for an unsupported URI."""
    scheme, colon, rest = uri.partition(":")
    base = scheme.partition("+")[0]
    if not colon or base not in URI_SCHEMES:
        close = nearest(base, URI_SCHEMES) if colon else None
        raise UserError(
            f"{redact(uri)!r} is not a tracking URI"
            + (f"; did you mean {close}:?" if close else ""),
            where=where,
            allowed=", ".join(f"{name}:" for name in URI_SCHEMES) + ", or null for no MLflow",
            next_step="write sqlite:///runs/mlflow.db, or http://HOST:PORT for a server",
        )
    if base != "sqlite":
        return uri
    if not rest.startswith("///") or len(rest) == 3:
        raise UserError(
            f"{uri!r} names no SQLite file",
            where=where,
            allowed="sqlite:///relative/path.db, sqlite:////absolute/path.db",
        )
    return "sqlite:///" + str(Path(rest[3:]).absolute())


def chart_page(uri: str, experiment: str) -> str:
    """Where to see the charts of an experiment: its address, for a database with the command.

    uri: absolute. experiment: its id. MLflow 3 starts in its view for generative models otherwise.
    """
    query = "workflowType=machine_learning&compareRunsMode=CHART"
    page = f"#/experiments/{experiment}/runs?{query}"
    if uri.startswith("http"):
        return f"{redact(uri).rstrip('/')}/{page}"
    database = sqlite_path(uri)
    shown = redact(uri) if database is None else f"sqlite:///{shown_path(str(database))}"
    return f"mlflow ui --backend-store-uri {shown}, then open\n  http://127.0.0.1:5000/{page}"


def sqlite_path(uri: str) -> Path | None:
    """The database file of an absolute SQLite URI; None for other URIs."""
    prefix = "sqlite:///"
    return Path(uri[len(prefix) :]) if uri.startswith(prefix) else None
