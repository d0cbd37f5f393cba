"""Track a run's metrics: `log`, `artifact`, `close`.

Owns: writing from one rank only, and the final status of a run.
Leaves out: the journal's format (`journal`), sending (`delivery`), MLflow (`mlflow_run`).

Importing this module imports neither mlflow nor torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.distributed.atomic_files import write_text
from vitscale.distributed.failures.storage import or_warn
from vitscale.tracking.delivery import Delivery
from vitscale.tracking.journal import JOURNAL_NAME, Journal, read_rows
from vitscale.tracking.mlflow_client import Say
from vitscale.tracking.run_facts import (
    DatasetFacts,
    RunDescription,
    RunRecord,
    Status,
    absolute_uri,
    process_tags,
    read_record,
    redact_yaml,
)
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.source_version import source_version

# Limit of the wait for the first connection, which imports mlflow (2 s) and may create the database
# (2.5 s; 2 cores, November 2026).
OPEN_WAIT_S = 30.0
CLOSE_WAIT_S = 30.0
# After a failure, when the process ends within seconds.
FAILED_CLOSE_WAIT_S = 3.0


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Tracker:
    """Metrics of one run, in journal and MLflow. On other ranks every call does nothing."""

    def __init__(
        self,
        *,
        folder: Path,
        journal: Journal | None,
        delivery: Delivery | None,
        record: RunRecord | None,
        say: Say,
    ) -> None:
        self.folder, self._journal, self._delivery, self._say = folder, journal, delivery, say
        self._record = record

    @classmethod
    def open(
        cls,
        *,
        folder: str | Path,
        settings: TrackingSettings,
        run_name: str,
        stage: str,
        params: dict[str, Any],
        tags: dict[str, str],
        config_yaml: str,
        resume_step: int,
        is_writer: bool,
        note: str = "",
        datasets: Sequence[DatasetFacts] = (),
        say: Say = print_to_stderr,
    ) -> Tracker:
        """Open the journal at `resume_step` (0: from the start) and start sending it to MLflow.

        note: description of the run, in Markdown.
        Raises UserError for an unsupported URI. An unreachable server is not an error.
        """
        folder = Path(folder)
        if not is_writer:
            return cls(folder=folder, journal=None, delivery=None, record=None, say=say)
        uri = None if settings.uri is None else absolute_uri(settings.uri)
        journal = Journal(folder / JOURNAL_NAME, resume_step=resume_step)
        known = read_record(folder) if resume_step else None
        record = RunRecord(
            name=run_name,
            experiment=settings.experiment,
            tags=process_tags() | settings.tags | tags | {"vitscale.stage": stage},
            note=note,
            datasets=tuple(datasets),
            files=() if known is None else known.files,
        )
        record.write(folder)
        tracker = cls(folder=folder, journal=journal, delivery=None, record=record, say=say)
        if uri is not None:
            first = next(read_rows(journal.path), None)
            description = RunDescription(
                folder=folder,
                uri=uri,
                record=record,
                params=params,
                config_yaml=config_yaml,
                resume_step=resume_step,
                start_time=first[0].time if first else time.time(),
            )
            tracker._connect(Delivery(description, say=say))
        tracker._keep_diff()
        return tracker

    def _connect(self, delivery: Delivery) -> None:
        self._delivery = delivery
        if not delivery.start(wait_s=OPEN_WAIT_S):
            self._say(f"MLflow did not answer for {OPEN_WAIT_S:.0f} s; training starts")

    def _keep_diff(self) -> None:
        """Write the edits of the checkout beside the run, named after its version."""
        version = source_version()
        if version is not None and version.is_dirty:
            path = self.folder / f"source-{version.short}.diff"
            write_text(path, redact_yaml(version.patch))
            self.artifact(path)

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None on other ranks, without MLflow, and before the first connection."""
        return None if self._delivery is None else self._delivery.run_id

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Record metrics of a step. Never waits for MLflow."""
        if self._journal is None:
            return
        was_refused = self._journal.refused
        self._journal.append(metrics, step=step)
        if (error := self._journal.refused) is not None and was_refused is None:
            self._say(
                f"warning: {self._journal.path}: cannot be written ({error.strerror}); training "
                "goes on, and metrics are kept until there is space"
            )
        if self._delivery is not None:
            self._delivery.notify()

    def artifact(self, path: str | Path) -> None:
        """Upload a file of the run folder to MLflow, in the background."""
        path = Path(path)
        if self._record is not None and path.is_relative_to(self.folder):
            name = path.relative_to(self.folder).as_posix()
            files = tuple(dict.fromkeys([*self._record.files, name]))
            self._note(self._record.model_copy(update={"files": files}))
        if self._delivery is not None:
            self._delivery.add_artifact(path)

    def _note(self, record: RunRecord) -> None:
        self._record = record
        with or_warn(self.folder, self._say):
            record.write(self.folder)

    def close(self, *, status: Status) -> None:
        """Flush within a bounded time and record the final status. A second call does nothing."""
        if self._journal is not None:
            with or_warn(self._journal.path, self._say):
                self._journal.close()
        if self._record is not None:
            self._note(self._record.model_copy(update={"status": status, "ended": time.time()}))
        if self._delivery is not None:
            wait_s = FAILED_CLOSE_WAIT_S if status == "FAILED" else CLOSE_WAIT_S
            if not self._delivery.finish(status, wait_s=wait_s):
                self._say(
                    "warning: MLflow did not receive everything; all metrics are in "
                    f"{self.folder / JOURNAL_NAME}; run the same command again to send the rest"
                )
            elif self._delivery.page is not None:
                self._say(f"MLflow: {self._delivery.page}")
        self._journal = self._delivery = self._record = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(status=final_status(error))


def final_status(error: BaseException | None) -> Status:
    """Status of a run that ended with `error`, or without one.

    A run stopped to be resumed (exit code 75) is PAUSED until a resume sets it RUNNING again.
    """
    if error is None:
        return "FINISHED"
    if isinstance(error, KeyboardInterrupt):
        return "KILLED"
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or code == 0:
            return "FINISHED"
        return "PAUSED" if code == EXIT_STOPPED_RESUMABLE else "FAILED"
    return "FAILED"
