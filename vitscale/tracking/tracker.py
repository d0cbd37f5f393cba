"""Track a run: metrics into its journal at once, and into MLflow by a thread.

Owns: writing from one rank only, the thread, outages of the server, and the final status of a run.
Leaves out: the journal's format (`journal`), and what MLflow is sent (`mlflow_sync`).

The journal is the queue: memory stays bounded, and a slow server never slows a step.
Importing this module imports neither mlflow nor torch.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.config.redaction import redact, short_reason
from vitscale.distributed.atomic_files import write_text
from vitscale.distributed.events import EVENTS_NAME, append_event
from vitscale.distributed.retry import or_warn
from vitscale.tracking import mlflow_sync
from vitscale.tracking.journal import JOURNAL_NAME, Journal
from vitscale.tracking.run_facts import (
    ENDED,
    MAX_NOTE_CHARS,
    TRACKED,
    Status,
    absolute_uri,
    chart_page,
    clean_tags,
    process_tags,
    redact_yaml,
)
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.source_version import source_version

RETRY_S = 20.0
# Limits of the wait for MLflow at the end of a run; after a failure, the process ends in seconds.
CLOSE_WAIT_S, FAILED_CLOSE_WAIT_S = 30.0, 3.0


class Tracker:
    """Metrics of one run. Its folder has a config.yaml. On other ranks every call does nothing."""

    def __init__(
        self,
        folder: str | Path,
        *,
        settings: TrackingSettings,
        name: str,
        stage: str,
        tags: dict[str, str],
        resume_step: int,
        is_writer: bool,
        note: str = "",
        origin: str | None = None,
        say: mlflow_sync.Say = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        """Open the journal at `resume_step` (0: from the start) and start sending it to MLflow.

        note: description of the run, in Markdown. origin: run folder, or a checkpoint in one, that
        the weights come from.
        Raises UserError for an unsupported URI. An unreachable server is not an error.
        """
        self.folder, self._say = Path(folder), say
        self._journal: Journal | None = None
        self._thread: threading.Thread | None = None
        if not is_writer:
            return
        self._uri = None if settings.uri is None else absolute_uri(settings.uri)
        self._journal = Journal(self.folder / JOURNAL_NAME, resume_step=resume_step)
        self._record(
            TRACKED,
            name=name,
            experiment=settings.experiment,
            tags=clean_tags(process_tags() | settings.tags | tags | {"vitscale.stage": stage}),
            note=redact(note)[:MAX_NOTE_CHARS],
            origin=origin,
        )
        version = source_version()
        if version is not None and version.is_dirty:
            write_text(self.folder / f"source-{version.short}.diff", redact_yaml(version.patch))
        if self._uri is None:
            return
        mlflow_sync.prepare()
        self._starts_anew, self._watches = resume_step == 0, settings.system_metrics
        self._wake, self._closing = threading.Event(), threading.Event()
        self._status: Status = "RUNNING"
        self._is_complete = False
        self._thread = threading.Thread(target=self._deliver, name="mlflow-delivery", daemon=True)
        self._thread.start()

    def _record(self, event: str, **values: object) -> None:
        with or_warn(self.folder / EVENTS_NAME, self._say):
            append_event(self.folder, event, values)

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
        if self._thread is not None:
            self._wake.set()

    def close(self, *, status: Status) -> None:
        """Flush within a bounded time and record the final status. A second call does nothing."""
        if self._journal is None:
            return
        with or_warn(self._journal.path, self._say):
            self._journal.close()
        self._record(ENDED, status=status)
        if self._thread is not None:
            self._status = status
            self._closing.set()
            self._wake.set()
            self._thread.join(FAILED_CLOSE_WAIT_S if status == "FAILED" else CLOSE_WAIT_S)
            if not self._is_complete:
                self._say(
                    "warning: MLflow did not receive everything; all metrics are in "
                    f"{self.folder / JOURNAL_NAME}; "
                    f"python launch/compare.py sync {self.folder} sends the rest"
                )
        self._journal = self._thread = None

    def _deliver(self) -> None:
        """Send each new line until the run is closed. No failure of the store stops training."""
        assert self._uri is not None
        run: mlflow_sync.MlflowRun | None = None
        monitor: Any = None
        is_away = False
        while True:
            self._wake.clear()  # before the status is read, or its wake-up could be lost
            status = self._status if self._closing.is_set() else "RUNNING"
            try:
                before = run
                run = mlflow_sync.sync(
                    self.folder,
                    self._uri,
                    run=run,
                    status=status,
                    starts_anew=self._starts_anew,
                    say=self._say,
                )
                if before is None and not is_away or status != "RUNNING":
                    self._say(f"MLflow: {chart_page(self._uri, run.experiment)}")
                if is_away:
                    self._say("MLflow is reachable again; the journal was sent")
                    is_away = False
                if before is None and self._watches and status == "RUNNING":
                    if monitor is not None:
                        monitor.finish()
                    monitor = mlflow_sync.start_monitor(run, self._uri, say=self._say)
            except Exception as error:
                run = None
                if not is_away:
                    is_away = True
                    self._say(
                        f"warning: MLflow is unreachable ({short_reason(error)}); training "
                        f"continues, metrics are kept in {JOURNAL_NAME} and sent later"
                    )
                if status != "RUNNING":
                    return
                self._closing.wait(RETRY_S)
                continue
            if status != "RUNNING":
                self._is_complete = True
                if monitor is not None:
                    monitor.finish()
                return
            self._wake.wait()

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
        if not error.code:
            return "FINISHED"
        return "PAUSED" if error.code == EXIT_STOPPED_RESUMABLE else "FAILED"
    return "FAILED"
