"""Tests that hang are ended, and their report says where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.ranks.rank_processes import ROOT

TESTS = """
import subprocess, sys, threading

def test_a_process_hangs():
    script = "import time\\ndef hangs_here(): time.sleep(1000)\\nhangs_here()"
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == 0

def test_itself_hangs():
    threading.Event().wait()

def test_works():
    print("it writes")
"""


def test_hanging_tests_are_ended_and_say_where(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.hang_watch",
        "-n",
        "1",
        "--rootdir",
        tmp_path,
    ]
    done = subprocess.run(
        [*command, "--timeout=600", "-p", "no:cacheprovider", tmp_path],
        env=os.environ
        | {"VITSCALE_TEST_SILENCE_S": "3", "VITSCALE_TEST_QUIET_S": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "\nrunning: test_hangs.py::test_a_process_hangs (" in done.stdout
    first, second = done.stdout.split("_ test_itself_hangs _")
    assert "assert -9 == 0" in first and "no output for 3 s; stacks" in first
    assert "hangs_here (<string>:2)" in first
    assert "line 10 in test_itself_hangs" in second
