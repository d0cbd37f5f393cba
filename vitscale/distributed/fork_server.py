"""Start worker processes from the standard library's fork server, which never has a thread.

A fork of a process with threads copies locks that another thread holds, and the child may wait for
them for ever. The server is a fork of this process, which shares its modules, as long as that has
one thread; else a fresh interpreter, which imports what workers need. A worker is a fork of the
server and starts in milliseconds. It ends with the process that started it, its workers with it.
Needs no torch.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# Signals for the process that starts workers; SLURM and a terminal send them to all.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
ENVIRONMENT = {
    # Libraries for linear algebra and OpenMP start threads at import, one per core.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Otherwise files of the current folder would hide modules.
    "PYTHONSAFEPATH": "1",
}
PR_SET_PDEATHSIG = 1


def start_server(imports: Sequence[str]) -> None:
    """Start the server, unless it runs. Returns at once.

    imports: modules that workers need; those that are missing are left out. What this process has
    imported already costs nothing if it has one thread.
    """
    forkserver.set_forkserver_preload(list(imports))
    # Blocked from before the fork on, so that none of them ends the server or its workers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    saved = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    start_fresh = multiprocessing.util.spawnv_passfds
    os.environ.update(ENVIRONMENT)

    try:
        # Both inherit the mask. Starting the tracker unblocks SIGTERM.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if has_one_thread():
            multiprocessing.util.spawnv_passfds = _fork  # type: ignore[assignment]  # names differ
        forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = start_fresh
        # The environment is for the server alone; this process gets its own values back.
        for name in ENVIRONMENT:
            del os.environ[name]
        os.environ.update(saved)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_worker(
    work: Callable[..., None], arguments: tuple[Any, ...], *, imports: Sequence[str]
) -> ForkServerProcess:
    """Start a worker from the server, which is started if there is none.

    SIGNALS are blocked in it, and nothing of the main script is there. Raises OSError or EOFError.
    """
    start_server(imports)
    worker = ForkServerProcess(target=work, args=arguments, daemon=True)
    main = sys.modules["__main__"]
    # The worker would import the main script, with all that this imports, if it found one.
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        worker.start()
    finally:
        sys.modules["__main__"] = main
    # Python waits for these at exit, without a limit; this one ends with its server.
    multiprocessing.process._children.discard(worker)  # type: ignore[attr-defined]  # private
    return worker


def end_with_server() -> None:
    """Let this worker end when its server does. To be called first."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The server waits until nobody has this pipe; a stopped worker would keep it.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # private


def has_one_thread(pid: int | None = None) -> bool:
    """Whether a fork of a process is safe; None: of this one."""
    pid = pid or os.getpid()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name = (thread / "comm").read_text().strip()
            # jemalloc, which pyarrow has, prepares itself for forks.
            if thread.name != str(pid) and name != "jemalloc_bg_thd":
                return False
    return True


def _fork(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Start Python's server as a fork, instead of a new interpreter."""
    pid = os.fork()
    if pid == 0:
        _become_server(arguments[-1], set(descriptors))
    return pid


def _become_server(command: str, descriptors: set[int]) -> NoReturn:
    """Run the server's command in this fork, with its descriptors alone."""
    try:
        # Otherwise the server would keep pipes and sockets of the trainer open after its end.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in descriptors:
                with suppress(OSError):
                    os.close(int(name))
        gc.freeze()  # a collection would write to all objects, whose pages are shared
        exec(command, {})
    except SystemExit:  # nobody needs workers any more
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        # No exit handlers: they belong to the process that was forked.
        os._exit(0)
