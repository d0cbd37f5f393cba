"""Read the files that settings name; text as the editors of any system write it."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from vitscale.config.errors import UserError, not_read

UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_named(file: str, *, where: str) -> bytes:
    """Return the content of the file that the setting `where` names.

    Raises UserError for a path that is wrong, StorageError.
    """
    try:
        return Path(file).read_bytes()
    except OSError as error:
        where = f"{where}={file}"
        raise not_read(error, where, next_step="correct the path") from None


def read_text(file: str, *, where: str) -> str:
    r"""Return UTF-8 text without its byte order mark, with `\n` for each end of a line.

    Raises UserError naming the first line that is not text, StorageError.
    """
    data = read_named(file, where=where)
    text = ""
    try:
        text = data.decode("utf-8-sig")
        problem = "has a NUL byte"
        position = data.find(b"\0")
    except UnicodeDecodeError as error:
        problem = "is not UTF-8"
        position = error.start

    if position >= 0:
        line = data.count(b"\n", 0, position) + 1
        # A file that Excel saves as "Unicode text" begins like this.
        if data.startswith(UTF_16_MARKS):
            problem = "is UTF-16, not UTF-8"
        raise UserError(
            f"{file!r} cannot be read: it {problem} (byte {position}), in line {line}",
            where=where,
            allowed="UTF-8 text",
            next_step='save it as UTF-8; in Excel as "CSV UTF-8"',
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_cells(
    file: str, delimiter: str, *, where: str, strict: bool = False
) -> list[tuple[int, list[str]]]:
    r"""Return (line, cells) of each row that is not blank.

    A delimiter of `\n` makes each line one cell, which may have quotes and commas.
    strict: quotes may only be around a whole cell, and blanks around a cell belong to it.
    Raises what `read_text` raises, and UserError naming the line.
    """
    lines = io.StringIO(read_text(file, where=where), newline="")
    # Keys of samples may have quotes and commas, so a list of them is not read as CSV.
    quoting: Any = csv.QUOTE_NONE if delimiter == "\n" else csv.QUOTE_MINIMAL
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=strict)

    rows = []
    try:
        for row in reader:
            # Blank lines at the end are common, and mean nothing.
            if any(map(str.strip, row)):
                cells = row if strict else [cell.strip() for cell in row]
                rows.append((reader.line_num, cells))
    except csv.Error as error:
        raise UserError(f"{file}:{reader.line_num}: {error}", where=where) from None
    return rows
