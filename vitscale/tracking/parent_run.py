"""Parents of MLflow runs: that of a study with its results, and the run that weights come from.

Owns: the link between parent and children, and what the parent of a study holds.
Leaves out: the children's own metrics (`delivery`), connections (`mlflow_client`).

Every call may block or raise: it belongs into a launcher, not into a training loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.config.redaction import redact
from vitscale.tracking.mlflow_client import (
    Say,
    create_run,
    linked_run,
    open_client,
    read_link,
    set_status,
)
from vitscale.tracking.run_facts import (
    CONFIG_ARTIFACT,
    MAX_NOTE_CHARS,
    NOTE_TAG,
    absolute_uri,
    process_tags,
    redact_yaml,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParentRun:
    """An open MLflow run that other runs are nested under."""

    client: Any
    run_id: str
    uri: str

    def adopt(self, folder: Path, *, tags: Mapping[str, str]) -> None:
        """Tag the run of a run folder as a child. Nothing if the folder has none in this store."""
        child = linked_run(self.client, folder, uri=self.uri)
        if child is None:
            return
        for key, value in ({PARENT_TAG: self.run_id} | dict(tags)).items():
            if child.data.tags.get(key) != value:
                self.client.set_tag(child.info.run_id, key, value)

    def write_results(
        self, *, metrics: Mapping[str, float], note: str, files: Sequence[Path]
    ) -> None:
        """Replace the results: metrics of one step, a description in Markdown, and files."""
        for key, value in metrics.items():
            self.client.log_metric(self.run_id, key, value)
        self.client.set_tag(self.run_id, NOTE_TAG, note[:MAX_NOTE_CHARS])
        for file in files:
            self.client.log_artifact(self.run_id, str(file))

    def set_status(self, status: str) -> None:
        set_status(self.client, self.run_id, status)


def open_parent(
    folder: Path,
    *,
    uri: str,
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    config_yaml: str,
    say: Say,
) -> ParentRun:
    """The parent run that the folder's link names; created if there is none."""
    client = open_client(uri, say=say)
    known = linked_run(client, folder, uri=uri)
    if known is not None:
        return ParentRun(client=client, run_id=known.info.run_id, uri=uri)
    folder.mkdir(parents=True, exist_ok=True)
    created = create_run(
        client,
        uri=uri,
        experiment=experiment,
        name=name,
        tags=process_tags() | dict(tags),
        folder=folder,
    )
    run_id = created.info.run_id
    client.log_text(run_id, redact_yaml(config_yaml), CONFIG_ARTIFACT)
    return ParentRun(client=client, run_id=run_id, uri=uri)
