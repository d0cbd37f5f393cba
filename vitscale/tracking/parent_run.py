"""The MLflow run above the runs of a study: created once, tagged on its children, with the results.

Owns: the link between parent and children, and what the parent holds.
Leaves out: the children's own metrics (`delivery`), connections (`mlflow_store`).

Every call may block or raise: it belongs into a launcher, not into a training loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.tracking.mlflow_store import (
    CONFIG_ARTIFACT,
    Say,
    experiment_id,
    linked_run,
    open_client,
    write_link,
)
from vitscale.tracking.run_facts import process_tags, redact_yaml

PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
# MLflow cuts longer notes without a word (3.17).
MAX_NOTE_CHARS = 8000


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
        if status == "RUNNING":
            self.client.update_run(self.run_id, status=status)
        else:
            self.client.set_terminated(self.run_id, status=status)


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
    created = client.create_run(
        experiment_id(client, experiment, uri=uri), run_name=name, tags=process_tags() | dict(tags)
    )
    run_id = created.info.run_id
    client.log_text(run_id, redact_yaml(config_yaml), CONFIG_ARTIFACT)
    folder.mkdir(parents=True, exist_ok=True)
    write_link(folder, uri=uri, experiment=experiment, run_id=run_id)
    return ParentRun(client=client, run_id=run_id, uri=uri)
