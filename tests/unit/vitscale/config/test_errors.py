"""Exit of a rank: its code, flushed output, exit handlers."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDINGS = {
    "pass": (0, ""),
    "raise SystemExit": (0, ""),
    "raise SystemExit(75)": (75, ""),
    "raise UserError('no such split')": (2, "error:\nno such split\n"),
    "raise KeyError('lost')": (1, "KeyError: 'lost'\n"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_rank_script_exits_with_its_code_and_output(ending: str) -> None:
    # A thread that never ends, buffered output, and an object that aborts teardown.
    code = f"""
import atexit, os, sys, threading
from vitscale.config.errors import UserError, run_rank_script
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected, stderr = ENDINGS[ending]
    assert (done.returncode, done.stdout) == (expected, "buffered exit handler\n")
    assert done.stderr.endswith(stderr)
