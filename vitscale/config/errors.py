"""Errors that users see, kinds of failures, and the exit code of a script that raises one.

Internal errors stay `assert` and show a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from enum import StrEnum
from typing import ClassVar

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# "Temporary failure, try again" (sysexits.h): stopped by a signal after committing a checkpoint.
EXIT_STOPPED_RESUMABLE = 75
# From an error that all ranks have until the first one has closed what is open, and printed it.
FIRST_RANK_S = 5.0
# Errors of storage that often pass. The last ones are of a server that is out of reach; Lustre says
# ESHUTDOWN to a client that it has evicted.
PASSING = (
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN),
    *(errno.ENOSPC, errno.EDQUOT),
    *(errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
)


class FailureKind(StrEnum):
    """Why a run failed. Every kind but BAD_INPUT and DIVERGED may succeed at the next start."""

    BAD_INPUT = "bad input"
    DIVERGED = "diverged"
    STORAGE = "storage"
    DEVICE = "device"
    WORKER = "worker"
    PEER_LOST = "peer lost"
    HANG = "hang"
    KILLED = "killed from outside"
    OTHER = "other"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self, EXIT_FAILED)


EXIT_CODES = {
    FailureKind.BAD_INPUT: EXIT_BAD_INPUT,
    # Losses or gradients stayed not finite: the same start would end in the same way.
    FailureKind.DIVERGED: 76,
    # "Input/output error" (sysexits.h): checkpoints or shards could not be written or read.
    FailureKind.STORAGE: 74,
}


class UserError(ValueError):
    """Invalid input: what is wrong, where, what is allowed, what to do next.

    Subclasses are failures of another kind. All ranks raise it at the same point.
    """

    kind: ClassVar[FailureKind] = FailureKind.BAD_INPUT

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what, self.where, self.allowed, self.next_step = what, where, allowed, next_step
        super().__init__(self.text())

    def text(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)


class DivergedError(UserError):
    """The optimisation failed: updates stay not finite. All ranks raise it at the same point."""

    kind = FailureKind.DIVERGED


class StorageError(UserError):
    """Storage failed for longer than a retry helps. All ranks raise it at the same point."""

    kind = FailureKind.STORAGE


class RankError(UserError):
    """An error that only some ranks see. Each of them prints it, with its number.

    Its cause may be the node, a port or a peer, so that the next start may succeed.
    """

    kind = FailureKind.OTHER


class RankStorageError(RankError):
    """Storage failed on this rank for longer than a retry helps."""

    kind = FailureKind.STORAGE


class WorkerError(RankError):
    """A loader worker died or hangs."""

    kind = FailureKind.WORKER


class PeerLostError(RankError):
    """Another rank did not start, or is gone."""

    kind = FailureKind.PEER_LOST


class UserErrors(UserError):
    """Several errors, reported together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(error.text() for error in errors))

    def __reduce__(self) -> tuple[type, tuple[Sequence[UserError]]]:
        return UserErrors, (self.errors,)


def not_written(error: OSError, where: str) -> UserError:
    """The error for a path that cannot be written."""
    what, step = f"cannot be written ({error.strerror or error})", "choose a writable folder"
    kind = StorageError if error.errno in PASSING else UserError
    return kind(what, where=where, next_step=f"{step} with free space")


def not_read(error: OSError, where: str, *, next_step: str) -> UserError:
    """The error for a path that cannot be read."""
    kind = StorageError if error.errno in PASSING else UserError
    return kind(f"cannot be read ({error.strerror or error})", where=where, next_step=next_step)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The most similar known name, or None when none is similar."""
    return next(iter(get_close_matches(name, known, n=1)), None)


def did_you_mean(name: str, known: Sequence[str], otherwise: str | None = None) -> str | None:
    """The next step after an unknown name."""
    best = nearest(name, known)
    return f"did you mean {best}?" if best else otherwise


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; print a `UserError` (once per job, from rank 0) and exit.

    The exit code is that of the error's kind.
    """
    try:
        main()
    except UserError as error:
        if isinstance(error, RankError):
            rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
            notes = getattr(error, "__notes__", ())
            text = "\n  ".join([f"error: {rank}{error.text()}", *notes])
            print(text, file=sys.stderr, flush=True)
        elif os.environ.get("RANK", "0") == "0":
            num = len(error.errors) if isinstance(error, UserErrors) else 1
            heading = "error" if num == 1 else f"{num} errors"
            print(f"{heading}:\n{error.text()}", file=sys.stderr, flush=True)
        else:
            # A launcher kills the rank that prints it once another one has ended.
            time.sleep(FIRST_RANK_S)
        raise SystemExit(error.kind.exit_code) from None
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:
            # The reader, such as `head`, has enough. The flush at exit must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        raise
