"""Settings of the `tracking` group, and the addresses of MLflow that they may name."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt

from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import read_site, shorten
from vitscale.config.redaction import redact
from vitscale.config.section import Items, Problems, Section

DEFAULT_URI = "sqlite:///runs/mlflow.db"
MAX_EXPERIMENT_CHARS = 500
OWN_TAGS = "vitscale."
STORE_NAMES = "1 to 250 letters, digits and _ - : / . or spaces, "
STORE_NAMES += "not beginning with . or /, without // and .."
SERVERS = ("http", "https", "postgresql", "mysql", "mssql", "databricks")


class TrackingSettings(Section):
    """Logging and evaluation intervals, and MLflow."""

    uri: str | None = DEFAULT_URI
    """MLflow tracking URI; null: journal.jsonl only."""
    also: Items[Literal["tensorboard", "wandb"]] = ()
    """Stores that get the metrics beside MLflow: tensorboard, wandb."""
    experiment: str = "vitscale"
    """MLflow experiment."""
    log_every_steps: PositiveInt = 50
    """Steps between log lines, of which each save writes one too; metrics are means since the
    last."""
    tags: dict[str, str] = {}
    """Extra MLflow tags."""
    system_metrics: bool = True
    """Send the use of CPU, memory, disk, network and GPUs of the first node to MLflow, a point
    every 30 s."""


def tracking_problems(tracking: TrackingSettings) -> Problems:
    """Yield (dotted key, what is wrong and what is allowed) for what MLflow would refuse later."""
    if tracking.uri is not None:
        try:
            absolute_uri(tracking.uri)
        except UserError as error:
            yield "tracking.uri", f"{error.what}; allowed: {error.allowed}"

    if not 0 < len(tracking.experiment) <= MAX_EXPERIMENT_CHARS:
        what = f"is not 1 to {MAX_EXPERIMENT_CHARS} characters long"
        yield "tracking.experiment", f"{shorten(repr(tracking.experiment))} {what}"

    for name in tracking.tags:
        # The name is not put into the key, since it may have dots and line breaks.
        shown = shorten(repr(name))
        if not is_store_name(name):
            yield (
                "tracking.tags",
                f"{shown} cannot name a tag of MLflow; allowed: {STORE_NAMES}",
            )
        elif name.startswith(OWN_TAGS):
            yield (
                "tracking.tags",
                f"{shown} is vitscale's own; choose a name without {OWN_TAGS}",
            )


def is_store_name(name: str) -> bool:
    """Return True if MLflow takes a metric or a tag of this name; STORE_NAMES describes the rule.

    MLflow refuses whole batches, and with them the run, for one other name.
    """
    has_allowed_chars = re.fullmatch(r"[/\w.\- :]{1,250}", name) is not None
    return (
        # MLflow makes paths of names, so it refuses those that are not in their shortest form.
        has_allowed_chars and posixpath.normpath(name) == name and name[0] not in "./"
    )


def default_uri() -> str:
    """`tracking.uri` of the site file, else DEFAULT_URI. Raises UserErrors of the site file."""
    errors: list[UserError] = []
    tracking = read_site(errors=errors).values.get("tracking", {})
    if errors:
        raise UserErrors(errors)
    uri = tracking.get("uri")
    if isinstance(uri, str):
        return uri
    return DEFAULT_URI


def absolute_uri(uri: str, *, where: str = "tracking.uri") -> str:
    """`uri` with its SQLite path made absolute. Raises UserError for an unsupported URI."""
    # A relative path would mean another database in each folder that a command is started in.
    path = sqlite_path(uri)
    if path is not None and path.name:
        return f"sqlite:///{path.expanduser().absolute()}"
    scheme, colon, _ = uri.partition(":")
    # A dialect may name its driver, as in postgresql+psycopg2.
    if colon and scheme.partition("+")[0] in SERVERS:
        return uri
    raise UserError(
        f"{redact(uri)!r} is not a tracking URI",
        where=where,
        allowed="sqlite:///relative/path.db, sqlite:////absolute/path.db, "
        f"{', '.join(f'{name}:' for name in SERVERS)}, or null for no MLflow",
        next_step=f"write {DEFAULT_URI}, or http://HOST:PORT for a server",
    )


def sqlite_path(uri: str) -> Path | None:
    """The database file of an SQLite URI; None for other URIs."""
    prefix = "sqlite:///"
    if uri.startswith(prefix):
        return Path(uri.removeprefix(prefix))
    return None
