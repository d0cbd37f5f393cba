"""Checkpoints made by the real commit protocol without torch, for tests that need hundreds.

Run as a program it is one rank that saves one step and can be stopped before its first system call:

    python tests/support/light_checkpoints.py FOLDER STEP KEEP [RANK SOCKET]

Exit code 0 means committed, 2 a disk error, 3 that another rank is gone. With RANK and
SOCKET there are two ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from vitscale.checkpoint.commit import Commit, Exchange, OneRank, Save, commit_save
from vitscale.config.errors import UserError

LENGTH = 24


def tensor_file(step: int, rank: int = 0) -> bytes:
    """A safetensors file of one byte tensor `model.RANK` that holds `step` everywhere."""
    entry = {"dtype": "U8", "shape": [LENGTH], "data_offsets": [0, LENGTH]}
    header = json.dumps({f"model.{rank}": entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes([step]) * LENGTH


def light_save(
    checkpoints: Path,
    *,
    step: int,
    keep: int = 2,
    rank: int = 0,
    attempt: str = "light",
    exchange: Exchange | None = None,
) -> Commit:
    save = Save(
        checkpoints=checkpoints,
        step=step,
        attempt=attempt,
        rank=rank,
        keep=keep,
        progress={"n": step},
        description={"of": "a test"},
    )
    return commit_save(save, [tensor_file(step, rank)], exchange=exchange or OneRank())


class TwoRanks:
    """Exchange between two processes over a socket; fails when the other one is gone."""

    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        if rank == 0:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(path)
                door.listen()
                connection = door.accept()[0]
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
        self.sent, self.received = connection.makefile("w"), connection.makefile("r")

    def gather(self, value: Any) -> list[Any] | None:
        if self.rank == 0:
            return [value, self._receive()]
        self._send(value)
        return None

    def broadcast(self, value: Any) -> Any:
        if self.rank != 0:
            return self._receive()
        self._send(value)
        return value

    def _send(self, value: Any) -> None:
        print(json.dumps(value), file=self.sent, flush=True)

    def _receive(self) -> Any:
        line = self.received.readline()
        if not line:
            raise ConnectionError("the other rank is gone")
        return json.loads(line)


def main() -> None:
    folder, step, keep, *two = sys.argv[1:]
    rank = int(two[0]) if two else 0
    exchange = TwoRanks(two[1], rank) if two else None
    os.kill(os.getpid(), signal.SIGSTOP)  # from here on a tracer counts
    code = 0
    try:
        light_save(Path(folder), step=int(step), keep=int(keep), rank=rank, exchange=exchange)
    except UserError:
        code = 2
    except ConnectionError:
        code = 3
    os._exit(code)


if __name__ == "__main__":
    main()
