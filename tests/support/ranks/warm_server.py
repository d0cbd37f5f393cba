"""Import everything once, then fork a rank for each request of `warm_ranks`.

Owns: imports, forking, and making a fork look like a fresh `python script.py`.
Leaves out: what runs. Only benchmarks and tests start this way.

Requests come as JSON lines on stdin, answers go as JSON lines to stdout:
{"script", "arguments", "environment", "folder", "log"} -> {"started": PID}, later
{"ended": PID, "code": EXIT_CODE} with subprocess' codes: -9 for SIGKILL. End of input kills all
ranks.

Forks of one server, unlike fresh starts, share the seed of str hashes, the imported modules and the
address layout.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import runpy
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitscale.distributed.fork_server import has_one_thread

# Everything a rank imports, some of it late.
WARMED = (
    "numpy",
    "torch",
    "vitscale.training.session",
    "vitscale.evaluation.classification",
    "vitscale.models.vit",
    "vitscale.training.supervised",
)
# DeepSpeed imports it in `initialize`, and torch.compile with it: 5 s. Not in every release.
WARMED_IF_THERE = ("deepspeed.runtime.zero.muon.original_muon",)
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the input ends. In a forked rank: run its script, and end as Python ends."""
    # Modules and ranks print on descriptor 1.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A fork loses OpenMP's threads and would wait for them. Must be set before torch is imported.
    assert os.environ.get("OMP_NUM_THREADS") == "1", "set by warm_ranks"
    for name in WARMED:
        importlib.import_module(name)
    for name in WARMED_IF_THERE:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _check_threads()
    _send(answers, {"ready": os.getpid()})
    request = _serve(answers)
    if request is not None:
        runpy.run_path(request["script"], run_name="__main__")


def _serve(answers: Any) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in the fork, None in the server at the end."""
    running: dict[int, int] = {}  # pidfd -> pid
    received = b""
    while True:
        readable, _, _ = select.select([0, *running], [], [])
        for fd in readable:
            if fd in running:
                pid = running.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                _send(answers, {"ended": pid, "code": code})
        if 0 not in readable:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
            return None
        *lines, received = (received + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                for fd in running:
                    os.close(fd)
                answers.close()
                _become(request)
                return request
            running[os.pidfd_open(pid)] = pid
            _send(answers, {"started": pid})


def _become(request: dict[str, Any]) -> None:
    """Give this fork what a fresh process has: session, streams, environment, random seeds."""
    # Ranks end with the server.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, target)
    os.close(nothing)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    # A fresh process seeds both from the system; all forks would draw the same numbers.
    random.seed()
    sys.modules["numpy"].random.seed()


def _check_threads() -> None:
    """A fork never releases the locks of other threads, so there may be none."""
    assert threading.active_count() == 1 and has_one_thread()


def _send(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
