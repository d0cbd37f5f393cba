"""Results of the checks before a run is submitted: as a table, warnings or errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vitscale.config.errors import UserError, UserErrors

Result = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One row of the table."""

    name: str
    result: Result
    detail: str
    next_step: str = ""
    error: UserError | None = None
    """What is raised if the run is submitted; only of errors."""


def ok(name: str, detail: str) -> Check:
    return Check(name=name, result="ok", detail=detail)


def warning(name: str, detail: str, *, next_step: str) -> Check:
    return Check(name=name, result="warning", detail=detail, next_step=next_step)


def failed(name: str, error: UserError) -> Iterator[Check]:
    """One row for each error."""
    for each in error.errors if isinstance(error, UserErrors) else (error,):
        detail = f"{each.where}: {each.what}" if each.where else each.what
        if each.allowed:
            detail += f"; allowed: {each.allowed}"
        yield Check(
            name=name, result="error", detail=detail, next_step=each.next_step or "", error=each
        )


def caught(name: str, check: Callable[[], Iterable[Check]]) -> list[Check]:
    """The rows of a check; a UserError becomes rows too."""
    rows: list[Check] = []
    try:
        rows += check()
    except UserError as error:
        rows += failed(name, error)
    return rows


def refuse_or_warn(checks: Sequence[Check], *, leave_out: Container[str] = ()) -> None:
    """Print the warnings. Raise UserErrors with all errors, if any.

    leave_out: checks whose warnings are not printed.
    """
    if errors := [check.error for check in checks if check.error is not None]:
        raise UserErrors(errors)
    for check in checks:
        if check.result == "warning" and check.name not in leave_out:
            warn(f"{check.name}: {check.detail}\n  next: {check.next_step}")


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def as_table(checks: Sequence[Check]) -> str:
    """Check, result and detail in columns; what to do in the line below."""
    rows = [("check", "result", "detail", "")]
    rows += [(check.name, check.result, check.detail, check.next_step) for check in checks]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    lines = []
    previous = None
    for name, result, detail, next_step in rows:
        shown = "" if name == previous else name
        # Details of several lines stay in their column.
        column = " " * (first + second + 4)
        detail = detail.replace("\n", "\n" + column)
        lines.append(f"{shown:<{first}}  {result:<{second}}  {detail}".rstrip())
        if next_step:
            lines.append(f"{column}next: {next_step}")
        previous = name
    return "\n".join(lines)
