"""Errors that users see, kinds of failures, and the exit code of a script that raises one.

Internal errors stay `assert` and show a traceback.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, NoReturn

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# "Temporary failure, try again" (sysexits.h): stopped by a signal after committing a checkpoint.
EXIT_STOPPED_RESUMABLE = 75
# As a shell reports a command that Ctrl-C has ended.
EXIT_INTERRUPTED = 130
INTERRUPTED = "\nstopped by Ctrl-C\n"
# How long a command may take to clean up after Ctrl-C.
INTERRUPT_S = 10
# How long the other ranks leave it to the first one to print an error, which all may have: a
# launcher then ends them.
FIRST_RANK_S = 5.0
WORD_ENDS = re.compile("[._]")
# Errors of storage that often pass. The last ones are of a server that is out of reach; Lustre says
# ESHUTDOWN to a client that it has evicted.
PASSING = tuple(
    getattr(errno, name)
    for name in """
    EIO EREMOTEIO ESTALE ETIMEDOUT EAGAIN ENOSPC EDQUOT ENOTCONN ESHUTDOWN ECONNRESET EHOSTDOWN
    EHOSTUNREACH
    """.split()
)


class FailureKind(StrEnum):
    """Why a run failed. Every kind but BAD_INPUT and DIVERGED may succeed at the next start."""

    BAD_INPUT = "bad input"
    DIVERGED = "diverged"
    STORAGE = "storage"
    DEVICE = "device"
    NODE = "node"
    """A rank lacks what the others have: its GPU, a file, a compiler, a folder of its node."""
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
    # "Service unavailable" (sysexits.h): another node may have what this one lacks.
    FailureKind.NODE: 69,
}


class UserError(ValueError):
    """Invalid input: what is wrong, where, what is allowed, what to do next.

    Subclasses are failures of another kind. It is bad input only if all ranks raise it at the same
    point; the watchdog finds out whether they do, and makes it a `NodeError` if they do not.
    """

    kind: ClassVar[FailureKind] = FailureKind.BAD_INPUT

    def __init__(
        self,
        what: str,
        *,
        where: Path | str | None = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = str(where or "")
        self.allowed = allowed
        self.next_step = next_step
        super().__init__(self.text())

    def text(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.allowed:
            lines.append(f"  allowed: {self.allowed}")
        if self.next_step:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)


class FolderTakenError(UserError):
    """Another job writes to the run folder, so this one records nothing in it."""


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


class NodeError(RankError):
    """A rank lacks what the others have: a fault of its node, and no bad input.

    rank, node: of the rank that lacks it; all ranks may raise the error.
    """

    kind = FailureKind.NODE

    def __init__(
        self, what: str, *, rank: int | None = None, node: str | None = None
    ) -> None:
        super().__init__(what)
        self.rank = rank
        self.node = node


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


def print_note(text: str) -> None:
    """Print a line at once to standard error, beside the results of a command."""
    print(text, file=sys.stderr, flush=True)


def refused(
    what: str, error: OSError, *, where: Path | str, next_step: str
) -> UserError:
    """The error for what the system refuses. What often passes is a failure of storage."""
    # Others are settings to correct.
    kind = StorageError if error.errno in PASSING else UserError
    what = f"{what} ({error.strerror or error})"
    return kind(what, where=where, next_step=next_step)


def not_written(error: OSError, where: Path | str) -> UserError:
    """The error for a path that cannot be written."""
    step = "choose a writable folder with free space"
    return refused("cannot be written", error, where=where, next_step=step)


def not_read(error: OSError, where: Path | str, *, next_step: str) -> UserError:
    """The error for a path that cannot be read."""
    return refused("cannot be read", error, where=where, next_step=next_step)


def on_node(error: UserError, *, rank: int, node: str) -> NodeError:
    """The error of one rank, as a fault of its node."""
    if isinstance(error, NodeError):
        return error
    return NodeError(f"rank {rank} on {node}: {error.text()}", rank=rank, node=node)


def raise_alike(
    errors: Sequence[UserError | None], *, nodes: Sequence[str], num_tried: int
) -> None:
    """Raise the first error of all ranks, if there is one; to be called alike on all of them.

    errors, nodes: of each rank. num_tried: how many ranks did the work. Bad input is what all of
    them find; what only some of them find is a fault of their node.
    """
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return
    rank, error = failed[0]
    if len(failed) == num_tried:
        raise error

    # Bad input that not all ranks find is no bad input, but a node that lacks something.
    if error.kind is FailureKind.BAD_INPUT:
        raise on_node(error, rank=rank, node=nodes[rank])
    raise type(error)(f"rank {rank} on {nodes[rank]}: {error}")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The most similar known name, or None when none is similar."""
    from difflib import get_close_matches  # for errors alone

    # Names with the same words come first: model.heads means num_heads, not head_std.
    words = {*WORD_ENDS.split(name)}
    same = [each for each in known if words <= {*WORD_ENDS.split(each)}]
    cutoff = 0.0 if same else 0.6
    return next(iter(get_close_matches(name, same or known, n=1, cutoff=cutoff)), None)


