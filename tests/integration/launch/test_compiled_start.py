"""A new node starts from the code that another one has compiled, with real compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks.rank_processes import ROOT
from tests.support.waiting import PATIENCE_S
from vitscale.engine.compile_cache import VARIABLE

WORKER = ROOT / "tests/support/ranks/compile_worker.py"


def start(node: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(WORKER), str(node), str(run)]
    pipe = subprocess.PIPE
    # Torch sets the folder in the environment of any process that compiled something, this one too.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return output.splitlines()[-3:]


def libraries(node: Path) -> dict[str, int]:
    """Name -> time of change of every compiled library."""
    return {each.name: each.stat().st_mtime_ns for each in node.rglob("*.so")}


@pytest.mark.exhaustive
@pytest.mark.distributed
def test_two_ranks_of_a_new_node_compile_nothing(tmp_path: Path) -> None:
    message, cold, said = lines_of(start(tmp_path / "first", tmp_path))
    assert "empty: no " in message and cold.startswith("hits 0 misses 1 total")
    assert said.startswith("compiled code of ")
    ranks = [start(tmp_path / "second", tmp_path) for _ in range(2)]
    warm = [lines_of(rank) for rank in ranks]
    assert sum("files from" in message for message, _, _ in warm) == 1
    for _, found, said in warm:
        # With the same result.
        assert found == cold.replace("hits 0 misses 1", "hits 1 misses 0")
        assert said == "None"
    first, second = libraries(tmp_path / "first"), libraries(tmp_path / "second")
    assert first.keys() == second.keys() and first
    # All of them were unpacked before the first was used.
    (folder,) = (each for each in (tmp_path / "second").iterdir() if each.is_dir())
    assert max(second.values()) < folder.stat().st_ctime_ns
