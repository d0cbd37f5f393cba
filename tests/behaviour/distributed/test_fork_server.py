"""The server of worker processes: no threads, no signals, nothing of the main script."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vitscale.distributed.fork_server import (
    ENVIRONMENT,
    SIGNALS,
    has_one_thread,
    start_server,
    start_worker,
)

IMPORTS = ("vitscale.data.loader", "no_such_module")


def describe(connection: Connection) -> None:
    facts: dict[str, Any] = {
        "parent": os.getppid(),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "has one thread": has_one_thread(),
    }
    connection.send(facts)
    connection.recv()


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another server than that of earlier tests in this process, which has other imports."""
    server: Any = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    ended = threading.Event()
    threading.Thread(target=ended.wait).start()  # a fork of this process would not be safe
    yield
    ended.set()
    server._stop()


@pytest.mark.usefixtures("own_server")
def test_workers_come_from_a_process_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after its imports, which start threads of linear algebra by default."""
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "script.py")
    (tmp_path / "script.py").write_text("raise SystemExit('the script was imported')")
    monkeypatch.setitem(sys.modules, "__main__", main)
    environment, mask = dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ours, theirs = Pipe()
    worker = start_worker(describe, (theirs,), imports=IMPORTS)
    assert dict(os.environ) == environment
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert ours.poll(30), "the worker hangs"
    facts = ours.recv()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # of Python
    assert facts["parent"] == server != os.getpid()
    assert facts["main"] is None and facts["has one thread"]
    assert facts["mask"] >= set(SIGNALS)
    assert has_one_thread(server)
    given = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    assert {f"{name}={value}".encode() for name, value in ENVIRONMENT.items()} <= set(given)
    assert "libtorch_cpu" in Path(f"/proc/{server}/maps").read_text()
    for number in SIGNALS:
        os.kill(server, number)
        os.kill(facts["parent"], number)
    ours.send("end")
    worker.join(30)
    assert worker.exitcode == 0
    start_server(IMPORTS)
    assert forkserver._forkserver._forkserver_pid == server  # type: ignore[attr-defined]  # same


def test_threads_that_end_meanwhile_are_no_error() -> None:
    """One check in seventy meets one."""
    for _ in range(2000):
        threading.Thread(target=int).start()
        has_one_thread()
