"""Saves under real faults: kills at every system call, failing disks, power loss.

Each case commits step 1, disturbs the save of step 2, and reads the result: step 1 or 2, step 2
if that was committed, with its own tensors. The next save succeeds without manual action.
The writer needs no torch (tests/support/light_checkpoints.py): a case takes a tenth of a second.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import mounted
from tests.support.light_checkpoints import LENGTH, light_save
from tests.support.protocol_mutants import MUTANTS
from tests.support.ranks.rank_processes import ROOT
from tests.support.required import skip_or_fail
from tests.support.waiting import PATIENCE_S
from vitscale.checkpoint import commit
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


def test_read_only_disk_is_one_clear_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    light_save(source / "run", step=1)
    with mounted(tmp_path / "disk", source, "--bind") as disk:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        with pytest.raises(UserError, match="cannot be written .*Read-only file system"):
            light_save(disk / "run", step=2)
        subprocess.run(["mount", "-o", "remount,bind,rw", disk], check=True)
        assert check_recovery(disk / "run", promised=False) == 1


# From the kernel's fs/ext4/ext4.h: _IOR('X', 125, __u32). LOG_FLUSH writes the journal out first,
# so names survive whose content does not; NO_LOG_FLUSH drops everything that was not flushed.
EXT4_SHUTDOWN = 0x8004587D
POWER_LOSS = {"names survive": 1, "nothing survives": 2}
BOUNDARIES = ("open", "write", "fsync", "rename", "mkdir")


@pytest.fixture(scope="module")
def formatted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of an ext4 disk that holds step 1."""
    image = tmp_path_factory.mktemp("ext4") / "image"
    with open(image, "wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    with mounted(image.with_name("disk"), image, "-o", "loop") as disk:
        light_save(disk / "run", step=1)
    return image


@contextmanager
def power_lost_at(disk: Path, number: int, mode: int) -> Iterator[list[str]]:
    """Make the disk fail after call `number` of the block. Yields the calls so far."""
    calls: list[str] = []
    fd = os.open(disk, os.O_RDONLY)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            calls.append(name)
            if len(calls) == number:
                fcntl.ioctl(fd, EXT4_SHUTDOWN, struct.pack("I", mode))
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in BOUNDARIES:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        try:
            yield calls
        finally:
            if len(calls) < number:
                fcntl.ioctl(fd, EXT4_SHUTDOWN, struct.pack("I", mode))
            os.close(fd)


def save_and_lose_power(
    formatted: Path, tmp_path: Path, number: int, mode: int
) -> tuple[int, bool]:
    """(step found after the power loss, whether step 2 was committed)."""
    image = tmp_path / "image"
    shutil.copy(formatted, image)
    promised = False
    with mounted(tmp_path / "disk", image, "-o", "loop") as disk:
        with power_lost_at(disk, number, mode):
            try:
                light_save(disk / "run", step=2, keep=1)
                promised = True
            except UserError:
                pass
    with mounted(tmp_path / "disk", image, "-o", "loop") as disk:
        checkpoint, _ = newest_checkpoint(disk / "run")
        step = checkpoint.step if checkpoint else 0
        if step >= 1 + promised:
            check_recovery(disk / "run", promised=promised)
    return step, promised


@pytest.mark.parametrize("stride", some_or_every(5))
@pytest.mark.parametrize("mode", POWER_LOSS)
def test_save_survives_power_loss_at_any_call(
    formatted: Path, tmp_path: Path, mode: str, stride: int
) -> None:
    """At call 1, 1 + stride, ... and after the end."""
    found, number, promised = [], 1, False
    while not promised:
        found.append(save_and_lose_power(formatted, tmp_path, number, POWER_LOSS[mode]))
        promised, number = found[-1][1], number + stride
    assert all(step == 2 if promised else step in (1, 2) for step, promised in found)
    assert found[-1] == (2, True)


SEEN_ON_EXT4 = ("no fsync of the tensors", "no fsync of the manifest", "no fsync of the parent")


@pytest.mark.parametrize("mutant", SEEN_ON_EXT4)
def test_missing_fsync_loses_a_step_on_a_real_disk(
    formatted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    """Power is lost after the commit."""
    name, function = MUTANTS[mutant]
    monkeypatch.setattr(commit, name, function)
    # Reading back starts to write what is dropped from the page cache, which is not guaranteed.
    monkeypatch.setattr(commit, "verify_files", lambda *_, **__: None)
    found = [save_and_lose_power(formatted, tmp_path, 1000, mode) for mode in POWER_LOSS.values()]
    assert any(promised and step < 2 for step, promised in found)
