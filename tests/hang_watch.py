"""Let a test that hangs say where, and end it.

Owns: the watch over the processes of the test that runs, their stacks, and a line about tests that
run for long.
Leaves out: limits of single waits (`tests.support.waiting`).

A test hangs when for SILENCE_S its processes write nothing, start nothing and use next to no
processor time; or, when they do use some, five times as long. Then the stacks of all of them are
kept for its report, and those that it has started are killed, which ends what waits for them. If
that does not help, the test fails where it waits, as after pytest-timeout's limit.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

SILENCE_S = float(os.environ.get("VITSCALE_TEST_SILENCE_S", 120.0))
BUSY_FACTOR = 5
# Of one core; heartbeats and polls need less.
IDLE_SHARE = 0.1
STACK_WAIT_S = 20.0
# How often a line says which tests run, at least.
QUIET_S = float(os.environ.get("VITSCALE_TEST_QUIET_S", 120.0))
# In the environment of everything that a test starts, batch jobs included.
MARK = "VITSCALE_TEST_PROCESS"
os.environ[MARK] = str(os.getpid())
TICKS = os.sysconf("SC_CLK_TCK")
running: dict[str, float] = {}


class Facts(NamedTuple):
    """What a process has done so far."""

    started: int
    """Clock ticks after boot."""
    cpu_s: float
    written: int
    """Bytes."""


def pytest_configure(config: pytest.Config) -> None:
    # Beside tests that run in other processes: in the same one, the line would count as output.
    if config.getoption("numprocesses", None):
        threading.Thread(target=_say_what_runs, args=(config,), daemon=True).start()


def pytest_runtest_logstart(nodeid: str) -> None:
    running[nodeid] = time.monotonic()


def pytest_runtest_logfinish(nodeid: str) -> None:
    running.pop(nodeid, None)


def _say_what_runs(config: pytest.Config) -> None:
    said = time.monotonic()
    while True:
        time.sleep(min(5.0, QUIET_S / 2))
        now, tests = time.monotonic(), dict(running)
        last = max([said, *tests.values()])
        if tests and now - last >= QUIET_S:
            said = now
            lines = [f"{nodeid} ({now - start:.0f} s)" for nodeid, start in tests.items()]
            # Not before: this plugin may be configured first.
            reporter = config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter.ensure_newline()
                reporter.write_line("running: " + ", ".join(lines))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(item, ended), daemon=True)
    watch.start()
    try:
        return (yield)
    finally:
        ended.set()


def _watch(item: pytest.Item, ended: threading.Event) -> None:
    start_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)
    seen, since, cpu_s, num_dumps = None, time.monotonic(), 0.0, 0
    while not ended.wait(SILENCE_S / 24):
        facts, now = _facts(), time.monotonic()
        state = {pid: (each.started, each.written) for pid, each in facts.items()}
        used_s = sum(each.cpu_s for each in facts.values())
        if state != seen:
            seen, since, cpu_s = state, now, used_s
            continue
        silent_s = now - since
        is_idle = used_s - cpu_s < IDLE_SHARE * silent_s
        if silent_s < SILENCE_S * (1 if is_idle else BUSY_FACTOR):
            continue
        seen, num_dumps = None, num_dumps + 1
        title = f"no output for {silent_s:.0f} s; stacks"
        text = stacks([os.getpid(), *facts.keys() - {os.getpid()}])
        item.add_report_section("call", title, text)
        own = [pid for pid, each in facts.items() if each.started >= start_ticks]
        for pid in own:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not own or num_dumps > 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def _facts() -> dict[int, Facts]:
    """This process and the Python processes that have its mark."""
    found = {}
    mark = f"{MARK}={os.getpid()}".encode()
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            pid = int(folder.name)
            if pid != os.getpid() and mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            if not os.readlink(folder / "exe").rpartition("/")[2].startswith("python"):
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] == "Z":
                continue
            written = (folder / "io").read_text().partition("wchar:")[2].split()[0]
            cpu_s = (int(fields[11]) + int(fields[12])) / TICKS
            found[pid] = Facts(int(fields[19]), cpu_s, int(written))
    return found


def stacks(pids: Sequence[int]) -> str:
    """What all threads of some processes do: by py-spy where it is installed, else the kernel."""
    found = []
    py_spy = Path(sys.executable).with_name("py-spy")
    for pid in pids:
        with suppress(OSError, subprocess.TimeoutExpired):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            found.append(f"--- process {pid}: {words[:150].decode(errors='replace')}")
            if pid == os.getpid():
                with tempfile.TemporaryFile("w+") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
                    file.seek(0)
                    found.append(file.read())
            elif py_spy.exists():
                command = [str(py_spy), "dump", "--native", "--pid", str(pid)]
                done = subprocess.run(
                    command, timeout=STACK_WAIT_S, capture_output=True, text=True, check=False
                )
                found.append(done.stdout or done.stderr)
            else:
                waits = Path(f"/proc/{pid}/task").glob("*/wchan")
                found.append(", ".join(sorted({path.read_text() for path in waits})))
    return "\n".join(found)
