"""End the process of a rank: at once, with its children, whatever still runs in it.

Needs no torch. Leaves out telling the other ranks (`watchdog`).
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from vitscale.config.errors import EXIT_FAILED, FailureKind, run_script
from vitscale.distributed.atomic_files import open_log
from vitscale.distributed.processes import descendants

# From a failure, or the end of a script, until the process is gone.
EXIT_S = 10.0
# The interpreter's own watch needs no GIL, which a hanging extension may hold.
LATER_S = 2.0
STDERR = 2

_exit_code = EXIT_FAILED
_deadline: threading.Timer | None = None


def end_now(exit_code: int) -> None:
    """End this process and its children without clean-up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    kill_children()
    os._exit(exit_code)


def kill_children() -> None:
    """Kill everything that this process has started, with SIGKILL."""
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_soon(exit_code: int) -> None:
    """End this process `EXIT_S` after the first call, with the exit code of the last one.

    It should end before: what it does then is printed.
    """
    global _exit_code, _deadline
    _exit_code = exit_code
    if _deadline is None:
        faulthandler.dump_traceback_later(EXIT_S + LATER_S, exit=True, file=STDERR)
        _deadline = threading.Timer(EXIT_S, _end_late)
        _deadline.daemon = True
        _deadline.start()


def _end_late() -> None:
    with suppress(OSError):
        print(f"error: this process has not ended for {EXIT_S:g} s; it does:", file=sys.stderr)
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    end_now(_exit_code)


def forgive_output() -> None:
    """Let standard output and errors that go to files lose lines when storage refuses them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(io.UnsupportedOperation):  # kept in memory
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                setattr(sys, name, open_log(stream.fileno()))


def run_rank_script(main: Callable[[], None]) -> None:
    """`run_script` for one of several ranks; the process exits through `skip_teardown`."""
    forgive_output()
    code = EXIT_FAILED
    try:
        run_script(main)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    except OSError:
        code = FailureKind.STORAGE.exit_code
        raise
    finally:
        skip_teardown(code)


def skip_teardown(exit_code: int) -> None:
    """Make this process exit with `exit_code` within `EXIT_S`, and without interpreter teardown.

    DeepSpeed keeps process groups, and thereby gloo's threads, alive past
    `destroy_process_group`. A thread that frees a tensor during interpreter teardown aborts the
    process ("terminate called without an active exception", exit code -6), and the launcher
    reports a finished run as failed (pytorch/pytorch#179291).
    Threads are joined, exit handlers run, and output is flushed. The last call sets the exit code.
    """
    end_soon(exit_code)
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    atexit.unregister(_end)
    # First: handlers wait for children, multiprocessing's without a limit.
    kill_children()
    # In the order that multiprocessing uses for its children.
    atexit._run_exitfuncs()
    end_now(_exit_code)
