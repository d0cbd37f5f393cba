"""A real MLflow server is killed during training: no step waits, no metric is lost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S, wait_until
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


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", SERVER, str(port), str(tmp_path)]

    def start() -> subprocess.Popen[bytes]:
        with open(tmp_path / "server.log", "ab") as log:
            server = subprocess.Popen(
                command,
                cwd=tmp_path,
                stdout=log,
                stderr=log,
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
            )
        started.append(server)
        server.address = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]  # our own mark

        def answers() -> bool:
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30)
            except (urllib.error.URLError, OSError):
                return False
            return True

        wait_until(answers, every_s=0.2)
        return server

    yield start
    for server in started:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_killed_server_costs_no_step_and_no_point(
    start_server: Callable[[], subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker_module, "CLOSE_WAIT_S", PATIENCE_S)
    server = start_server()
    uri = server.address  # type: ignore[attr-defined]  # our own mark
    said: list[str] = []

    def open_tracker(resume_step: int) -> Tracker:
        return Tracker(
            tmp_path / "run",
            settings=TrackingSettings(uri=uri),
            name="digits",
            stage="pretrain",
            tags={},
            resume_step=resume_step,
            is_writer=True,
            say=said.append,
        )

    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("seed: 0\n")
    tracker = open_tracker(0)
    wait_until(lambda: any("MLflow: http" in text for text in said))
    for step in range(1, 41):
        if step == 20:
            stop(server)
        # If it waited for the server, the test would exceed its time limit.
        tracker.log({"train/loss": 1 / step}, step=step)
        time.sleep(0.02)
    tracker.close(status="KILLED")
    assert sum("is unreachable" in text for text in said) == 1

    said.clear()
    away = open_tracker(40)  # the server is still down when the job starts again
    away.log({"train/loss": 0.01}, step=41)
    wait_until(lambda: any("training continues" in text for text in said))
    start_server()
    away.log({"train/loss": 0.01}, step=42)
    away.close(status="FINISHED")
    ((run, rows),) = stored_runs(uri, "", limit=9)
    assert run.info.status == "FINISHED"
    assert [row.step for row in rows] == list(range(1, 43))
