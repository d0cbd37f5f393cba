"""Keep text that comes from outside from harm in terminals and CSV.

Owns: which characters a terminal obeys, which cells a spreadsheet computes. Leaves out: secrets
(`redaction`), and how far a packed file may unpack (`packed_files`).
"""

from __future__ import annotations

import re
import sys
from typing import Any

# Control characters (C0, DEL, C1), which terminals obey; a line of text ends with a line feed.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CONTROL_IN_TEXT = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# First characters of a formula (OWASP, "CSV injection").
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def visible(text: str) -> str:
    """Return a name with control characters as \\xNN."""
    return _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"


def csv_cell(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: an apostrophe comes before such text.

    Numbers, also those in text, stay.
    """
    if not isinstance(value, str):
        return value
    shown = visible(value)
    if not value.startswith(_FORMULA):
        return shown
    # Numbers may begin with a sign, and computing them changes nothing.
    try:
        float(value)
    except ValueError:
        return f"'{shown}"
    return shown


class _Terminal:
    """A stream that a program prints to, without the control characters in what it prints."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(_CONTROL_IN_TEXT.sub(_escaped, text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_terminal() -> None:
    """Print names from outside, in results and in errors, without what a terminal would obey."""
    # Called twice, as by a script that another one calls, it must not wrap itself.
    if not isinstance(sys.stdout, _Terminal):
        streams: Any = sys
        streams.stdout = _Terminal(sys.stdout)
        streams.stderr = _Terminal(sys.stderr)
