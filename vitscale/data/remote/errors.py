"""Define the errors of single answers."""

from __future__ import annotations


class NoRangesError(OSError):
    """The server sent more than the requested range."""


class EncodedError(OSError):
    """The server compressed its answer, so ranges count other bytes."""
