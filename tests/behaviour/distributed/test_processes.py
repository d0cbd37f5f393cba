"""Cores, liveness of processes, free ports, the end of a rank, and the server of workers."""

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from multiprocessing.connection import Pipe
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.tables import every, rows
from tests.support.waiting import run_python, wait_until
from vitscale.distributed import processes
from vitscale.distributed.fork_server import (
    ENVIRONMENT,
    SIGNALS,
    has_one_thread,
    start_server,
    start_worker,
)
from vitscale.distributed.processes import (
    free_port,
    is_alive,
    process_state,
    quick_imports,
    threads_per_rank,
)


# Ranks of the node, variables, and the threads of each.
@rows("""
- [local_ranks, environment, threads]
- [1, {}, 8]
- [2, {}, 4]
- [16, {}, 1]
- [2, {SLURM_STEP_NUM_TASKS: "4", SLURM_CPUS_PER_TASK: "3"}, 3]
- [2, {SLURM_STEP_NUM_TASKS: "4", SLURM_CPUS_PER_TASK: "12"}, 8]
# A launcher inside one task of each node, and one in a batch script.
- [2, {SLURM_STEP_NUM_TASKS: "2", SLURM_CPUS_PER_TASK: "8"}, 4]
- [2, {SLURM_CPUS_PER_TASK: "8"}, 4]
- [1, {OMP_NUM_THREADS: "4,2"}, 4]
- [4, {OMP_NUM_THREADS: "4"}, 2]
- [1, {OMP_NUM_THREADS: ""}, 8]
- [1, {OMP_NUM_THREADS: "-1"}, 8]
- [1, {OMP_NUM_THREADS: "²"}, 8]
- [1, {OMP_NUM_THREADS: "0"}, 1]
""")
def test_ranks_share_the_cores_of_a_node(
    monkeypatch, local_ranks, environment, threads
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "environ", environment)
    assert threads_per_rank(world_size=4, local_world_size=local_ranks) == threads


def test_a_zombie_counts_as_dead():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pids = (process.pid, os.getpid(), 1)
    assert all(map(is_alive, pids))

    # Killed, but nobody has asked for its exit code yet.
    process.kill()
    wait_until(lambda: process_state(process.pid) == "zombie")
    assert not is_alive(process.pid)
    process.wait()
    assert not is_alive(process.pid)
    assert process_state(process.pid) == "gone"


def test_a_free_port_is_none_that_other_sockets_get():
    port = free_port()
    with socket.create_server(("", port)), socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        assert free_port() != port

    # Linux gives sockets without a wish one of this range.
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first, _ = ports.split()
    assert port < int(first)


# What a rank does, its exit code, and the end of what it says.
@rows(r"""
- [ending, exit_code, text]
- [pass, 0, ""]
- [raise SystemExit, 0, ""]
- [raise SystemExit(75), 75, ""]
- [raise UserError('no such split'), 2, "error:\nno such split\n"]
# Another start may succeed, so SLURM's retries need another code than that of bad input.
- [raise RankError('a worker died'), 1, "error: a worker died\n"]
- - os.environ['RANK'] = '1'; raise RankError('port in use')
  - 1
  - "error: rank 1: port in use\n"
# All ranks may have it, and the first one say it; but not if there is no other rank.
- - os.environ['RANK'] = '1'; raise UserError('no split')
  - 2
  - "error of rank 1:\nno split\n"
- - os.environ['RANK'] = '1'; raise StorageError('full')
  - 74
  - "error of rank 1:\nfull\n"
- - os.environ['RANK'] = '1'; raise UserErrors([UserError('a'), UserError('b')])
  - 2
  - "2 errors of rank 1:\na\nb\n"
- - os.environ['RANK'] = '0'; raise on_node(UserError('no GPU'), rank=5, node='n2')
  - 69
  - "error: rank 5 on n2: no GPU\n"
- - os.environ['RANK'] = '5'; raise on_node(UserError('no GPU'), rank=5, node='n2')
  - 69
  - "error: rank 5 on n2: no GPU\n"
- [raise StorageError('disk full'), 74, "error:\ndisk full\n"]
- [raise DivergedError('loss is NaN'), 76, "error:\nloss is NaN\n"]
- [raise KeyError('lost'), 1, "KeyError: 'lost'\n"]
""")
def test_rank_script_exits_with_its_code_and_output(ending, exit_code, text):
    # A thread that never ends, buffered output, and an object that aborts teardown.
    code = f"""
import atexit, os, sys, threading
from vitscale.config import errors
from vitscale.config.errors import *
from vitscale.distributed.processes import run_rank_script
errors.FIRST_RANK_S = 0.1
class AbortAtTeardown:
    def __del__(self, abort=os.abort):
        abort()
def main():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    sys.ready = AbortAtTeardown()
    atexit.register(print, "exit handler")
    print("buffered", end=" ")
    {ending}
run_rank_script(main)
"""
    done = run_python("-c", code)
    assert done.returncode == exit_code
    assert done.stdout == "buffered exit handler\n"
    assert done.stderr.endswith(text)


