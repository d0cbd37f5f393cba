"""Processes: count cores, GPUs and threads, find a free port, end a rank with its children.

Needs no torch. Leaves out telling the other ranks (`watchdog`).
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import gc
import io
import os
import random
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from vitscale.config.errors import (
    EXIT_FAILED,
    FailureKind,
    UserError,
    print_note,
    run_script,
)
from vitscale.distributed.atomic_files import open_log

# As in the batch script; below what a socket without a port of its own gets.
PORTS = range(20_000, 32_000)
# Launchers set these for each rank, and login shells for all jobs. Where no launcher started
# this process they belong to another job: its address, or a network that is not here.
LAUNCHER_VARIABLES = """
WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME
NCCL_SOCKET_IFNAME NCCL_COMM_ID
""".split()
# From a failure, or the end of a script, until the process is gone.
EXIT_S = 10.0
# The interpreter's own watch needs no GIL, which a hanging extension may hold.
LATER_S = 2.0
STDERR = 2
# How long imports may take in silence.
LATE_S = 3.0

_exit_code = EXIT_FAILED
_deadline: threading.Timer | None = None


def node_name() -> str:
    """This node's name in SLURM, which may differ from its host name; else the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def free_port() -> int:
    """A TCP port that nothing uses at the moment, of those that systems give to no other socket.

    One of theirs (32768 and more) is often taken before the process that is to listen there has
    started: 15 of 300 times beside 800 other sockets.
    """
    for port in random.sample(PORTS, 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise OSError(
        errno.EADDRINUSE, f"no free port from {PORTS.start} to {PORTS.stop - 1}"
    )


def launcher_variables() -> list[str]:
    """The names of LAUNCHER_VARIABLES that are set."""
    return [name for name in LAUNCHER_VARIABLES if name in os.environ]


def environment_number(name: str, *, least: int, most: int | None = None) -> int:
    """The number in a variable of the environment that is set. Raises UserError."""
    text = os.environ[name]
    # `isdecimal` alone also accepts digits of other scripts.
    number = int(text) if text.isascii() and text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        upper = "" if most is None else f" to {most}"
        raise UserError(
            f"is {text!r} in the environment",
            where=name,
            allowed=f"a number from {least}{upper}",
            next_step="start through deepspeed, vitscale launch or vitscale launch --local; for "
            "one process alone: unset RANK",
        )
    return number


def num_cores() -> int:
    """Cores that this process may use; containers and batch systems allow fewer than exist."""
    return len(os.sched_getaffinity(0))


def num_gpus() -> int:
    """NVIDIA GPUs of this machine, by its driver."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def threads_per_rank(*, world_size: int, local_world_size: int) -> int:
    """CPU threads of this rank: the CPUs of its SLURM task, else its share of the usable cores.

    OMP_NUM_THREADS limits them further.
    """
    threads = num_cores() // local_world_size
    # Where srun started each rank; a launcher inside one task shares its CPUs.
    if os.environ.get("SLURM_STEP_NUM_TASKS") == str(world_size):
        threads = min(num_cores(), int(os.environ.get("SLURM_CPUS_PER_TASK", threads)))
    # A list has one number for each level of nested regions.
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if limit.isdecimal():
        threads = min(threads, int(limit))
    return max(1, threads)


def process_state(pid: int) -> str:
    """The kernel's state of a process, such as `running`, `stopped`, `disk-sleep`; or `gone`."""
    import psutil  # 10 ms, which commands that only count cores do not need

    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return "gone"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs. A zombie (not reaped by its parent) is dead."""
    return process_state(pid) not in ("gone", "zombie")


def descendants(pid: int) -> list[int]:
    """Processes that a process of this machine has started, and theirs."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@cache  # Once: a command imports in several steps.
def _say_loading() -> None:
    print_note("loading libraries, which may take a minute")


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without searching for garbage, which takes a fifth of the time of torch's imports.

    It is said where it takes long, as from a cold disk.
    """
    gc.disable()
    late = threading.Timer(LATE_S, _say_loading)
    late.start()
    try:
        yield
    finally:
        # No thread may be left where a server of workers is forked.
        late.cancel()
        late.join()
        # Imported modules stay, so no later search needs to look at them.
        gc.freeze()
        gc.enable()


# ---- the end of a rank --------------------------------------------------------------------------


def end_now(exit_code: int) -> None:
    """End this process and its children without clean-up."""
    for stream in (sys.stdout, sys.stderr):
        # A broken pipe or a full disk must not keep the process from ending.
        with suppress(OSError, ValueError):
            stream.flush()
    kill_children()
    os._exit(exit_code)


def kill_children(parent: int | None = None) -> None:
    """Kill everything that a process has started, with SIGKILL. parent: None: this process."""
    for pid in descendants(parent or os.getpid()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def end_soon(exit_code: int) -> None:
    """End this process `EXIT_S` after the first call, with the exit code of the last one.

    It should end before: what it does then is printed.
    """
    global _exit_code, _deadline
    _exit_code = exit_code
    if _deadline is None:
        # The timer below needs the GIL. If an extension holds it, this watch ends the process.
        faulthandler.dump_traceback_later(EXIT_S + LATER_S, exit=True, file=STDERR)
        _deadline = threading.Timer(EXIT_S, _end_late)
        _deadline.daemon = True
        _deadline.start()


def _end_late() -> None:
    with suppress(OSError):
        print_note(f"error: this process has not ended for {EXIT_S:g} s; it does:")
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    end_now(_exit_code)


def forgive_output() -> None:
    """Let standard output and errors that go to files lose lines when storage refuses them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(io.UnsupportedOperation):  # kept in memory
            # Pipes and terminals stay as they are: only files can run out of space.
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                setattr(sys, name, open_log(stream.fileno()))


def run_rank_script(main: Callable[[], None]) -> None:
    """`run_script` for one of several ranks; the process exits through `skip_teardown`."""
    forgive_output()
    code = EXIT_FAILED
    try:
        run_script(main, is_rank=True)
        code = 0
    except SystemExit as stop:
        # As the interpreter does it: None is success, and any other object is an error.
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
    # Registered last, so that it runs first, before handlers that may wait.
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    # Unregistered, since it runs the remaining handlers itself.
    atexit.unregister(_end)
    # First: handlers wait for children, multiprocessing's without a limit.
    kill_children()
    # This is the order that multiprocessing uses for its children.
    atexit._run_exitfuncs()
    end_now(_exit_code)
