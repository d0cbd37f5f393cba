"""Settings of the `tracking` group, and the addresses of MLflow that they may name."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import read_site
from vitscale.config.redaction import redact
from vitscale.config.section import Section

DEFAULT_URI = "sqlite:///runs/mlflow.db"
SERVERS = ("http", "https", "postgresql", "mysql", "mssql", "databricks")


class TrackingSettings(Section):
    """Logging and evaluation intervals, and MLflow."""

    uri: str | None = DEFAULT_URI
    """MLflow tracking URI; null: journal.jsonl only."""
    also: tuple[Literal["tensorboard", "wandb"], ...] = Field(default=(), strict=False)
    """Stores that get the metrics beside MLflow: tensorboard, wandb."""
    experiment: str = "vitscale"
    """MLflow experiment."""
    log_every_steps: int = Field(default=50, gt=0)
    """Steps between log lines, of which each save writes one too; metrics are means since the
    last."""
    tags: dict[str, str] = {}
    """Extra MLflow tags."""
    system_metrics: bool = True
    """Send the use of CPU, memory, disk, network and GPUs of the first node to MLflow, a point
    every 30 s."""


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
    path = sqlite_path(uri)
    if path is not None and path.name:
        return f"sqlite:///{path.absolute()}"
    scheme, colon, _ = uri.partition(":")
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
    return Path(uri.removeprefix(prefix)) if uri.startswith(prefix) else None
