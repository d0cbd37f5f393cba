"""Describe a run to MLflow: parameters, tags, the record of a run in its folder, tracking URI.

Owns: flattening a configuration to parameters, removing secrets, tags about this process, what
events/ has for MLflow, and the supported tracking URIs.
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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import read_site
from vitscale.config.redaction import redact
from vitscale.config.source import shown_path
from vitscale.distributed.events import read_events
from vitscale.tracking.source_version import SourceVersion

CONFIG_NAME = "config.yaml"
# Events of a run folder: a start of a run, and its end.
TRACKED, ENDED = "tracked", "ended"
# The training data: name, number of images, fingerprint. The version of the code.
DATA_TAG, CODE_TAG = "vitscale.data", "vitscale.code"
# Longest key of MLflow.
MAX_KEY_CHARS = 250
DEFAULT_URI = "sqlite:///runs/mlflow.db"
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

    tracking_id: str
    """A tag of the MLflow run, the same in all attempts that continue each other."""
    name: str
    experiment: str = "vitscale"
    uri: str | None = None
    """The MLflow store, absolute and without credentials; None: journal only."""
    tags: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """Description of the run, in Markdown."""
    origin: str | None = None
    """Run folder, or a checkpoint in one, that the weights come from."""
    made_with: str = ""
    """Hash of configuration and code."""
    time: float = 0.0
    """When it started, unix seconds."""
    status: Status = "RUNNING"
    """A process that was killed outright leaves RUNNING."""
    ended: float | None = None
    """Unix seconds; None while it is RUNNING."""


def read_record(folder: Path) -> RunRecord | None:
    """The record of the last start of a run; None if there is none."""
    record, known = None, {field.name for field in fields(RunRecord)}
    for row in read_events(folder):
        with suppress(KeyError, TypeError):
            if row["event"] == TRACKED:
                record = RunRecord(**{key: value for key, value in row.items() if key in known})
            elif row["event"] == ENDED and record is not None:
                record = replace(record, status=row["status"], ended=row["time"])
    return record


# ---- parameters and tags ----------------------------------------------------------------------


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the sizes alone of its section `launch`."""
    launch = config.get("launch") or {}
    sizes = {key: launch[key] for key in _SENT_SIZES if key in launch}
    return {**config, "launch": sizes} if launch else dict(config)


def shared_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as others may see it."""
    return redact_yaml(yaml.safe_dump(_shared(config), sort_keys=False))


def redact_yaml(text: str) -> str:
    """`redact` a configuration file, and remove values of keys with secret-like names."""
    return _SECRET_LINE.sub(r"\g<key>'***'", redact(text))


def flatten_params(config: Mapping[str, Any]) -> dict[str, str]:
    """Nested configuration -> {dotted key: text as in YAML}, without secrets."""
    params = {}
    for key, value in _leaves(_shared(config), ""):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        text = "***" if _SECRET_KEY.search(key) and value is not None else redact(text)
        params[_ODD_KEY_CHARS.sub("_", key)[:MAX_KEY_CHARS]] = text
    return params


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not key):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def process_tags(version: SourceVersion | None) -> dict[str, str]:
    """Tags about this process: user, version of the code, world size, job."""
    job = os.environ.get("SLURM_JOB_ID")
    tags = {
        "mlflow.source.name": Path(sys.argv[0]).name or "python",
        "mlflow.source.type": "JOB" if job else "LOCAL",
        "vitscale.world_size": os.environ.get("WORLD_SIZE", "1"),
    }
    with suppress(KeyError, OSError):  # containers may run under ids without a name
        tags["mlflow.user"] = getpass.getuser()
    if version is not None:
        tags["mlflow.source.git.commit"] = version.commit
        tags["mlflow.source.git.dirty"] = str(bool(version.patch)).lower()
        tags[CODE_TAG] = version.short
    return tags | ({"vitscale.job_id": job} if job else {})


def origin_line(tags: Mapping[str, str], *, time_s: float) -> str:
    """When, from which commit, on which data and by whom a run was made, in one line."""
    code, user = tags.get(CODE_TAG), tags.get("mlflow.user")
    day = time.strftime("%Y-%m-%d", time.localtime(time_s))
    parts = [day, code and f"commit {code}", tags.get(DATA_TAG), user and f"by {user}"]
    return "; ".join(filter(None, parts))


# ---- addresses --------------------------------------------------------------------------------


def default_uri() -> str:
    """`tracking.uri` of the site file, else DEFAULT_URI. Raises UserErrors of the site file."""
    errors: list[UserError] = []
    tracking = read_site(errors=errors).values.get("tracking")
    if errors:
        raise UserErrors(errors)
    uri = tracking.get("uri") if isinstance(tracking, dict) else None
    return uri if isinstance(uri, str) else DEFAULT_URI


def absolute_uri(uri: str, *, where: str = "tracking.uri") -> str:
    """`uri` with its SQLite path made absolute. Raises UserError for an unsupported URI."""
    path, scheme = sqlite_path(uri), uri.partition(":")[0].partition("+")[0]
    if path is not None and path.name:
        return f"sqlite:///{path.absolute()}"
    if ":" not in uri or scheme not in URI_SCHEMES or scheme == "sqlite":
        others = ", ".join(f"{name}:" for name in URI_SCHEMES[1:])
        raise UserError(
            f"{redact(uri)!r} is not a tracking URI",
            where=where,
            allowed=f"sqlite:///relative/path.db, sqlite:////absolute/path.db, {others}, or null "
            "for no MLflow",
            next_step=f"write {DEFAULT_URI}, or http://HOST:PORT for a server",
        )
    return uri


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite URI; None for other URIs."""
    prefix = "sqlite:///"
    return Path(uri.removeprefix(prefix)) if uri.startswith(prefix) else None


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
