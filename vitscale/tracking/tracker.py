"""Track a run: metrics into its journal at once, and into MLflow by a thread.

The journal is the queue of the thread: memory stays bounded, and a slow server never slows a step.
Importing this module imports neither mlflow nor torch.
"""

from __future__ import annotations

import getpass
import os
import sys
import threading
import uuid
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.config.packaged import SourceVersion, source_version
from vitscale.config.redaction import redact, short_reason
from vitscale.distributed.atomic_files import or_warn, write_text
from vitscale.distributed.events import EVENTS_NAME, append_event
from vitscale.tracking import mlflow_sync
from vitscale.tracking.journal import JOURNAL_NAME, Journal
from vitscale.tracking.settings import TrackingSettings, absolute_uri, sqlite_path

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
        version, config = source_version(), (self.folder / mlflow_sync.CONFIG_NAME).read_bytes()
        made_with = sha256(config + (version.short if version else "").encode()).hexdigest()
        # A start at step 0 continues an unfinished run of the same configuration and code alone,
        # since MLflow cannot replace points.
        last = mlflow_sync.read_record(self.folder)
        is_same = last is not None and last.status != "FINISHED" and last.made_with == made_with
        is_continued = last is not None and (resume_step > 0 or is_same)
        tags = _process_tags(version) | settings.tags | tags | {"vitscale.stage": stage}
        self._record(
            mlflow_sync.TRACKED,
            tracking_id=last.tracking_id if last and is_continued else uuid.uuid4().hex,
            made_with=made_with,
            name=name,
            experiment=settings.experiment,
            uri=None if uri is None else redact(uri),
            tags={key: redact(value) for key, value in tags.items()},
            note=redact(note),
            origin=origin,
        )
        if version is not None and version.patch:
            write_text(self.folder / f"source-{version.short}.diff", redact(version.patch))
        if uri is None:
            return
        if "SLURM_JOB_ID" in os.environ and sqlite_path(uri) is not None:
            say(
                "MLflow: jobs of a cluster cannot share an SQLite file; metrics are in "
                f"{JOURNAL_NAME}, and go to MLflow by "
                f"vitscale compare sync {self.folder} --uri {redact(uri)}"
            )
            return
        mlflow_sync.prepare()
        self._status: mlflow_sync.Status = "RUNNING"
        self._closing, self._is_complete = threading.Event(), False
        # An evaluation takes seconds, and names the page at its end.
        arguments = (uri, settings.system_metrics, resume_step >= 0)
        self._thread = threading.Thread(target=self._deliver, args=arguments, daemon=True)
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

    def close(self, *, status: mlflow_sync.Status) -> None:
        """Flush within a bounded time and record the final status. A second call does nothing."""
        if self._journal is None:
            return
        with or_warn(self._journal.path, self._say):
            self._journal.close()
        self._record(mlflow_sync.ENDED, status=status)
        if self._thread is not None:
            self._status = status
            self._closing.set()
            self._thread.join(FAILED_CLOSE_WAIT_S if status == "FAILED" else CLOSE_WAIT_S)
            if not self._is_complete:
                self._say(
                    "warning: MLflow did not receive everything; all metrics are in "
                    f"{self.folder / JOURNAL_NAME}; "
                    f"vitscale compare sync {self.folder} sends the rest"
                )
        self._journal = self._thread = None

    def _deliver(self, uri: str, watches: bool, says_start: bool) -> None:
        """Send new lines until the run is closed. No failure of the store stops training."""
        run = monitor = None
        pause_s, is_last = 0.0, False
        while not is_last:
            is_last = self._closing.wait(pause_s)
            try:
                if run is None:
                    run = mlflow_sync.MlflowRun(self.folder, uri, say=self._say)
                    if says_start:
                        self._say(f"MLflow: {mlflow_sync.chart_page(uri, run.experiment)}")
                run.sync(self._status)
                if watches and monitor is None:
                    monitor = run.watch_node()
                pause_s = SEND_S
            except Exception as error:
                if pause_s != RETRY_S:
                    self._say(
                        f"warning: MLflow is unreachable ({short_reason(error)}); training "
                        f"continues, metrics are kept in {JOURNAL_NAME} and sent later"
                    )
                run, pause_s = None, RETRY_S
        if run is not None:
            self._is_complete = True
            self._say(f"MLflow: {mlflow_sync.chart_page(uri, run.experiment)}")
            if monitor is not None:
                monitor.finish()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close(status=final_status(error))


def _process_tags(version: SourceVersion | None) -> dict[str, str]:
    """User, version of the code, world size, and job of this process."""
    job = os.environ.get("SLURM_JOB_ID")
    tags = {
        "mlflow.source.name": Path(sys.argv[0]).name or "python",
        "mlflow.source.type": "JOB" if job else "LOCAL",
        "vitscale.world_size": os.environ.get("WORLD_SIZE", "1"),
    }
    with suppress(KeyError, OSError):  # containers may run under ids without a name
        tags["mlflow.user"] = getpass.getuser()
    if version is not None:
        tags["mlflow.source.git.commit"] = version.commit
        tags["mlflow.source.git.dirty"] = str(bool(version.patch)).lower()
        tags[mlflow_sync.CODE_TAG] = version.short
    return tags | ({"vitscale.job_id": job} if job else {})


def final_status(error: BaseException | None) -> mlflow_sync.Status:
    """Status of a run that ended with `error`, or without one.

    A run stopped to be resumed (exit code 75) is PAUSED until a resume sets it RUNNING again.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "FINISHED"
    if isinstance(error, SystemExit) and error.code == EXIT_STOPPED_RESUMABLE:
        return "PAUSED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
