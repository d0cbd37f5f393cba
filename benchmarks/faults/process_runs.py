"""Run a command, measure its memory, or kill it.

Owns: wall clock, memory of a whole process tree, SIGKILL for a process group.
Leaves out: which commands, and checks of their output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no type information

from vitscale.config.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_EVERY_S = 0.03


class CommandFailed(Exception):
    """A measured command ended with an error; the text is its output."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks in MiB. `process`: the largest of all processes, from the kernel's own high-water
    marks. `tree`: the largest sum of resident sizes seen at one moment; shared pages, such as
    libraries, count once per process. Not ru_maxrss: Linux lets a child inherit its parent's."""

    process: float
    tree: float


def check_results_path(path: Path | None) -> None:
    """Raises UserError now for a results file that could not be written at the end."""
    if path is None:
        return
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(
            f"{str(path)!r} cannot be written",
            where="--json",
            next_step="name a file in a folder that exists",
        )


def run_command(command: Sequence[str]) -> float:
    """Seconds from start to end. Raises CommandFailed."""
    start = time.perf_counter()
    # As in an ordinary installation: modules are compiled once, not at every start.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}")
    return seconds


def run_watched(command: Sequence[str]) -> tuple[float, Memory]:
    """As `run_command`, and the memory taken. Measuring takes a few per cent of one core."""
    memory: list[Memory] = []
    stop = threading.Event()
    own = Path("/proc/self/cmdline").read_bytes()

    def watch() -> None:
        process = tree = 0
        while not stop.is_set():
            below = psutil.Process().children(recursive=True)
            sizes = [_memory_of(process, watcher=own) for process in below]
            process = max([process, *(peak for peak, _ in sizes)])
            tree = max(tree, sum(now for _, now in sizes))
            stop.wait(SAMPLE_EVERY_S)
        memory.append(Memory(process / 1024, tree / 1024))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        seconds = run_command(command)
    finally:
        stop.set()
        thread.join()
    return seconds, memory[0]


def _memory_of(process: psutil.Process, *, watcher: bytes) -> tuple[int, int]:
    """(peak, present) resident KiB; zeros for a process that has ended or not begun."""
    found = {"VmHWM": 0, "VmRSS": 0}
    with suppress(OSError):
        # Before exec, a new process shows the memory of its parent.
        if Path(f"/proc/{process.pid}/cmdline").read_bytes() == watcher:
            return 0, 0
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0])
    return found["VmHWM"], found["VmRSS"]


def run_and_kill(command: Sequence[str], *, after_s: float) -> bool:
    """Start the command and SIGKILL its process group; False when it had ended before."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            process.wait(timeout=after_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
    if process.returncode:
        raise CommandFailed(f"{' '.join(command)}: exit code {process.returncode}")
    return False


def drop_page_cache() -> None:
    """Drop the kernel's page cache; needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
