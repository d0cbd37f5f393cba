"""Turn the classes of a source into classes (map) and labels (space).

Owns: label spaces and maps in files, and the errors for classes and maps that do not match.
Leaves out: the label spaces known by name (`vitscale.data.label_spaces`), counting images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from data_prep.sources.protocol import NO_CLASS
from vitscale.config.errors import UserError, did_you_mean
from vitscale.config.text_files import read_cells, read_text
from vitscale.data.class_names import look_of, names_by, spelling_of
from vitscale.data.label_spaces import LABEL_SPACES, known_space
from vitscale.runs.data_prep import LabelSettings

PLAIN_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
# int() also accepts "1_0", " 1" and non-ASCII digits.
POSITION = re.compile(r"[0-9]{1,9}")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


class Labels(NamedTuple):
    """Source class -> class -> label."""

    settings: LabelSettings
    space: tuple[str, ...] | None
    """Class names in label order; None: the sorted classes of the source."""
    known: frozenset[str]
    """`space` as a set."""
    map: dict[str, str] | None

    def class_of(self, source_class: str | None) -> str | None:
        """The class of an image; None if the map or the space does not contain it."""
        if self.settings.values == "none":
            return NO_CLASS

        value = source_class
        if self.map is not None and value is not None:
            value = self.map.get(value)
        # Without a space any class is taken.
        if value is None or self.space is None:
            return value
        if self.settings.values == "name":
            if value in self.known:
                return value
            return None
        # As an index, the class is a position in the space.
        is_position = POSITION.fullmatch(value) and int(value) < len(self.space)
        if is_position:
            return self.space[int(value)]
        return None

    def label_map(
        self, found: Mapping[str, int], *, keep_numbers: bool = False
    ) -> tuple[str, ...]:
        """Class names in label order, given the number of images of each class; none if ignored.

        keep_numbers: the source's classes are labels, as in `.cls` members. If all are numbers,
        they stay as they are without a space or map; sorted as text, 10 would become label 2.
        """
        if self.settings.values == "none":
            return ()
        if self.space is not None:
            assert self.known.issuperset(found)
            return self.space

        names = tuple(sorted(found))
        are_numbers = names and all(map(PLAIN_NUMBER.fullmatch, names))
        if keep_numbers and self.map is None and are_numbers:
            # Labels in between may have no image here, and still keep their numbers.
            return tuple(str(number) for number in range(max(map(int, names)) + 1))
        return names

    def check(self, unknown: Mapping[str, int], *, found: Mapping[str, int]) -> None:
        """Raise UserError if the source has classes outside the map or space.

        unknown: source class -> number of images without a class. found: class -> number of images.
        """
        if not unknown:
            return

        listed = self.space if self.map is None else self.map
        looks = names_by(look_of, listed or ())
        # Nobody means to leave out a class that shows like one of the list.
        hidden = [name for name in unknown if look_of(name) in looks]
        num_matching = sum(found.values())
        if self.settings.unknown == "reject" and num_matching and not hidden:
            return

        name = min(hidden or unknown, key=lambda name: (-unknown[name], name))
        example = f"{name!r} ({unknown[name]:,} images)"
        key = "space"
        if self.map is not None and name in self.map:
            example += f", mapped to {self.map[name]!r}"
        elif self.map is not None:
            key = "map"
        close = names_by(spelling_of, listed or ()).get(spelling_of(name))
        if close is not None:
            example += f"; the list has {ascii(close)}, the source {ascii(name)}"

        step = "set labels.unknown=reject to leave these images out"
        if not num_matching:
            step = "set labels.space=null and labels.values=name for the source's own classes"
        raise UserError(
            f"{len(unknown):,} classes of the source ({sum(unknown.values()):,} images) are not "
            f"among the {len(getattr(self, key)):,} of {getattr(self.settings, key)}; "
            f"{num_matching:,} images match; for example {example}",
            where=f"labels.{key}",
            next_step="choose another list, or set labels.map to a table of source class and "
            f"class; or {step}",
        )


@lru_cache(maxsize=1)  # a map may have a million rows
def load_labels(settings: LabelSettings) -> Labels:
    """Read the label files. Raises UserError for unknown spaces and malformed files."""
    space = None if settings.space is None else load_space(settings.space)
    label_map = None if settings.map is None else read_map(settings.map)
    return Labels(
        settings=settings, space=space, known=frozenset(space or ()), map=label_map
    )


def load_space(space: str) -> tuple[str, ...]:
    """Class names in label order, of a known space or from a file with one name per line."""
    if space in LABEL_SPACES:
        return known_space(space)
    where = "labels.space"
    if not Path(space).is_file():
        raise UserError(
            f"{space!r} is neither a known label space nor a file",
            where=where,
            allowed=f"{', '.join(LABEL_SPACES)}, or a file with one class name per line",
            next_step=did_you_mean(space, [*LABEL_SPACES]),
        )

    # str.splitlines also splits at characters that class names may contain.
    lines = read_text(space, where=where).removesuffix("\n").split("\n")
    first: dict[str, int] = {}
    for number, name in enumerate(lines, start=1):
        # Skipping a line would shift all labels after it.
        problem = None if name.strip() else "is empty"
        if first.setdefault(name, number) != number:
            problem = f"{name!r} is already in line {first[name]}"
        if problem:
            raise UserError(
                f"{space}:{number}: {problem}",
                where=where,
                allowed="one class name per line, each once",
            )
    return tuple(first)


def read_map(file: str) -> dict[str, str]:
    """Read a CSV or TSV file of two columns without a header. Raises UserError naming the line."""
    where = "labels.map"
    suffix = Path(file).suffix.lower()
    if suffix not in DELIMITERS:
        raise UserError(f"{file!r} is named neither .csv nor .tsv", where=where)

    pairs: dict[str, str] = {}
    for line, row in read_cells(file, DELIMITERS[suffix], where=where, strict=True):
        problem = ""
        if len(row) != 2 or not all(row):
            problem = f"{sum(map(bool, row))} values instead of 2"
        elif row[0] in pairs:
            problem = f"{row[0]!r} is there already"
        if problem:
            raise UserError(
                f"{file}:{line}: {problem}",
                where=where,
                allowed="two columns without a header: source class, class",
            )
        # Checked by now: two values, both of them new.
        pairs[row[0]] = row[1]
    if not pairs:
        raise UserError(f"{file!r} is empty", where=where)
    return pairs
