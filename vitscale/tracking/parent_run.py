"""Link a run in MLflow to the run that its weights come from."""

from __future__ import annotations

from pathlib import Path

from vitscale.config.redaction import redact
from vitscale.tracking.mlflow_client import (
    read_link,
)
from vitscale.tracking.run_facts import (
    absolute_uri,
)

PARENT_TAG = "mlflow.parentRunId"


def origin_tags(path: str | Path, *, tag: str, uri: str | None = None) -> dict[str, str]:
    """Tags of a run that uses the weights of another: `tag` with its MLflow run.

    path: a run folder or one of its checkpoints. uri: the store of the run that is tagged, to make
    the other one its parent if it is in the same store.
    """
    path = Path(path)
    link = read_link(path) or read_link(path.parent.parent)
    if link is None:
        return {}
    tags = {tag: link["run_id"]}
    if uri is not None and link.get("uri") == redact(absolute_uri(uri)):
        tags[PARENT_TAG] = link["run_id"]
    return tags
