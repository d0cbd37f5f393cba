"""Results of the checks before a run is submitted, as a table, JSON or errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def worst(checks: Sequence[Check]) -> Result:
    results = {check.result for check in checks}
    return "error" if "error" in results else "warning" if "warning" in results else "ok"


def raise_errors(checks: Sequence[Check]) -> None:
    """Raise UserErrors with all errors, if any."""
    if errors := [check.error for check in checks if check.error is not None]:
        raise UserErrors(errors)


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


def as_json(checks: Sequence[Check]) -> str:
    rows = [
        {
            "check": check.name,
            "result": check.result,
            "detail": check.detail,
            "next_step": check.next_step,
        }
        for check in checks
    ]
    return json.dumps({"result": worst(checks), "checks": rows}, indent=2)
