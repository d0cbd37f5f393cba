"""Read label spaces and label maps.

Owns: files of class names, tables of two columns, their hashes.
Leaves out: the label spaces known by name (`label_spaces`), assigning classes and labels
(`assignment`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from data_prep.sources.outages import printable
from data_prep.sources.paths import hash_named_file, read_text
from vitscale.config.errors import UserError, nearest
from vitscale.data.label_spaces import LABEL_SPACES, known_space
from vitscale.runs.data_prep import LabelSettings

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def load_space(space: str) -> tuple[str, ...]:
    """Class names in label order, of a known space or from a file with one name per line."""
    if space in LABEL_SPACES:
        return known_space(space)
    if not Path(space).expanduser().is_file():
        close = nearest(space, list(LABEL_SPACES))
        raise UserError(
            f"{space!r} is neither a known label space nor a file"
            + (f"; did you mean {close!r}?" if close else ""),
            where="labels.space",
            allowed=", ".join(LABEL_SPACES) + ", or a file with one class name per line",
        )
    return _read_names(Path(space).expanduser(), where="labels.space")


def _read_names(path: Path, *, where: str) -> tuple[str, ...]:
    names = read_text(path, where=where).split("\n")
    if names[-1] == "":
        names.pop()
    lines: dict[str, int] = {}
    for number, name in enumerate((name.removesuffix("\r") for name in names), start=1):
        if not name.strip():
            # Skipping a line would shift all labels after it.
            raise _bad_line(path, number, "is empty", where=where, allowed="one class per line")
        if name in lines:
            what = f"{name!r} is already in line {lines[name]}"
            raise _bad_line(path, number, what, where=where, allowed="each class once")
        lines[name] = number
    if not lines:
        raise UserError(f"{str(path)!r} is empty", where=where, allowed="one class name per line")
    return tuple(lines)


def read_pairs(file: str, *, where: str, columns: str) -> dict[str, str]:
    """A CSV or TSV file of two columns without a header. Raises UserError naming the line."""
    path = Path(file).expanduser()
    delimiter = DELIMITERS.get(path.suffix.lower())
    if delimiter is None:
        raise UserError(f"{file!r} is named neither .csv nor .tsv", where=where)
    expected = f"two columns without a header: {columns}"
    pairs: dict[str, str] = {}
    lines: dict[str, int] = {}
    for number, row in _rows(path, delimiter=delimiter, where=where, allowed=expected):
        if len(row) != 2 or not all(row):
            num = sum(map(bool, row))
            what = f"{num} {'value' if num == 1 else 'values'} instead of 2"
            raise _bad_line(path, number, what, where=where, allowed=expected)
        key, value = row
        if key in pairs:
            what = f"{key!r} is already in line {lines[key]}"
            raise _bad_line(path, number, what, where=where, allowed="each key once")
        pairs[key], lines[key] = value, number
    if not pairs:
        raise UserError(f"{file!r} is empty", where=where, allowed=expected)
    return pairs


def _rows(
    path: Path, *, delimiter: str, where: str, allowed: str
) -> Iterator[tuple[int, list[str]]]:
    text = read_text(path, where=where).removeprefix("\ufeff")
    # str.splitlines also splits at characters that class names may contain.
    lines = iter(line + "\n" for line in text.replace("\r\n", "\n").split("\n"))
    if delimiter == ",":
        reader = csv.reader(lines, strict=True)
    else:
        reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise _bad_line(path, reader.line_num, str(error), where=where, allowed=allowed) from (
                None
            )
        if row is None:
            return
        if row:
            yield reader.line_num, row


def _bad_line(path: Path, line: int, what: str, *, where: str, allowed: str) -> UserError:
    return UserError(f"{printable(str(path))}:{line}: {what}", where=where, allowed=allowed)


def label_hashes(settings: LabelSettings) -> dict[str, str]:
    """BLAKE3 of each label file in the settings, as `KEY_blake3`. Raises UserError."""
    files = {"map": settings.map, "space": settings.space}
    if settings.space in LABEL_SPACES:
        del files["space"]
    elif settings.space is not None and not Path(settings.space).expanduser().is_file():
        load_space(settings.space)  # raises an error with the known names
    return {
        f"{key}_blake3": hash_named_file(Path(file).expanduser(), where=f"labels.{key}")
        for key, file in files.items()
        if file is not None
    }
