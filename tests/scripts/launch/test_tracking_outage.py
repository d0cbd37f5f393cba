"""A real MLflow server is killed during training: no step waits, no metric is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S, wait_until
from vitscale.distributed.processes import free_port
from vitscale.tracking import tracker as tracker_module
from vitscale.tracking.mlflow_sync import stored_runs
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

# MLflow's REST server in one process: its own command starts several, for 10 s of processor time.
SERVER = """
import os, sys
import mlflow.server as server
from werkzeug.serving import run_simple

port, folder = sys.argv[1:]
os.environ[server.BACKEND_STORE_URI_ENV_VAR] = f"sqlite:///{folder}/server.db"
os.environ[server.ARTIFACTS_DESTINATION_ENV_VAR] = f"{folder}/artifacts"
os.environ[server.ARTIFACT_ROOT_ENV_VAR] = "mlflow-artifacts:/"
os.environ[server.SERVE_ARTIFACTS_ENV_VAR] = "true"
run_simple("127.0.0.1", int(port), server.app, threaded=True)
"""


class Server:
    def __init__(self, folder: Path) -> None:
        self._log, port = folder / "server.log", str(free_port())
        self._command = [sys.executable, "-c", SERVER, port, str(folder)]
        self.uri = f"http://127.0.0.1:{port}"

    def start(self) -> None:
        environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._log.parent, stdout=log, stderr=log, env=environment
            )
        wait_until(self._answers, every_s=0.2)

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=30)
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_a_killed_server_costs_no_step_and_no_point(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "CLOSE_WAIT_S", PATIENCE_S)
    monkeypatch.setattr(tracker_module, "SEND_S", 0.05)
    said: list[str] = []

    def open_tracker(resume_step: int) -> Tracker:
        return Tracker(
            tmp_path / "run", settings=TrackingSettings(uri=server.uri), name="digits",
            stage="pretrain", tags={}, resume_step=resume_step, is_writer=True, say=said.append,
        )  # fmt: skip

    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("seed: 0\n")
    tracker = open_tracker(0)
    wait_until(lambda: any("MLflow: http" in text for text in said))
    for step in range(1, 41):
        if step == 20:
            server.stop()
        # If it waited for the server, the test would exceed its time limit.
        tracker.log({"train/loss": 1 / step}, step=step)
        time.sleep(0.02)
    tracker.close(status="KILLED")
    assert sum("MLflow cannot be reached" in text for text in said) == 1

    said.clear()
    away = open_tracker(40)  # the server is still down when the job starts again
    away.log({"train/loss": 0.01}, step=41)
    wait_until(lambda: any("training continues" in text for text in said))
    server.start()
    away.log({"train/loss": 0.01}, step=42)
    away.close(status="FINISHED")
    ((run, rows),) = stored_runs(server.uri, "", limit=9)
    assert run.info.status == "FINISHED"
    assert [row.step for row in rows] == list(range(1, 43))
