"""Track a run: metrics into its journal at once, and into each store outside by a thread.

The journal is the queue of the threads: memory stays bounded, and a slow server never slows a step.
Importing this module imports neither mlflow nor torch.
"""

from __future__ import annotations

import getpass
import importlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from shlex import quote

from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, print_note
from vitscale.config.packaged import SourceVersion, source_version
from vitscale.config.redaction import redact, short_reason
from vitscale.distributed.atomic_files import Say, or_warn, write_text
from vitscale.distributed.events import EVENTS_NAME, append_event
from vitscale.tracking import mlflow_sync
from vitscale.tracking.journal import JOURNAL_NAME, Journal
from vitscale.tracking.settings import TrackingSettings, absolute_uri, sqlite_path

# Pause between two looks at the journal, and after a store has failed.
SEND_S = 1.0
RETRY_S = 20.0
# A run that has ended waits this long for its stores; one that has failed ends in seconds.
CLOSE_WAIT_S = 30.0
FAILED_CLOSE_WAIT_S = 3.0
Opener = Callable[[Path], mlflow_sync.RunReader]


def reader_of(name: str, *, where: str) -> Opener:
    """What sends a run folder to a store of `tracking.also`. Raises UserError without its package.

    Imports the package: in a training not by a thread, since imports may interfere.
    """
    try:
        module = importlib.import_module(f"vitscale.tracking.{name}_sync")
    except ImportError as error:
        raise UserError(
            f"{name} cannot be imported: {error}",
            where=where,
            allowed="packages that are installed",
            next_step=f"pip install 'vitscale[{name}]'; "
            f"in a checkout: pip install -e '.[{name}]'",
        ) from None
    reader: Opener = module.Reader
    return reader


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
        say: Say = print_note,
    ) -> None:
        """Open the journal at `resume_step` (0: from the start) and start sending it.

        note: description of the run, in Markdown. origin: run folder, or a checkpoint in one, that
        the weights come from.
        Raises UserError for an unsupported URI or a missing package. An unreachable server is not
        an error.
        """
        self.folder = Path(folder)
        self._say = say
        self._journal: Journal | None = None
        self._threads: dict[str, threading.Thread] = {}
        if not is_writer:
            return

        # A missing package or an invalid address is an error before anything is written.
        uri = None
        self._uri: str | None = None
        if settings.uri is not None:
            uri = absolute_uri(settings.uri)
            self._uri = redact(uri)
        openers = {
            str(store): reader_of(store, where="tracking.also")
            for store in settings.also
        }

        self._journal = Journal(self.folder / JOURNAL_NAME, resume_step=resume_step)
        # Lines may be missing where the disk refused them before a kill.
        if resume_step - self._journal.last_step >= settings.log_every_steps:
            say(
                f"{JOURNAL_NAME} has no lines of steps "
                f"{self._journal.last_step + 1} to {resume_step}"
            )

        # One value for the configuration and the code that make this run.
        version = source_version()
        makers = (self.folder / mlflow_sync.CONFIG_NAME).read_bytes()
        if version is not None:
            makers += version.short.encode()
        made_with = sha256(makers).hexdigest()

        tracking_id = uuid.uuid4().hex
        before = mlflow_sync.read_record(self.folder)
        own = mlflow_sync.own_record(self.folder)
        if before is not None and own is not None:
            # A start at step 0 continues an unfinished run of the same configuration and code
            # alone, since MLflow cannot replace points.
            is_same = own.status != "FINISHED" and own.made_with == made_with
            # A folder that goes on under another name is another run, wherever its original is.
            if before.name == name and (resume_step > 0 or is_same):
                tracking_id = own.tracking_id
            # A copy that is resumed names its original.
            if resume_step > 0 and before.tracking_id != tracking_id:
                tags = tags | {mlflow_sync.COPY_TAG: before.tracking_id}
        tags = _process_tags(version) | settings.tags | tags | {"vitscale.stage": stage}

        self._record(
            mlflow_sync.TRACKED,
            tracking_id=tracking_id,
            folder=str(self.folder.resolve()),
            made_with=made_with,
            name=name,
            experiment=settings.experiment,
            uri=self._uri,
            tags={key: redact(value) for key, value in tags.items()},
            note=redact(note),
            origin=origin,
        )
        # Edits that are not committed are kept, since the commit alone does not give this code.
        if version is not None and version.patch:
            patch_path = self.folder / f"source-{version.short}.diff"
            write_text(patch_path, redact(version.patch))

        is_job = "SLURM_JOB_ID" in os.environ
        if uri is not None and is_job and sqlite_path(uri) is not None:
            say(
                "MLflow: jobs of a cluster cannot share an SQLite file; metrics are in "
                f"{JOURNAL_NAME}, and go to MLflow by "
                f"vitscale compare sync {quote(str(self.folder))} --uri {quote(str(self._uri))}"
            )
        elif uri is not None:
            mlflow_sync.prepare()
            openers["MLflow"] = partial(mlflow_sync.MlflowRun, uri=uri, say=say)

        self._status: mlflow_sync.Status = "RUNNING"
        self._closing = threading.Event()
        self._complete: set[str] = set()
        for store, opener in openers.items():
            # An evaluation takes seconds, and names the page at its end.
            arguments = (store, opener, settings.system_metrics, resume_step >= 0)
            thread = threading.Thread(target=self._deliver, args=arguments, daemon=True)
            self._threads[store] = thread
            thread.start()

    def _record(self, event: str, **values: object) -> None:
        with or_warn(self.folder / EVENTS_NAME, self._say):
            append_event(self.folder, event, values)

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        """Record metrics of a step. Never waits for MLflow."""
        if self._journal is None:
            return
        was_refused = self._journal.refused
        self._journal.append(metrics, step=step)
        error = self._journal.refused
        # Said once, at the first line that is refused.
        if error is not None and was_refused is None:
            self._say(
                f"warning: {self._journal.path}: cannot be written ({error.strerror}); training "
                "goes on, and metrics are kept until there is space"
            )

    def flush(self) -> None:
        """Let all that was logged survive power loss. Any thread may call it. Raises OSError."""
        # `close` may take it away meanwhile.
        journal = self._journal
        if journal is not None:
            journal.flush()

    def close(self, *, status: mlflow_sync.Status) -> None:
        """Flush within a bounded time and record the final status. A second call does nothing."""
        if self._journal is None:
            return
        with or_warn(self._journal.path, self._say):
            # The journal comes first, since the threads send what is in it.
            self._journal.close()
        self._record(mlflow_sync.ENDED, status=status)
        self._status = status
        self._closing.set()

        # All stores together get this time.
        wait_s = CLOSE_WAIT_S
        if status in ("FAILED", "KILLED"):
            wait_s = FAILED_CLOSE_WAIT_S
        deadline = time.monotonic() + wait_s
        for name, thread in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if name not in self._complete:
                to = f"--to {name}"
                if name == "MLflow":
                    to = f"--uri {quote(str(self._uri))}"
                self._say(
                    f"warning: {name} did not receive everything; all metrics are in "
                    f"{self.folder / JOURNAL_NAME}; "
                    f"vitscale compare sync {quote(str(self.folder))} {to} sends the rest"
                )
        self._journal = None

    def _deliver(
        self, name: str, opener: Opener, watches: bool, says_start: bool
    ) -> None:
        """Send new lines until the run is closed. No failure of the store stops training."""
        reader = None
        monitor = None
        pause_s = 0.0
        is_last = False
        while not is_last:
            # The last round begins after the run has been closed, so that it sends everything.
            is_last = self._closing.wait(pause_s)
            try:
                if reader is None:
                    reader = opener(self.folder)
                    if says_start:
                        self._say(f"{name}: {reader.page}")
                        says_start = False
                reader.sync(self._status if is_last else "RUNNING")

                # MLflow alone has a page for the use of a node.
                wants_monitor = watches and monitor is None
                if wants_monitor and isinstance(reader, mlflow_sync.MlflowRun):
                    monitor = reader.watch_node()
                pause_s = SEND_S
            except Exception as error:
                # Said once for each failure, not at every try.
                if pause_s != RETRY_S:
                    self._say(
                        f"warning: {name} cannot be reached or written ({short_reason(error)}); "
                        f"training continues, metrics are kept in {JOURNAL_NAME} and sent later"
                    )
                # A reader that has failed does not know what arrived.
                reader = None
                pause_s = RETRY_S

        # A reader is left only if its last round succeeded.
        if reader is not None:
            self._complete.add(name)
            self._say(f"{name}: {reader.page}")
            if monitor is not None:
                monitor.finish()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, _kind: object, error: BaseException | None, _trace: object
    ) -> None:
        self.close(status=final_status(error))


def _process_tags(version: SourceVersion | None) -> dict[str, str]:
    """User, version of the code, world size, and job of this process."""
    tags = {
        "mlflow.source.name": Path(sys.argv[0]).name or "python",
        "vitscale.world_size": os.environ.get("WORLD_SIZE", "1"),
    }
    if job := os.environ.get("SLURM_JOB_ID"):
        tags["vitscale.job_id"] = job

    # Containers may run under ids without a name.
    with suppress(KeyError, OSError):
        tags["mlflow.user"] = getpass.getuser()

    if version is not None:
        tags["mlflow.source.git.commit"] = version.commit
        tags[mlflow_sync.CODE_TAG] = version.short
    return tags


def final_status(error: BaseException | None) -> mlflow_sync.Status:
    """Status of a run that ended with `error`, or without one.

    A run stopped to be resumed (exit code 75) is PAUSED until a resume sets it RUNNING again.
    """
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "FINISHED"
    if isinstance(error, SystemExit) and error.code == EXIT_STOPPED_RESUMABLE:
        return "PAUSED"
    if isinstance(error, KeyboardInterrupt):
        return "KILLED"
    return "FAILED"
