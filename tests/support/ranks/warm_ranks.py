"""Start ranks in about a second, by forking a process that has imported everything.

Owns: the client of `warm_server`: starts with a launcher's environment, signals, exit codes, and
the list of processes that ranks leave.
Leaves out: what runs. test_training_runs shows that a cold start gives the same bits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.support.ranks.rank_processes import ROOT
from tests.support.waiting import stacks
from vitscale.distributed.processes import free_port, process_state

SERVER = Path(__file__).with_name("warm_server.py")
# Importing torch, deepspeed and the project takes 8 s on two quiet cores, November 2026.
START_WAIT_S = 300.0


@dataclass(kw_only=True)
class WarmRank:
    """The process of one rank. It leads a session that its loader workers belong to."""

    starter: WarmStarter
    pid: int
    rank: int
    log: Path

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        self.starter.read_answers(wait_s=0)
        return self.starter.exit_codes.get(self.pid)

    def wait(self, *, timeout_s: float) -> int:
        """Its exit code. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                what = f"rank {self.rank} (pid {self.pid}) still runs; log: {self.log}"
                raise TimeoutError(f"{what}\n{stacks(session_of(self.pid))}")
            self.starter.read_answers(wait_s=left)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the rank has ended."""
        if self.poll() is None:
            # It may have been reaped since, and its exit code be on its way.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def output(self) -> str:
        """What it printed, with earlier starts that used the same log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def workers(self) -> list[int]:
        """Process ids of its loader workers: its children are servers."""
        with suppress(psutil.NoSuchProcess):
            servers = psutil.Process(self.pid).children()
            workers = [worker for server in servers for worker in server.children()]
            return [each.pid for each in workers if each.status() != psutil.STATUS_ZOMBIE]
        return []


class WarmStarter:
    """A server process and the ranks forked from it. Leaving the block kills what still runs."""

    def __init__(self, *, environment: Mapping[str, str] | None = None) -> None:
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {})
        # Before an installed vitscale: run the tree of this file.
        paths = [str(ROOT), self.environment.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.exit_codes: dict[int, int] = {}
        self._leaders: list[int] = []
        self._received = b""
        self._started: list[int] = []
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> WarmStarter:
        self._server = subprocess.Popen(
            [sys.executable, SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            start_new_session=True,
        )
        self._ready = False
        deadline = time.monotonic() + START_WAIT_S
        while not self._ready:
            self.read_answers(wait_s=deadline - time.monotonic())
            assert time.monotonic() < deadline, "the warm server does not answer"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None and self._server.stdin is not None
        for leader in self._leaders:
            end_session(leader)
        self._server.stdin.close()
        self._server.wait(timeout=60)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def start(
        self,
        command: Sequence[str | Path],
        *,
        num_ranks: int,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        own_environment: Sequence[Mapping[str, str]] = (),
    ) -> list[WarmRank]:
        """Start `python COMMAND` on each rank; stdout and stderr go to FOLDER/rank-N.log.

        environment: for all ranks; own_environment: one mapping for each rank, over it.
        """
        # The system uses ids again, so a session that is over must not be ended later.
        self._leaders = [leader for leader in self._leaders if session_of(leader)]
        port = str(free_port())
        script, *arguments = map(str, command)
        ranks = []
        for rank in range(num_ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            own = own_environment[rank] if own_environment else {}
            log = folder / f"rank-{rank}.log"
            self._request(
                {
                    "script": str(Path(script).resolve()),
                    "arguments": arguments,
                    "environment": {
                        **self.environment,
                        **variables,
                        **(environment or {}),
                        **own,
                    },
                    "folder": str(folder),
                    "log": str(log),
                }
            )
            while not self._started:
                self.read_answers(wait_s=START_WAIT_S)
            pid = self._started.pop()
            ranks.append(WarmRank(starter=self, pid=pid, rank=rank, log=log))
        return ranks

    def _request(self, request: dict[str, Any]) -> None:
        assert self._server is not None and self._server.stdin is not None
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        self._server.stdin.flush()

    def read_answers(self, *, wait_s: float) -> None:
        """Read the server's messages; wait at most `wait_s` for the first."""
        assert self._server is not None and self._server.stdout is not None
        stream = self._server.stdout
        readable, _, _ = select.select([stream], [], [], max(0.0, wait_s))
        if not readable:
            return
        data = os.read(stream.fileno(), 1 << 16)
        assert data, f"the warm server ended with code {self._server.wait()}"
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "ended" in message:
                self.exit_codes[message["ended"]] = message["code"]
            elif "started" in message:
                # The system reuses process ids.
                self.exit_codes.pop(message["started"], None)
                self._started.append(message["started"])
                self._leaders.append(message["started"])
            else:
                self._ready = True


def session_of(leader: int) -> list[int]:
    """Living processes of the session that a rank leads, itself included."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader and process_state(pid) != "zombie":
                found.append(pid)
    return found


def end_session(leader: int) -> None:
    """SIGKILL a rank and everything it started."""
    for pid in session_of(leader):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
