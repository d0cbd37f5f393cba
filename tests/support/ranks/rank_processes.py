"""Run a Python file on several local ranks, as a launcher would, and collect its output."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.waiting import PATIENCE_S, stacks
from vitscale.distributed.processes import free_port

ROOT = Path(__file__).resolve().parents[3]


def start_ranks(
    command: Sequence[str | Path], *, num_ranks: int, cwd: Path, env: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start `python COMMAND` on each rank; stdout and stderr are piped together."""
    port = str(free_port())
    processes = []
    for rank in range(num_ranks):
        variables = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=cwd,
                env=variables | (env or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def run_ranks(
    command: Sequence[str | Path],
    *,
    num_ranks: int,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> list[tuple[int, str]]:
    """Run to the end; (exit code, output) of every rank."""
    processes = start_ranks(command, num_ranks=num_ranks, cwd=cwd, env=env)
    try:
        # At once: a rank whose pipe is full would stop, and the others would wait for it.
        with ThreadPoolExecutor(num_ranks) as pool:
            outputs = list(pool.map(lambda each: each.communicate(timeout=timeout_s)[0], processes))
    except subprocess.TimeoutExpired:
        print(stacks([process.pid for process in processes if process.poll() is None]))
        raise
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [(p.returncode, out) for p, out in zip(processes, outputs, strict=True)]
