"""Errors of scripts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitscale.config.errors import run_script


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
