"""Servers that do not answer, packages of wrong versions, SLURM that is not there; the table."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from launch.planning.checks import as_json, as_table, failed, ok, raise_errors, warning, worst
from launch.planning.cluster_checks import slurm_limits, tracking_server, versions
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.launching import LaunchSettings


@pytest.fixture
def server() -> Iterator[str]:
    """Answers /CODE/health with this code."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, code, page = self.path.split("/")
            assert page == "health"
            self.send_response(int(code))
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    found = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield f"127.0.0.1:{found.server_address[1]}"
    found.shutdown()
    thread.join()
    found.server_close()


def test_a_server_that_does_not_work_is_a_warning(server: str) -> None:
    # A refusal comes from a server that works.
    results = {
        code: tracking_server(f"http://user:word@{server}/{code}")[0]
        for code in (200, 401, 404, 500, 503)
    }
    assert [each.result for each in results.values()] == ["ok", "ok", "ok", "warning", "warning"]
    assert "answers 500" in results[500].detail
    assert not [each for each in results.values() if "word" in each.detail]


@pytest.mark.parametrize("uri", ["http://127.0.0.1:{port}", "http://:0", "https://a b:99999"])
def test_no_server_is_a_warning(uri: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # never listens
        check = tracking_server(uri.format(port=bound.getsockname()[1]))[0]
    assert check.result == "warning" and "does not answer" in check.detail


def test_other_stores_are_not_asked() -> None:
    assert tracking_server(None)[0].detail.startswith("journal.jsonl only")
    assert tracking_server("sqlite:///runs/mlflow.db")[0].result == "ok"


def test_every_package_out_of_range_is_named() -> None:
    wanted = ["numpy>=1", "torch>=99", "no-such-package>=2", 'onnx>=99; extra == "onnx"']
    with pytest.raises(UserErrors) as error:
        list(versions(wanted, LaunchSettings()))
    rows = [check.detail for check in failed("versions", error.value)]
    assert len(rows) == 2
    assert rows[0].startswith("torch: ") and rows[0].endswith("allowed: >=99")
    assert rows[1] == "no-such-package: is not installed; allowed: >=2"
    # The job's own interpreter is another one.
    (check,) = versions(wanted, LaunchSettings(python="srun-container python"))
    assert check.result == "ok" and "srun-container" in check.detail


def test_slurm_may_be_absent_or_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = slurm_limits(LaunchSettings())
    assert check.result == "ok" and "no SLURM" in check.detail
    for name in ("sbatch", "scontrol"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
        program.chmod(0o755)
    (check,) = slurm_limits(LaunchSettings())
    assert check.result == "warning" and "Unable to contact" in check.detail


def test_the_table_names_each_check_once() -> None:
    error = UserErrors(
        [
            UserError("missing", where="a.tar", allowed="x", next_step="copy it"),
            UserError("two\nlines"),
        ]
    )
    checks = [
        ok("configuration", "pretrain"),
        *failed("data", error),
        warning("tracking", "no answer", next_step="start it"),
    ]
    assert as_table(checks) == (
        "check          result   detail\n"
        "configuration  ok       pretrain\n"
        "data           error    a.tar: missing; allowed: x\n"
        "                        next: copy it\n"
        "               error    two\n"
        "                        lines\n"
        "tracking       warning  no answer\n"
        "                        next: start it"
    )
    found = json.loads(as_json(checks))
    assert found["result"] == worst(checks) == "error"
    assert found["checks"][1] == {
        "check": "data",
        "result": "error",
        "detail": "a.tar: missing; allowed: x",
        "next_step": "copy it",
    }
    with pytest.raises(UserErrors) as raised:
        raise_errors(checks)
    assert raised.value.errors == error.errors
    raise_errors([checks[0], checks[-1]])
    assert worst([checks[0]]) == "ok" and worst([checks[0], checks[-1]]) == "warning"
