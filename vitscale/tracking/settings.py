"""Settings of the `tracking` group. Needs no mlflow."""

from __future__ import annotations

from pydantic import Field

from vitscale.config.section import Section


class TrackingSettings(Section):
    """Logging and evaluation intervals, and MLflow."""

    uri: str | None = "sqlite:///runs/mlflow.db"
    """MLflow tracking URI; null: journal.jsonl only."""
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
