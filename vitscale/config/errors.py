"""User-facing errors, and the exit code of a script that raises one.

Owns: the exception type for invalid input, its layout, and exit codes.
Leaves out: internal errors, which stay `assert` and show a traceback.
"""

from __future__ import annotations

import atexit
import os
import select
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

EXIT_RANK_ERROR = 1
EXIT_BAD_INPUT = 2
# "Temporary failure, try again" (sysexits.h): stopped by a signal after committing a checkpoint.
EXIT_STOPPED_RESUMABLE = 75


class UserError(ValueError):
    """Invalid input: what is wrong, where, what is allowed, what to do next."""

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


class RankError(UserError):
    """An error that only some ranks see. Each of them prints it, with its number.

    Its cause may be the node, a port or a peer, so that the next start may succeed: exit code 1.
    """


class UserErrors(UserError):
    """Several errors, reported together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        assert errors
        self.errors = tuple(errors)
        super().__init__("\n".join(error.text() for error in errors))


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The most similar known name, or None when none is similar."""
    matches = get_close_matches(name, known, n=1, cutoff=0.6)
    return matches[0] if matches else None


def run_script(main: Callable[[], None]) -> None:
    """Run a script's `main`; print a `UserError` (once per job, from rank 0) and exit with 2."""
    try:
        main()
    except UserError as error:
        if isinstance(error, RankError):
            rank = os.environ.get("RANK", "0")
            print(f"error: rank {rank}: {error.text()}", file=sys.stderr, flush=True)
        elif os.environ.get("RANK", "0") == "0":
            num = len(error.errors) if isinstance(error, UserErrors) else 1
            heading = "error" if num == 1 else f"{num} errors"
            print(f"{heading}:\n{error.text()}", file=sys.stderr, flush=True)
        code = EXIT_RANK_ERROR if isinstance(error, RankError) else EXIT_BAD_INPUT
        raise SystemExit(code) from None
    except BrokenPipeError:
        if _stdout_has_reader():
            raise
        # The reader, such as `head`, has enough. The flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _stdout_has_reader() -> bool:
    """False for a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not poll.poll(0)


def run_rank_script(main: Callable[[], None]) -> None:
    """`run_script` for one of several ranks; the process exits through `skip_teardown`."""
    try:
        run_script(main)
    except SystemExit as stop:
        skip_teardown(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
        raise
    except Exception:
        skip_teardown(1)
        raise
    skip_teardown(0)


def skip_teardown(exit_code: int) -> None:
    """Make this process exit with `exit_code` and without interpreter teardown.

    DeepSpeed keeps process groups, and thereby gloo's threads, alive past
    `destroy_process_group`. A thread that frees a tensor during interpreter teardown aborts the
    process ("terminate called without an active exception", exit code -6), and the launcher
    reports a finished run as failed (pytorch/pytorch#179291).
    Exit handlers still run, and output is flushed. The last call sets the exit code.
    """

    def end() -> None:
        atexit.unregister(end)
        # In the order that multiprocessing uses for its children.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    atexit.register(end)
