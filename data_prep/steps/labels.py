"""Turn the classes of a source into classes (map) and labels (space).

Owns: label spaces and maps in files, and the errors for classes and maps that do not match.
Leaves out: the label spaces known by name (`vitscale.data.label_spaces`), counting images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from data_prep.sources.protocol import NO_CLASS
from vitscale.config.errors import UserError, nearest
from vitscale.config.text_files import read_cells, read_text
from vitscale.data.class_names import look_of, names_by, spelling_of
from vitscale.data.label_spaces import LABEL_SPACES, known_space
from vitscale.runs.data_prep import LabelSettings

PLAIN_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
# int() also accepts "1_0", " 1" and non-ASCII digits.
POSITION = re.compile(r"[0-9]{1,9}")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
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
        if value is None or self.space is None:
            return value
        if self.settings.values == "name":
            return value if value in self.known else None
        is_position = POSITION.fullmatch(value) and int(value) < len(self.space)
        return self.space[int(value)] if is_position else None

    def label_map(self, found: Mapping[str, int], *, keep_numbers: bool = False) -> tuple[str, ...]:
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
        if keep_numbers and self.map is None and names and all(map(PLAIN_NUMBER.fullmatch, names)):
            return tuple(str(number) for number in range(max(map(int, names)) + 1))
        return names

    def check(self, unknown: Mapping[str, int], *, found: Mapping[str, int]) -> None:
        """Raise UserError if the source has classes outside the map or space.

        unknown: source class -> number of images without a class. found: class -> number of images.
        """
        none_match = not any(found.values())
        known = self.space if self.map is None else self.map
        looks, spellings = names_by(look_of, known or ()), names_by(spelling_of, known or ())
        # Nobody means to leave out a class that shows like one of the list.
        hidden = {name: num for name, num in unknown.items() if look_of(name) in looks}
        is_rejected = self.settings.unknown == "reject" and not none_match and not hidden
        if not unknown or is_rejected:
            return
        shown = hidden or unknown
        name, images = min(shown.items(), key=lambda item: (-item[1], item[0]))
        close = looks.get(look_of(name)) or spellings.get(spelling_of(name))
        like = f"; the list has {ascii(close)}, the source {ascii(name)}" if close else ""
        is_mapped = self.map is None or name in self.map
        value = name if self.map is None else self.map.get(name)
        size = len(self.space or ())
        if not is_mapped:
            problem = f"have no class in {self.settings.map!r} ({len(self.map or ()):,} rows)"
        elif self.settings.values == "index":
            problem = f"are not positions in {self.settings.space} (0 to {size - 1:,})"
        else:
            problem = f"are not among the {size:,} of {self.settings.space}"
        problem += f" (mapped to {value!r})" if is_mapped and self.map else ""
        steps = []
        if self.map is None:
            positions = self.settings.values == "index"
            steps.append(self._better_space({*unknown} if positions else {*unknown, *found}))
            steps.append("set labels.map to a table of source class and class")
        if not none_match:
            steps.append("set labels.unknown=reject to leave these images out")
        elif self.map is None and self.settings.values == "name":
            steps.append("set labels.space=null for the source's own classes, sorted")
        raise UserError(
            f"{len(unknown):,} {'class' if len(unknown) == 1 else 'classes'} of the source "
            f"({sum(unknown.values()):,} images) {problem}; {sum(found.values()):,} images "
            f"match; for example {name!r} ({images:,} images){like}",
            where="labels.space" if is_mapped else "labels.map",
            next_step="; or ".join(filter(None, steps)) or "correct the map",
        )

    def _better_space(self, wanted: set[str]) -> str | None:
        """Name the known space that contains most of these classes, if it contains more."""
        num_in = {}
        for name in LABEL_SPACES:
            other = load_labels(self.settings.model_copy(update={"space": name, "map": None}))
            num_in[name] = sum(other.class_of(each) is not None for each in wanted)
        best = max(num_in, key=lambda name: (num_in[name], -len(known_space(name))))
        if num_in[best] <= sum(self.class_of(each) is not None for each in wanted):
            return None
        return f"labels.space={best} contains {num_in[best]:,} of these {len(wanted):,} classes"


@lru_cache(maxsize=len(LABEL_SPACES) + 1)  # a map may have a million rows
def load_labels(settings: LabelSettings) -> Labels:
    """Read the label files. Raises UserError for unknown spaces and malformed files."""
    space = None if settings.space is None else load_space(settings.space)
    label_map = None if settings.map is None else read_map(settings.map)
    return Labels(settings=settings, space=space, known=frozenset(space or ()), map=label_map)


def load_space(space: str) -> tuple[str, ...]:
    """Class names in label order, of a known space or from a file with one name per line."""
    if space in LABEL_SPACES:
        return known_space(space)
    path, where = Path(space).expanduser(), "labels.space"
    if not path.is_file():
        close = nearest(space, list(LABEL_SPACES))
        raise UserError(
            f"{space!r} is neither a known label space nor a file"
            + (f"; did you mean {close!r}?" if close else ""),
            where=where,
            allowed=", ".join(LABEL_SPACES) + ", or a file with one class name per line",
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
            what, allowed = f"{space}:{number}: {problem}", "one class name per line, each once"
            raise UserError(what, where=where, allowed=allowed)
    return tuple(first)


def read_map(file: str) -> dict[str, str]:
    """Read a CSV or TSV file of two columns without a header. Raises UserError naming the line."""
    suffix, where = Path(file).suffix.lower(), "labels.map"
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
            allowed = "two columns without a header: source class, class"
            raise UserError(f"{file}:{line}: {problem}", where=where, allowed=allowed)
        pairs[row[0]] = row[1]
    if not pairs:
        raise UserError(f"{file!r} is empty", where=where)
    return pairs
