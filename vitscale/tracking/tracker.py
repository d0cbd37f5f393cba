"""Track a run: metrics into its journal at once, and into MLflow by a thread.

Owns: writing from one rank only, the thread, outages of the server, and the final status of a run.
Leaves out: the journal's format (`journal`), and what MLflow is sent (`mlflow_sync`).

The journal is the queue: memory stays bounded, and a slow server never slows a step.
Importing this module imports neither mlflow nor torch.
"""

from __future__ import annotations

import os
import sys
import threading
import uuid
from hashlib import sha256
from pathlib import Path
from typing import Any

from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.config.redaction import redact, short_reason
from vitscale.distributed.atomic_files import write_text
from vitscale.distributed.events import EVENTS_NAME, append_event
from vitscale.distributed.retry import or_warn
from vitscale.tracking import mlflow_sync
from vitscale.tracking.journal import JOURNAL_NAME, Journal
from vitscale.tracking.run_facts import (
    CONFIG_NAME,
    ENDED,
    TRACKED,
    Status,
    absolute_uri,
    chart_page,
    process_tags,
    read_record,
    redact_yaml,
    sqlite_path,
)
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.source_version import source_version

# Between two looks at the journal; after a failure.
SEND_S, RETRY_S = 1.0, 20.0
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
        uri = None if settings.uri is None else absolute_uri(settings.uri)
        self._journal = Journal(self.folder / JOURNAL_NAME, resume_step=resume_step)
        version = source_version()
        made_with = sha256((self.folder / CONFIG_NAME).read_bytes())
        if version is not None:
            made_with.update(version.short.encode())
            if version.patch:
                write_text(self.folder / f"source-{version.short}.diff", redact_yaml(version.patch))
        tags = process_tags(version) | settings.tags | tags | {"vitscale.stage": stage}
        self._record(
            TRACKED,
            tracking_id=self._tracking_id(resume_step, made_with.hexdigest()),
            made_with=made_with.hexdigest(),
            name=name,
            experiment=settings.experiment,
            uri=None if uri is None else redact(uri),
            tags={key: redact(value) for key, value in tags.items()},
            note=redact(note),
            origin=origin,
        )
        if uri is None:
            return
        if "SLURM_JOB_ID" in os.environ and sqlite_path(uri) is not None:
            say(
                "MLflow: jobs of a cluster cannot share an SQLite file; metrics are in "
                f"{JOURNAL_NAME}, and go to MLflow by "
                f"python launch/compare.py sync {self.folder} --uri {redact(uri)}"
            )
            return
        mlflow_sync.prepare()
        self._status: Status = "RUNNING"
        self._closing, self._is_complete = threading.Event(), False
        arguments = (uri, settings.system_metrics)
        self._thread = threading.Thread(target=self._deliver, args=arguments, daemon=True)
        self._thread.start()

    def _tracking_id(self, resume_step: int, made_with: str) -> str:
        """That of the last start if this one continues it, else a new one.

        A start at step 0 continues an unfinished run of the same configuration and code alone,
        since MLflow cannot replace points.
        """
        last = read_record(self.folder)
        if last is not None:
            is_same = last.status != "FINISHED" and last.made_with == made_with
            if resume_step > 0 or is_same:
                return last.tracking_id
        return uuid.uuid4().hex

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
            self._thread.join(FAILED_CLOSE_WAIT_S if status == "FAILED" else CLOSE_WAIT_S)
            if not self._is_complete:
                self._say(
                    "warning: MLflow did not receive everything; all metrics are in "
                    f"{self.folder / JOURNAL_NAME}; "
                    f"python launch/compare.py sync {self.folder} sends the rest"
                )
        self._journal = self._thread = None

    def _deliver(self, uri: str, watches: bool) -> None:
        """Send new lines until the run is closed. No failure of the store stops training."""
        run: mlflow_sync.MlflowRun | None = None
        monitor: Any = None
        is_away = is_last = False
        while not is_last:
            is_last = self._closing.wait(RETRY_S if is_away else SEND_S if run else 0)
            try:
                if run is None:
                    run = mlflow_sync.MlflowRun(self.folder, uri, say=self._say)
                    self._say(f"MLflow: {chart_page(uri, run.experiment)}")
                    if watches and monitor is None:
                        monitor = run.watch_node()
                run.sync(self._status)
                is_away = False
                if is_last:
                    self._is_complete = True
                    self._say(f"MLflow: {chart_page(uri, run.experiment)}")
            except Exception as error:
                run = None
                if not is_away:
                    self._say(
                        f"warning: MLflow is unreachable ({short_reason(error)}); training "
                        f"continues, metrics are kept in {JOURNAL_NAME} and sent later"
                    )
                is_away = True
        if monitor is not None and self._is_complete:
            monitor.finish()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(status=final_status(error))


def final_status(error: BaseException | None) -> Status:
    """Status of a run that ended with `error`, or without one.

    A run stopped to be resumed (exit code 75) is PAUSED until a resume sets it RUNNING again.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "FINISHED"
    if isinstance(error, SystemExit) and error.code == EXIT_STOPPED_RESUMABLE:
        return "PAUSED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
