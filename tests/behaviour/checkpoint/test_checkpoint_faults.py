"""Saves under real faults: kills at every system call, and failing disks.

Each case commits step 1, disturbs the save of step 2, and reads the result: step 1 or 2, step 2
if that was committed, with its own tensors. The next save succeeds without manual action.
The writer needs no torch (tests/support/light_checkpoints.py): a case takes a tenth of a second.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.levels import skip_or_fail
from tests.support.light_checkpoints import LENGTH, light_save
from tests.support.tables import every
from tests.support.waiting import PATIENCE_S, ROOT
from vitscale.checkpoint.folders import newest_checkpoint
from vitscale.checkpoint.store import read_tensors
from vitscale.config.errors import UserError
from vitscale.distributed import atomic_files

WRITER = ROOT / "tests/support/light_checkpoints.py"
# Calls that a disk can fail, and the folder and file operations of a save.
DISK_CALLS = """
    openat write fsync close rename mkdir fadvise64
    read lseek newfstatat getdents64 unlinkat rmdir
""".split()


@pytest.fixture(scope="module")
def strace():
    """Skipped where it is missing or may not trace."""
    path = shutil.which("strace")
    works = False
    if path:
        tried = subprocess.run([path, "-o", os.devnull, "true"])
        works = tried.returncode == 0
    if not works:
        skip_or_fail("strace is missing or may not trace: apt-get install strace")
    return path


def calls_of(log):
    """Every system call of a watched writer in strace's notation: NAME:when=N."""
    counts = Counter()
    # A fault is placed by the name of a call and how often that was called before.
    occasions = []
    for name in re.findall(r"^(\w+)\(", log.read_text(), flags=re.MULTILINE):
        counts[name] += 1
        occasions.append(f"{name}:when={counts[name]}")
    return occasions


def save_under(strace, folder, inject):
    """Exit code of a writer of step 2 with a fault, or (None) only watched."""
    light_save(folder, step=1)

    # The writer stops itself after its imports: only the save is traced.
    writer = subprocess.Popen([sys.executable, WRITER, str(folder), "2", "1"])
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED | os.WNOWAIT)
    command = [strace, "-q", "-o", folder.with_suffix(".log")]
    if inject is not None:
        command += ["-e", f"inject={inject}"]
    command += ["-p", str(writer.pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    # Calls before strace is attached would be missed.
    status = Path(f"/proc/{writer.pid}/status")
    while "TracerPid:\t0" in status.read_text():
        assert tracer.poll() is None, "strace could not attach"
        time.sleep(0.001)
    writer.send_signal(signal.SIGCONT)
    code = writer.wait(timeout=PATIENCE_S)
    tracer.wait(timeout=PATIENCE_S)
    return code


def check_recovery(folder, *, promised):
    """Check the guarantees and return the step found."""
    checkpoint, complaints = newest_checkpoint(folder)
    assert complaints == []
    step = checkpoint.step
    assert step in ((2,) if promised else (1, 2))
    assert checkpoint.progress == {"n": step, "unreadable": 0}
    tensors = read_tensors(checkpoint.files)
    assert tensors["model.0"].tolist() == [step] * LENGTH

    # What the fault left takes no space for ever.
    for later in (2, 3):
        light_save(folder, step=later, keep=1, attempt="again")
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    return step


def fault_at_each(strace, tmp_path, fault, *, calls=(), stride=1):
    """(exit code, step found) with the fault at each of the save's calls, or of those named."""
    watched = tmp_path / "watched"
    assert save_under(strace, watched, None) == 0
    assert check_recovery(watched, promised=True) == 2
    occasions = calls_of(watched.with_suffix(".log"))
    if calls:
        occasions = [text for text in occasions if text.split(":")[0] in calls]

    outcomes = []
    for number, occasion in enumerate(occasions[::stride]):
        folder = tmp_path / str(number)
        name, when = occasion.split(":")
        code = save_under(strace, folder, f"{name}:{fault}:{when}")

        # A fault that was never met would prove nothing.
        log = folder.with_suffix(".log").read_text()
        assert code == -signal.SIGKILL or "(INJECTED)" in log, f"{occasion} never came"
        outcomes.append((code, check_recovery(folder, promised=code == 0)))
        shutil.rmtree(folder)
    return outcomes


def some_or_every(stride):
    """Strides over the calls of a save: every call only by hand."""
    return [stride, pytest.param(1, marks=pytest.mark.exhaustive)]


@every(stride=some_or_every(9))
def test_save_survives_a_kill_at_any_system_call(strace, tmp_path, stride):
    outcomes = fault_at_each(strace, tmp_path, "signal=KILL", stride=stride)
    assert {code for code, _ in outcomes} == {-9}

    # Once committed, always there: later kills find step 2.
    steps = [step for _, step in outcomes]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


@every(stride=some_or_every(4))
@every(fault="error=ENOSPC, error=EIO")
def test_save_survives_a_disk_error_at_any_call(strace, tmp_path, fault, stride):
    outcomes = fault_at_each(strace, tmp_path, fault, calls=DISK_CALLS, stride=stride)

    # Some calls may fail without harm; others must be reported.
    assert {code for code, _ in outcomes} <= {0, 2}
    assert (2, 1) in outcomes


def test_save_survives_a_disk_full_at_any_point(small_disk, monkeypatch):
    """Room for zero more pages, for one, and so on, until the save fits."""
    # As many attempts, without the waits between them.
    monkeypatch.setattr(atomic_files, "PAUSES_S", [0.0] * len(atomic_files.PAUSES_S))
    num_refused = 0
    filler = small_disk / "filler"
    for room in range(20):
        run = small_disk / "run"
        light_save(run, step=1)
        disk = os.statvfs(small_disk)
        filler.write_bytes(bytes((disk.f_bfree - room) * disk.f_frsize))
        fits = True
        try:
            light_save(run, step=2, keep=1)
        except UserError as error:
            assert "cannot be written (No space left on device)" in str(error)
            num_refused += 1
            fits = False

        # Space was made, so the next saves succeed.
        filler.unlink()
        check_recovery(run, promised=fits)
        shutil.rmtree(run)
        if fits:
            break
    assert fits
    assert num_refused >= 2
