"""Send the journal to MLflow in a background thread.

Owns: the thread, retries while the server is unreachable, and the bounded wait at the end.
Leaves out: the journal's format (`journal`) and MLflow itself (`mlflow_run`).

The journal is the queue. The thread reads from the offset after the last line sent, so memory stays
bounded and a slow server never slows a step. After an outage it reads the journal from the start
and writes only the points that the store lacks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from vitscale.config.redaction import short_reason
from vitscale.tracking.journal import JOURNAL_NAME
from vitscale.tracking.mlflow_client import Say
from vitscale.tracking.mlflow_run import MlflowRun, start_run
from vitscale.tracking.parent_run import PARENT_TAG
from vitscale.tracking.run_facts import RunDescription, chart_page

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
MAX_WAITING_ARTIFACTS = 100


class Delivery:
    """One daemon thread that keeps an MLflow run equal to a journal."""

    def __init__(self, description: RunDescription, *, say: Say) -> None:
        self._description, self._say = description, say
        self._run: MlflowRun | None = None
        self._artifacts: deque[Path] = deque(maxlen=MAX_WAITING_ARTIFACTS)
        self._wake, self._closing, self._settled = (threading.Event() for _ in range(3))
        self._final_status: str | None = None
        self._outage_start: float | None = None
        self.run_id: str | None = None
        self.page: str | None = None
        """Where the run is seen; None before the first connection."""
        self.is_complete = False
        self._thread = threading.Thread(target=self._work, name="mlflow-delivery", daemon=True)

    def start(self, *, wait_s: float) -> bool:
        """Start the thread. Wait up to `wait_s` for a first connection; False without one."""
        self._thread.start()
        return self._settled.wait(wait_s)

    def notify(self) -> None:
        """Wake the thread: the journal has a new line."""
        self._wake.set()

    def add_artifact(self, path: Path) -> None:
        self._artifacts.append(path)
        self._wake.set()

    def finish(self, status: str, *, wait_s: float) -> bool:
        """Send the rest and set the final status, within `wait_s`; False if not complete."""
        self._final_status = status
        self._closing.set()
        self._wake.set()
        self._thread.join(wait_s)
        return self.is_complete

    def _work(self) -> None:
        pause = FIRST_PAUSE_S
        while not self.is_complete:
            self._wake.clear()  # before `_closing` is read, or its wake-up could be lost
            closing = self._closing.is_set()
            try:
                self._catch_up()
                pause = FIRST_PAUSE_S
                if closing:
                    assert self._run is not None and self._final_status is not None
                    self._run.set_status(self._final_status)
                    self.is_complete = True
                else:
                    self._wake.wait()
            # No failure of the store may stop training; the warning names the reason.
            except Exception as error:
                self._warn_outage(error)
                if closing:
                    return
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            finally:
                self._settled.set()

    def _catch_up(self) -> None:
        """Connect if needed, then send until nothing is left."""
        if self._run is None:
            self._run = start_run(self._description, say=self._say)
            self.run_id = self._run.run_id
            if self.page is None:
                is_child = PARENT_TAG in self._description.record.tags
                self.page = chart_page(
                    self._description.uri,
                    self._run.experiment,
                    run=self.run_id if is_child else None,
                )
                self._say(f"MLflow: {self.page}")
        self._settled.set()
        self._run.send_journal()
        while self._artifacts:
            self._upload(self._artifacts[0])
            self._artifacts.popleft()
        if self._outage_start is not None:
            outage_s = time.monotonic() - self._outage_start
            self._say(f"MLflow is reachable again after {outage_s:.0f} s; the journal was replayed")
            self._outage_start = None

    def _upload(self, path: Path) -> None:
        """Upload a file. A failure is a warning: later metrics are still sent."""
        assert self._run is not None
        try:
            self._run.upload(path)
        except Exception as error:
            self._say(f"warning: {path.name} was not uploaded to MLflow ({short_reason(error)})")

    def _warn_outage(self, error: Exception) -> None:
        """Warn once per outage. Drop the connection, so that the next try queries the store."""
        self._run = None
        if self._outage_start is None:
            self._outage_start = time.monotonic()
            self._say(
                f"warning: MLflow is unreachable ({short_reason(error)}); training continues, "
                f"metrics are kept in {JOURNAL_NAME} and sent later"
            )
