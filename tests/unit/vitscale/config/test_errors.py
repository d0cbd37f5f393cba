"""Exit of a rank: its code, flushed output, exit handlers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitscale.config.errors import run_script

ENDINGS = {
    "pass": (0, ""),
    "raise SystemExit": (0, ""),
    "raise SystemExit(75)": (75, ""),
    "raise UserError('no such split')": (2, "error:\nno such split\n"),
    # Another start may succeed, so SLURM's retries need another code than that of bad input.
    "raise RankError('port in use')": (1, "error: rank 0: port in use\n"),
    "raise KeyError('lost')": (1, "KeyError: 'lost'\n"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_rank_script_exits_with_its_code_and_output(ending: str) -> None:
    # A thread that never ends, buffered output, and an object that aborts teardown.
    code = f"""
import atexit, os, sys, threading
from vitscale.config.errors import RankError, UserError, run_rank_script
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


def test_a_reader_that_has_enough_is_no_error() -> None:
    code = (
        "from vitscale.config.errors import run_script\n"
        "run_script(lambda: [print('x' * 1000) for _ in range(10_000)])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_pipe_other_than_the_output_still_fails() -> None:
    def fail() -> None:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        run_script(fail)