# What Python waits for without a limit when a program ends.
STUCK = {
    "a thread that is joined": "threading.Thread(target=threading.Event().wait).start()",
    "an exit handler": "atexit.register(threading.Event().wait)",
    "a child that ignores signals": "pass",
}


@every(obstacle=STUCK)
def test_nothing_keeps_a_rank_from_ending(tmp_path, obstacle):
    """Its child ignores SIGTERM, for which multiprocessing waits at exit without a limit."""
    script = tmp_path / "rank.py"
    script.write_text(f"""
import atexit, multiprocessing, signal, sys, threading, time
from vitscale.distributed import processes
processes.EXIT_S = 0.5
def sleep(connection):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send("ready")
    time.sleep(60)
def main():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=sleep, args=(theirs,), daemon=True)
    child.start()
    assert ours.poll(60)
    print(child.pid, flush=True)
    {STUCK[obstacle]}
    raise SystemExit(75)
if __name__ == "__main__":
    processes.run_rank_script(main)
""")
    done = run_python(script, timeout=90)
    assert done.returncode == 75, done.stderr

    # A child is killed before its parent ends, so nothing is late then.
    is_late = "child" not in obstacle
    assert ("has not ended for 0.5 s" in done.stderr) == is_late
    wait_until(lambda: not is_alive(int(done.stdout)))


def test_garbage_is_collected_after_imports_that_fail():
    # Collecting while modules are read finds nothing, and takes time.
    with pytest.raises(ModuleNotFoundError), quick_imports():
        assert not gc.isenabled()
        importlib.import_module("no_such_module")
    assert gc.isenabled()
    assert gc.get_freeze_count()
    gc.unfreeze()


def test_slow_imports_are_told_once(monkeypatch, capsys):
    monkeypatch.setattr(processes, "LATE_S", 0.0)
    processes._say_loading.cache_clear()
    for _ in range(2):
        with quick_imports():
            time.sleep(0.01)
    assert capsys.readouterr().err.count("loading libraries") == 1
    gc.unfreeze()


# ---- the server of worker processes: no threads, no signals, nothing of the main script ---------

IMPORTS = ("vitscale.data.loader", "no_such_module")


def describe(connection):
    """Tell as a worker what it sees, and end when asked to."""
    facts = {
        "parent": os.getppid(),
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "has one thread": has_one_thread(),
    }
    connection.send(facts)
    connection.recv()


@pytest.fixture
def own_server(monkeypatch):
    """Another server than that of earlier tests in this process, which has other imports."""
    server = forkserver.ForkServer()
    monkeypatch.setattr(forkserver, "_forkserver", server)
    for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(server, name))
    ended = threading.Event()

    # With a thread, a fork of this process would not be safe.
    thread = threading.Thread(target=ended.wait)
    thread.start()
    yield
    ended.set()
    server._stop()


@pytest.mark.usefixtures("own_server")
def test_workers_come_from_a_process_without_threads(tmp_path, monkeypatch):
    """Also after its imports, which start threads of linear algebra by default."""
    # Like a script that has no guard against being imported.
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('the script was imported')")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    environment = dict(os.environ)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ours, theirs = Pipe()
    worker = start_worker(describe, (theirs,), imports=IMPORTS)

    # This process is as it was before.
    assert dict(os.environ) == environment
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert ours.poll(30), "the worker hangs"
    facts = ours.recv()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # of Python
    assert facts["parent"] == server != os.getpid()
    assert facts["main"] is None
    assert facts["has one thread"]
    assert facts["mask"] >= set(SIGNALS)

    # The server has its imports, the variables that keep them from starting threads, and no thread.
    assert has_one_thread(server)
    given = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    for name, value in ENVIRONMENT.items():
        assert f"{name}={value}".encode() in given
    assert "libtorch_cpu" in Path(f"/proc/{server}/maps").read_text()

    # Signals for the job are the business of its ranks.
    for number in SIGNALS:
        os.kill(server, number)
        os.kill(facts["parent"], number)
    ours.send("end")
    worker.join(30)
    assert worker.exitcode == 0

    # Asked for again, it is the same server.
    start_server(IMPORTS)
    assert forkserver._forkserver._forkserver_pid == server  # type: ignore[attr-defined]  # same


def test_threads_that_end_meanwhile_are_no_error():
    """One check in seventy meets one."""
    for _ in range(2000):
        threading.Thread(target=int).start()
        has_one_thread()
