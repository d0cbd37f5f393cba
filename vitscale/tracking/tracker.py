"""Track a run's metrics: `log`, `artifact`, `close`.

Owns: writing from one rank only, and the final status of a run.
Leaves out: the journal's format (`journal`), sending (`delivery`), MLflow (`mlflow_store`).

Importing this module imports neither mlflow nor torch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.config.redaction import redact
from vitscale.tracking.delivery import Delivery
from vitscale.tracking.journal import JOURNAL_NAME, Journal, read_rows
from vitscale.tracking.mlflow_store import RunDescription, Say
from vitscale.tracking.run_facts import absolute_uri
from vitscale.tracking.settings import TrackingSettings

Status = Literal["FINISHED", "FAILED", "KILLED"]

# Limit of the wait for the first connection, which imports mlflow (2 s) and may create the database
# (2.5 s; 2 cores, November 2026).
OPEN_WAIT_S = 30.0
CLOSE_WAIT_S = 30.0


def print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Tracker:
    """Metrics of one run, in journal and MLflow. On other ranks every call does nothing."""

    def __init__(
        self, *, folder: Path, journal: Journal | None, delivery: Delivery | None, say: Say
    ) -> None:
        self.folder, self._journal, self._delivery, self._say = folder, journal, delivery, say

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
        say: Say = print_to_stderr,
    ) -> Tracker:
        """Open the journal at `resume_step` (0: from the start) and start sending it to MLflow.

        Raises UserError for an unsupported URI. An unreachable server is not an error.
        """
        folder = Path(folder)
        if not is_writer:
            return cls(folder=folder, journal=None, delivery=None, say=say)
        uri = None if settings.uri is None else absolute_uri(settings.uri)
        journal = Journal(folder / JOURNAL_NAME, resume_step=resume_step)
        if uri is None:
            return cls(folder=folder, journal=journal, delivery=None, say=say)
        first = next(read_rows(journal.path), None)
        description = RunDescription(
            folder=folder,
            uri=uri,
            experiment=settings.experiment,
            run_name=run_name,
            params=params,
            tags=settings.tags | tags | {"vitscale.stage": stage},
            config_yaml=config_yaml,
            resume_step=resume_step,
            start_time=first[0].time if first else time.time(),
        )
        delivery = Delivery(description, journal_path=journal.path, say=say)
        if not delivery.start(wait_s=OPEN_WAIT_S):
            say(f"MLflow at {redact(uri)} did not answer for {OPEN_WAIT_S:.0f} s; training starts")
        return cls(folder=folder, journal=journal, delivery=delivery, say=say)

    @property
    def run_id(self) -> str | None:
        """The MLflow run; None on other ranks, without MLflow, and before the first connection."""
        return None if self._delivery is None else self._delivery.run_id

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Record metrics of a step. Never waits for MLflow."""
        if self._journal is None:
            return
        self._journal.append(metrics, step=step)
        if self._delivery is not None:
            self._delivery.notify()

    def artifact(self, path: str | Path) -> None:
        """Upload a file of the run folder to MLflow, in the background."""
        if self._delivery is not None:
            self._delivery.add_artifact(Path(path))

    def close(self, *, status: Status) -> None:
        """Flush within a bounded time and record the final status. A second call does nothing."""
        if self._journal is not None:
            self._journal.close()
        if self._delivery is not None and not self._delivery.finish(status, wait_s=CLOSE_WAIT_S):
            self._say(
                "warning: MLflow did not receive everything; all metrics are in "
                f"{self.folder / JOURNAL_NAME}; run the same command again to send the rest"
            )
        self._journal = self._delivery = None

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

    A run stopped to be resumed (exit code 75) is KILLED until a resume sets it RUNNING again.
    """
    if error is None:
        return "FINISHED"
    if isinstance(error, KeyboardInterrupt):
        return "KILLED"
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or code == 0:
            return "FINISHED"
        return "KILLED" if code == EXIT_STOPPED_RESUMABLE else "FAILED"
    return "FAILED"
