"""Lines of a text table, and the rows in them, in bounded memory.

Owns: reading from any line on, caps on the length of lines and cells, quotes.
Leaves out: what the columns mean (`path_table`).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator

from data_prep.sources.protocol import printable
from vitscale.config.errors import UserError

MAX_LINE_BYTES = 1 << 20


class Lines:
    """Lines of a part of a file as text, and where the next one starts."""

    def __init__(self, fd: int, start: int, stop: int, path: str) -> None:
        self.fd, self.position, self.stop, self.path = fd, start, stop, path
        self.data, self.place = b"", 0

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        end = self.data.find(b"\n", self.place)
        while end < 0:
            rest = self.data[self.place :]
            start = self.position + len(rest)
            more = os.pread(self.fd, MAX_LINE_BYTES, start)[: max(0, self.stop - start)]
            self.data, self.place = rest + more, 0
            end = self.data.find(b"\n")
            if end < 0 and not more:
                if not rest:
                    raise StopIteration
                end = len(rest) - 1
            elif end < 0 and len(self.data) > MAX_LINE_BYTES:
                break
        if not 0 <= end - self.place < MAX_LINE_BYTES:
            raise UserError(
                f"{printable(self.path)!r} has a line of more than {MAX_LINE_BYTES:,} bytes",
                where="source.path",
            )
        line = self.data[self.place : end + 1]
        self.place = end + 1
        self.position += len(line)
        return line.decode("utf-8", "surrogateescape")


def csv_rows(lines: Lines, *, delimiter: str) -> Iterator[list[str]]:
    """Rows of the lines; an empty line is an empty row. Raises UserError for wrong quotes."""
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        place = lines.position
        try:
            row = next(rows, None)
        except csv.Error as error:
            what = f"{printable(lines.path)!r} cannot be read at byte {place}: {error}"
            raise UserError(what, where="source.path") from None
        if row is None:
            return
        yield row


def has_quote(fd: int) -> bool:
    """Whether a line may end inside a cell."""
    position = 0
    while data := os.pread(fd, 1 << 20, position):
        if b'"' in data:
            return True
        position += len(data)
    return False


def next_line(fd: int, position: int, *, first: int, path: str) -> int:
    """Where the first line starts that does not start before `position`."""
    if position == first:
        return position
    lines = Lines(fd, position - 1, os.fstat(fd).st_size, path)
    next(lines, "")
    return lines.position
