"""Checkpoints made by the real commit protocol without torch, for tests that need hundreds.

Run as a program it is one rank that saves one step and stops before its first system call:

    python tests/support/light_checkpoints.py FOLDER STEP KEEP

Exit code 0 means committed, 2 a disk error.
"""

import json
import os
import signal
import sys
from pathlib import Path

from vitscale.checkpoint.folders import (
    Commit,
    Gather,
    Save,
    commit_save,
    only_this_rank,
)
from vitscale.config.errors import UserError
from vitscale.distributed import atomic_files
from vitscale.evaluation.main_metric import score_of

LENGTH = 24


def tensor_file(step: int, rank: int = 0) -> bytes:
    """A safetensors file of one byte tensor `model.RANK` that holds `step` everywhere."""
    entry = {"dtype": "U8", "shape": [LENGTH], "data_offsets": [0, LENGTH]}
    header = json.dumps({f"model.{rank}": entry}).encode()
    # As the library writes it: data begins at a multiple of 8 bytes.
    header += b" " * (-len(header) % 8)
    length = len(header).to_bytes(8, "little")
    return length + header + bytes([step]) * LENGTH


def flip(path: Path, position: int, bit: int = 0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))


def light_save(
    checkpoints: Path,
    *,
    step: int,
    keep: int = 2,
    rank: int = 0,
    attempt: str = "light",
    gather: Gather = only_this_rank,
    score: float | None = None,
) -> Commit:
    """score: of its evaluation; None: it was not evaluated."""
    # `n` tells which save was read; `unreadable` is what a session asks a checkpoint for.
    progress = {"n": step, "unreadable": 0}
    if score is not None:
        progress["score"] = score_of({"val/top1": score})
    save = Save(
        checkpoints=checkpoints,
        step=step,
        attempt=attempt,
        rank=rank,
        keep=keep,
        progress=progress,
        description={"of": "a test"},
    )
    return commit_save(save, [tensor_file(step, rank)], gather=gather)


def main():
    folder, step, keep = sys.argv[1:]
    # As many attempts of each call, without the waits between them.
    atomic_files.PAUSES_S = [0.0] * len(atomic_files.PAUSES_S)
    os.kill(os.getpid(), signal.SIGSTOP)  # from here on a tracer counts
    code = 0
    try:
        light_save(Path(folder), step=int(step), keep=int(keep))
    except UserError:
        code = 2
    # Python's own end makes system calls, too, which the tracer would count.
    os._exit(code)


if __name__ == "__main__":
    main()
