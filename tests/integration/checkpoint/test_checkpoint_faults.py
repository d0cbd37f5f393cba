"""Saves under real faults: kills at every system call, failing disks, power loss.

Each case commits step 1, disturbs the save of step 2, and reads the result: step 1 or 2, step 2
if that was committed, with its own tensors. The next save succeeds without manual action.
The writer needs no torch (tests/support/light_checkpoints.py): a case takes a tenth of a second.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import mounted
from tests.support.light_checkpoints import LENGTH, light_save
from tests.support.ranks.rank_processes import ROOT
from tests.support.required import skip_or_fail
from tests.support.waiting import PATIENCE_S
from vitscale.checkpoint.folders import newest_checkpoint
from vitscale.config.errors import UserError

WRITER = ROOT / "tests/support/light_checkpoints.py"
KILL = "signal=KILL"
# Calls that a disk can fail, and the folder and file operations of a save.
REFUSALS = ("error=ENOSPC", "error=EIO")
DISK_CALLS = (
    *("openat", "write", "fsync", "close", "rename", "mkdir", "fadvise64"),
    *("read", "lseek", "newfstatat", "getdents64", "unlinkat", "rmdir"),
)


@pytest.fixture(scope="module")
def strace() -> str:
    """Skipped where it is missing or may not trace."""
    found = shutil.which("strace")
    works = found and subprocess.run([found, "-o", os.devnull, "true"]).returncode == 0
    if not works:
        skip_or_fail("strace is missing or may not trace: apt-get install strace")
    assert found is not None
    return found


def start_writer(folder: Path, *two: object) -> subprocess.Popen[bytes]:
    """A writer of step 2 with keep=1."""
    arguments = [str(part) for part in (folder, 2, 1, *two)]
    return subprocess.Popen([sys.executable, WRITER, *arguments])


def wait_until_stopped(writer: subprocess.Popen[bytes]) -> None:
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)


def continue_traced(
    strace: str, writer: subprocess.Popen[bytes], *, log: Path, inject: str | None
) -> subprocess.Popen[bytes]:
    """Continue a stopped writer under strace, with a fault or (None) only watched."""
    options = [] if inject is None else ["-e", f"inject={inject}"]
    tracer = subprocess.Popen(
        [strace, "-q", "-o", log, *options, "-p", str(writer.pid)], stderr=subprocess.DEVNULL
    )
    status = Path(f"/proc/{writer.pid}/status")
    while "TracerPid:\t0" in status.read_text():
        assert tracer.poll() is None, "strace could not attach"
        time.sleep(0.001)
    writer.send_signal(signal.SIGCONT)
    return tracer


def calls_of(log: Path) -> list[str]:
    """Every system call of a watched writer in strace's notation: NAME:when=N."""
    counts: Counter[str] = Counter()
    occasions = []
    for name in re.findall(r"^(\w+)\(", log.read_text(), flags=re.MULTILINE):
        counts[name] += 1
        occasions.append(f"{name}:when={counts[name]}")
    return occasions


def save_under(strace: str, folder: Path, inject: str | None) -> int:
    """Exit code of the writer of step 2."""
    light_save(folder, step=1)
    writer = start_writer(folder)
    wait_until_stopped(writer)
    tracer = continue_traced(strace, writer, log=folder.with_suffix(".log"), inject=inject)
    code = writer.wait(timeout=PATIENCE_S)
    tracer.wait(timeout=PATIENCE_S)
    return code


def check_recovery(folder: Path, *, promised: bool, num_ranks: int = 1) -> int:
    """Check the guarantees and return the step found."""
    checkpoint, complaints = newest_checkpoint(folder)
    assert checkpoint is not None and complaints == []
    assert checkpoint.step in ((2,) if promised else (1, 2))
    assert checkpoint.progress == {"n": checkpoint.step}
    for rank in range(num_ranks):
        assert checkpoint.tensors()[f"model.{rank}"].tolist() == [checkpoint.step] * LENGTH
    light_save(folder, step=2, keep=1, attempt="again")
    light_save(folder, step=3, keep=1, attempt="again")
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    return checkpoint.step


def fault_at_each(
    strace: str, tmp_path: Path, fault: str, *, calls: Sequence[str] = (), stride: int = 1
) -> list[tuple[int, int]]:
    """(exit code, step found) with the fault at each of the save's calls, or of those named."""
    watched = tmp_path / "watched"
    assert save_under(strace, watched, None) == 0 and check_recovery(watched, promised=True) == 2
    occasions = calls_of(watched.with_suffix(".log"))
    wanted = [each for each in occasions if not calls or each.split(":")[0] in calls]
    found = []
    for number, occasion in enumerate(wanted[::stride]):
        folder = tmp_path / str(number)
        name, when = occasion.split(":")
        code = save_under(strace, folder, f"{name}:{fault}:{when}")
        log = folder.with_suffix(".log").read_text()
        assert code == -signal.SIGKILL or "(INJECTED)" in log, f"{occasion} never came"
        found.append((code, check_recovery(folder, promised=code == 0)))
        shutil.rmtree(folder)
    return found


