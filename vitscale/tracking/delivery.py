"""Carries the journal to MLflow beside the training loop.

Owns: the thread, what happens while a server is away, and the bounded wait at the end.
Leaves out: the journal's lines (`journal`) and MLflow itself (`mlflow_store`).

The journal is the queue. The thread reads lines behind the place it has sent, so nothing piles up
in memory, a slow server never slows a step, and an outage heals by reading again from the top:
the store is asked which points it holds, and only the others are written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from itertools import islice
from pathlib import Path

from vitscale.config.redaction import redact
from vitscale.tracking.journal import read_rows
from vitscale.tracking.mlflow_store import MlflowRun, RunDescription, Say, open_run

FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
ROWS_PER_ROUND = 200
MAX_WAITING_ARTIFACTS = 100


class Delivery:
    """One daemon thread that keeps an MLflow run equal to a journal."""

    def __init__(self, description: RunDescription, *, journal_path: Path, say: Say) -> None:
        self._description, self._journal_path, self._say = description, journal_path, say
        self._run: MlflowRun | None = None
        self._offset = 0
        self._artifacts: deque[Path] = deque(maxlen=MAX_WAITING_ARTIFACTS)
        self._wake, self._closing, self._settled = (threading.Event() for _ in range(3))
        self._final_status: str | None = None
        self._away_since: float | None = None
        self.run_id: str | None = None
        self.is_complete = False
        self._thread = threading.Thread(target=self._work, name="mlflow-delivery", daemon=True)

    def start(self, *, wait_s: float) -> bool:
        """Begin; wait a bounded time for the first contact. False: it is not made yet."""
        self._thread.start()
        return self._settled.wait(wait_s)

    def notify(self) -> None:
        """There is a new line in the journal."""
        self._wake.set()

    def add_artifact(self, path: Path) -> None:
        self._artifacts.append(path)
        self._wake.set()

    def finish(self, status: str, *, wait_s: float) -> bool:
        """Send what is left and set the final status, within `wait_s`. False: not all arrived."""
        self._final_status = status
        self._closing.set()
        self._wake.set()
        self._thread.join(wait_s)
        return self.is_complete

    def _work(self) -> None:
        pause = FIRST_PAUSE_S
        while not self.is_complete:
            self._wake.clear()  # before looking at `_closing`, or its wake-up could be lost
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
            # Whatever the store does, training goes on; the reason is told below.
            except Exception as error:
                self._tell_away(error)
                if closing:
                    return
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            finally:
                self._settled.set()

    def _catch_up(self) -> None:
        """Connect if needed, then send until nothing is left."""
        if self._run is None:
            self._run = open_run(self._description, say=self._say)
            self.run_id, self._offset = self._run.run_id, 0
        self._settled.set()
        while chunk := list(
            islice(read_rows(self._journal_path, offset=self._offset), ROWS_PER_ROUND)
        ):
            self._run.write(row for row, _ in chunk)
            self._offset = chunk[-1][1]
        while self._artifacts:
            self._upload(self._artifacts[0])
            self._artifacts.popleft()
        if self._away_since is not None:
            away_s = time.monotonic() - self._away_since
            self._say(f"MLflow is back after {away_s:.0f} s; the journal was replayed")
            self._away_since = None

    def _upload(self, path: Path) -> None:
        """Upload a file. One that cannot be uploaded must not hold up the metrics behind it."""
        assert self._run is not None
        try:
            self._run.upload(path)
        except Exception as error:
            self._say(f"warning: {path.name} was not uploaded to MLflow ({_short(error)})")

    def _tell_away(self, error: Exception) -> None:
        """One warning per outage; forget the connection, so that the next try asks anew."""
        self._run = None
        if self._away_since is None:
            self._away_since = time.monotonic()
            self._say(
                f"warning: MLflow cannot be reached ({_short(error)}); training goes on, "
                f"metrics are kept in {self._journal_path.name} and sent later"
            )


def _short(error: Exception) -> str:
    lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