def did_you_mean(
    name: str, known: Sequence[str], otherwise: str | None = None
) -> str | None:
    """The next step after an unknown name."""
    best = nearest(name, known)
    if best:
        return f"did you mean {best}?"
    return otherwise


def _interrupt(*_: object) -> None:
    """Unwind after a first Ctrl-C; end the process after a second one, or when that takes long."""
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, end_interrupted)
    signal.alarm(INTERRUPT_S)
    # A callback of a weak reference, or C, drops what is raised here, and would show it.
    sys.unraisablehook = lambda _: None
    raise KeyboardInterrupt


def end_interrupted(*_: object) -> NoReturn:
    """End this process at once."""
    # Only what a signal handler may do: no buffers, no locks.
    os.write(2, INTERRUPTED.encode())
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Keep Ctrl-C for `run_script` of the processes that start in the block: of their first second,
    in which imports would end with a traceback, too."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def run_script(main: Callable[[], None], *, is_rank: bool = False) -> None:
    """Run a script's `main`; print a `UserError` and exit with the code of its kind.

    Ctrl-C is one line and EXIT_INTERRUPTED; of a job's ranks their launcher prints the line.
    is_rank: whether it is one of the ranks of a job. No process leaves without its error, but ranks
    other than the first wait before they print one that all may have.
    """
    from vitscale.config.outside import guard_terminal

    guard_terminal()
    try:
        # Background jobs of a shell ignore it.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, _interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        main()
    except UserError as error:
        rank = "0"
        if is_rank:
            rank = os.environ.get("RANK", "0")
        # A launcher kills the other ranks once the first one has ended.
        if rank != "0" and not isinstance(error, RankError):
            time.sleep(FIRST_RANK_S)
        print_note(_report(error, rank=rank))
        raise SystemExit(error.kind.exit_code) from None
    except BrokenPipeError:
        # The reader of a pipe may be gone; then nobody misses the rest of the output.
        try:
            print(flush=True)
        except BrokenPipeError:
            # The reader, such as `head`, has enough. The flush at exit must not fail either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None
        raise
    except (Exception, KeyboardInterrupt):
        # Also an error of code that Ctrl-C has cut off, such as an import.
        if signal.getsignal(signal.SIGINT) is not end_interrupted:
            raise
        if not is_rank or "RANK" not in os.environ:
            print(end=INTERRUPTED, file=sys.stderr, flush=True)
        raise SystemExit(EXIT_INTERRUPTED) from None


def _report(error: UserError, *, rank: str) -> str:
    """An error as it is printed. Its rank is named where others may have none, or another one."""
    if isinstance(error, RankError):
        is_named = isinstance(error, NodeError) or rank == "0"
        heading = "error: " if is_named else f"error: rank {rank}: "
        return "\n  ".join([heading + error.text(), *getattr(error, "__notes__", ())])

    num = len(error.errors) if isinstance(error, UserErrors) else 1
    heading = "error" if num == 1 else f"{num} errors"
    of_rank = ""
    if rank != "0":
        of_rank = f" of rank {rank}"
    return f"{heading}{of_rank}:\n{error.text()}"