def some_or_every(stride: int) -> list[Any]:
    """Strides over the calls of a save: every call only by hand."""
    return [stride, pytest.param(1, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("stride", some_or_every(9))
def test_save_survives_a_kill_at_any_system_call(strace: str, tmp_path: Path, stride: int) -> None:
    found = fault_at_each(strace, tmp_path, KILL, stride=stride)
    assert {code for code, _ in found} == {-9}
    steps = [step for _, step in found]
    assert steps == sorted(steps) and set(steps) == {1, 2}, "once committed, always there"


@pytest.mark.parametrize("stride", some_or_every(4))
@pytest.mark.parametrize("fault", REFUSALS)
def test_save_survives_a_disk_error_at_any_call(
    strace: str, tmp_path: Path, fault: str, stride: int
) -> None:
    found = fault_at_each(strace, tmp_path, fault, calls=DISK_CALLS, stride=stride)
    assert {code for code, _ in found} <= {0, 2} and (2, 1) in found


def two_ranks(strace: str, folder: Path, *, victim: int, inject: str | None) -> list[int]:
    """Exit codes of two ranks that save step 2, one of them under strace."""
    light_save(folder, step=1)
    door = folder.with_suffix(".sock")
    writers = [start_writer(folder, 0, door)]
    while not door.exists():
        time.sleep(0.001)
    writers.append(start_writer(folder, 1, door))
    for writer in writers:
        wait_until_stopped(writer)
    log = folder.with_suffix(".log")
    tracer = continue_traced(strace, writers[victim], log=log, inject=inject)
    writers[1 - victim].send_signal(signal.SIGCONT)
    codes = [writer.wait(timeout=PATIENCE_S) for writer in writers]
    tracer.wait(timeout=PATIENCE_S)
    return codes


@pytest.mark.distributed
@pytest.mark.parametrize("stride", some_or_every(16))
def test_save_survives_one_rank_killed_at_any_call(
    strace: str, tmp_path: Path, stride: int
) -> None:
    """The other rank ends by itself; the step is valid or absent."""
    for victim in (0, 1) if stride == 1 else (0,):
        watched = tmp_path / f"watched {victim}"
        assert two_ranks(strace, watched, victim=victim, inject=None) == [0, 0]
        steps = set()
        for number, occasion in enumerate(calls_of(watched.with_suffix(".log"))[::stride]):
            folder = tmp_path / f"{victim}-{number}"
            name, when = occasion.split(":")
            codes = two_ranks(strace, folder, victim=victim, inject=f"{name}:{KILL}:{when}")
            assert codes[victim] in (-9, 0) and codes[1 - victim] in (0, 3), occasion
            checkpoint, _ = newest_checkpoint(folder)
            assert checkpoint is not None
            num_ranks = checkpoint.step  # step 1 is of one rank, step 2 of both
            steps.add(check_recovery(folder, promised=0 in codes, num_ranks=num_ranks))
            shutil.rmtree(folder)
        assert steps == {1, 2}


@pytest.mark.parametrize("option", ["size", "nr_inodes"])
def test_save_survives_a_disk_full_at_any_point(tmp_path: Path, option: str) -> None:
    """Room for zero more pages or files, for one, and so on, until the save fits."""
    refused = 0
    for room in range(20):
        with mounted(tmp_path / str(room), "tmpfs", "-t", "tmpfs", "-o", "size=1m") as disk:
            light_save(disk / "run", step=1)
            used = os.statvfs(disk)
            pages = used.f_blocks - used.f_bfree + room
            files = used.f_files - used.f_ffree + room
            limit = f"size={pages * used.f_frsize}" if option == "size" else f"nr_inodes={files}"
            subprocess.run(["mount", "-o", f"remount,{limit}", disk], check=True)
            try:
                light_save(disk / "run", step=2, keep=1)
                fits = True
            except UserError as error:
                assert "cannot be written (No space left on device)" in str(error)
                refused, fits = refused + 1, False
            subprocess.run(["mount", "-o", "remount,size=1m,nr_inodes=0", disk], check=True)
            check_recovery(disk / "run", promised=fits)
        if fits:
            break
    assert fits and refused >= 2
