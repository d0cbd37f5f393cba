"""Run a Python file on several local ranks, as a launcher would, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.waiting import PATIENCE_S
from vitscale.distributed.processes import free_port

ROOT = Path(__file__).resolve().parents[3]


def run_ranks(command: Sequence[str | Path], *, num_ranks: int, cwd: Path) -> list[tuple[int, str]]:
    """Run `python COMMAND` to the end; (exit code, stdout and stderr) of every rank."""
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run(rank: int) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
