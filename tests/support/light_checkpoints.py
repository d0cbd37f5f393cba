"""Checkpoints made by the real commit protocol without torch, for tests that need hundreds.

Run as a program it is one rank that saves one step and can be stopped before its first system call:

    python tests/support/light_checkpoints.py FOLDER STEP KEEP [RANK SOCKET]

Exit code 0 means committed, 2 a disk error, 3 that another rank is gone. With RANK and
SOCKET there are two ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from vitscale.checkpoint.commit import Commit, Gather, Save, commit_save
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
    gather: Gather = lambda value: [value],
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
    return commit_save(save, [tensor_file(step, rank)], gather=gather)


def two_ranks(path: str, rank: int) -> Gather:
    """Gather values of two processes over a socket; fails when the other one is gone."""
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            connection = door.accept()[0]
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
    stream = connection.makefile("rwb")

    def gather(value: Any) -> list[Any]:
        pickle.dump(value, stream)
        stream.flush()
        try:
            other = pickle.load(stream)
        except EOFError:
            raise ConnectionError("the other rank is gone") from None
        return [value, other] if rank == 0 else [other, value]

    return gather


def main() -> None:
    folder, step, keep, *two = sys.argv[1:]
    rank = int(two[0]) if two else 0
    gathered = {"gather": two_ranks(two[1], rank)} if two else {}
    os.kill(os.getpid(), signal.SIGSTOP)  # from here on a tracer counts
    code = 0
    try:
        light_save(Path(folder), step=int(step), keep=int(keep), rank=rank, **gathered)
    except UserError:
        code = 2
    except ConnectionError:
        code = 3
    os._exit(code)


if __name__ == "__main__":
    main()
