"""Start ranks in about a second, as forks of a process that has imported everything.

Owns: starts with a launcher's environment, what makes a fork look like a fresh `python script.py`,
signals, exit codes, and the list of processes that ranks leave.
Leaves out: what runs. test_training_runs shows that a cold start gives the same bits.

The process is a fork server of the standard library, which reports process ids and exit codes.
Forks of one server, unlike fresh starts, share the seed of str hashes, the imported modules and the
address layout.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import random
import runpy
import select
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.forkserver import ForkServer, read_signed
from pathlib import Path
from unittest import mock

import psutil

from tests.support.waiting import ROOT, stacks
from vitscale.distributed.fork_server import end_with_server, has_one_thread
from vitscale.distributed.processes import free_port, process_state

# Everything a rank imports, some of it late. DeepSpeed imports the last one, which is not in every
# release, in `initialize`, and torch.compile with it: 5 s.
WARMED = [
    __name__,
    *"""
    numpy torch vitscale.training.session vitscale.evaluation.classification vitscale.models.vit
    vitscale.objectives.teacher vitscale.objectives.losses vitscale.config.command_line
    pretrain.run finetune.run finetune.settings matplotlib.figure
    matplotlib.backends.backend_agg deepspeed.runtime.zero.muon.original_muon
    """.split(),
]


@dataclass
class Script:
    path: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    log: str

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the script as Python does; returns the exit code. The server calls this."""
        assert has_one_thread(os.getppid()), (
            "a fork never releases the locks of other threads"
        )
        end_with_server()
        # A session of its own: whatever the rank starts can be found, and ended with it.
        os.setsid()
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(fd, target)
        os.environ.clear()
        os.environ.update(self.environment)

        # It reads the environment once.
        importlib.reload(sys.modules["huggingface_hub.constants"])
        os.chdir(self.folder)
        sys.argv = [self.path, *self.arguments]
        sys.path[0] = str(Path(self.path).parent)

        # A fresh process seeds both from the system; all forks would draw the same numbers.
        random.seed()
        sys.modules["numpy"].random.seed()
        code = 0
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as end:
            # As Python does: None is success, and a text is an error.
            code = end.code
            if not isinstance(code, int):
                code = int(code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        threading._shutdown()  # as at Python's end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        return code


@dataclass
class WarmRank:
    """The process of one rank. It leads a session that its loader workers belong to."""

    pid: int
    rank: int
    log: Path
    status: int
    """Descriptor that has the exit code, once there is one."""
    _code: int | None = field(default=None, init=False)

    def poll(self, *, wait_s: float = 0.0) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        # Unlike select, it takes descriptors above 1023.
        poller = select.poll()
        if self._code is None:
            poller.register(self.status, select.POLLIN)
        if self._code is None and poller.poll(1000 * wait_s):
            self._code = read_signed(self.status)
            os.close(self.status)
        return self._code

    def wait(self, *, timeout_s: float) -> int:
        code = self.poll(wait_s=timeout_s)
        if code is None:
            message = f"rank {self.rank} (pid {self.pid}) still runs; log: {self.log}"
            raise TimeoutError(f"{message}\n{stacks(session_of(self.pid))}")
        return code

    def send_signal(self, number: int):
        if self.poll() is None:
            # It may have been reaped since, and its exit code be on its way.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def output(self) -> str:
        """What it printed, with earlier starts that used the same log."""
        if not self.log.exists():
            return ""
        return self.log.read_text(errors="replace")

    def workers(self) -> list[int]:
        """Process ids of its loader workers: its children are servers."""
        with suppress(psutil.NoSuchProcess):
            pids = []
            for server in psutil.Process(self.pid).children():
                for worker in server.children():
                    # One that has ended stays until its server asks for its exit code.
                    if worker.status() != psutil.STATUS_ZOMBIE:
                        pids.append(worker.pid)
            return pids
        return []


class WarmStarter:
    """A server and the ranks forked from it. Leaving the block kills what still runs."""

    def __init__(self):
        # Before an installed vitscale: run the tree of this file. OpenMP's threads would be lost
        # in a fork, which waits for them.
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._server = ForkServer()
        self._leaders = []

    def __enter__(self) -> WarmStarter:
        self._server.set_forkserver_preload(list(WARMED))
        with mock.patch.dict(os.environ, self.environment):
            self._server.ensure_running()
        return self

    def __exit__(self, *_):
        for leader in self._leaders:
            end_session(leader)
        self._server._stop()

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
        path, *arguments = map(str, command)
        ranks = []
        for rank in range(num_ranks):
            # What a launcher sets; a test may set more, or other values.
            variables = {
                **self.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                **(environment or {}),
            }
            if own_environment:
                variables |= own_environment[rank]
            log = folder / f"rank-{rank}.log"
            script = Script(
                path=str(Path(path).resolve()),
                arguments=arguments,
                environment=variables,
                folder=str(folder),
                log=str(log),
            )
            status, request = self._server.connect_to_new_process([])
            with open(request, "wb") as file:
                # What a Process of the standard library sends: preparations, and itself.
                pickle.dump({}, file)
                pickle.dump(script, file)
            pid = read_signed(status)
            self._leaders.append(pid)
            ranks.append(WarmRank(pid=pid, rank=rank, log=log, status=status))
        return ranks


def session_of(leader: int) -> list[int]:
    """Living processes of the session that a rank leads, itself included."""
    living = []
    for pid in psutil.pids():
        # A process may end while its state is read.
        with suppress(ProcessLookupError):
            if os.getsid(pid) == leader and process_state(pid) != "zombie":
                living.append(pid)
    return living


def end_session(leader: int):
    """SIGKILL a rank and everything it started."""
    for pid in session_of(leader):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
