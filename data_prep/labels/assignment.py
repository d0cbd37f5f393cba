"""Assign classes and labels to images.

Owns: the way from a source's class to a class (map) and to a label (space), and the errors for
classes and maps that do not match the space.
Leaves out: reading label files (`label_files`), the classes of a source (`sources`), counting.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from data_prep.labels.label_files import load_space, read_pairs
from data_prep.sources.protocol import NO_CLASS
from vitscale.config.errors import UserError
from vitscale.data.label_spaces import LABEL_SPACES, known_space
from vitscale.runs.data_prep import LabelSettings

PLAIN_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


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
        if self.settings.values == "index":
            return self._at(value)
        return value if value in self.known else None

    def _at(self, index: str) -> str | None:
        assert self.space is not None
        # int() also accepts "1_0", " 1" and non-ASCII digits.
        if not re.fullmatch(r"[0-9]{1,9}", index):
            return None
        position = int(index)
        return self.space[position] if position < len(self.space) else None

    def label_map(self, found: Mapping[str, int], *, keep_numbers: bool = False) -> tuple[str, ...]:
        """Class names in label order, given the number of images of each class; none if ignored.

        keep_numbers: the source's classes are labels, as in `.cls` members. Without a space or map
        they stay as they are; sorting them as text would give class 10 label 2. Raises UserError
        if most of them are numbers and some are not, since sorting would change the numbers.
        """
        if self.settings.values == "none":
            return ()
        if self.space is None:
            names = tuple(sorted(found))
            if keep_numbers and self.map is None:
                if is_numbers(names):
                    return tuple(str(number) for number in range(max(map(int, names)) + 1))
                _refuse_mixture(names, found)
            return names
        assert self.known.issuperset(found)
        return self.space

    def check(self, unknown: Mapping[str, int], *, found: Mapping[str, int] | None = None) -> None:
        """Raise UserError if the source has classes outside the map or space.

        unknown: source class -> number of images without a class. found: class -> number of
        images, for the counts in the message.
        """
        none_match = found is not None and not any(found.values())
        if not unknown or (self.settings.unknown == "reject" and not none_match):
            return
        name, images = min(unknown.items(), key=lambda item: (-item[1], item[0]))
        matching = (
            "" if found is None else f"; {len(found):,} match ({sum(found.values()):,} images)"
        )
        what = (
            f"{len(unknown):,} {_classes(len(unknown))} of the source "
            f"({sum(unknown.values()):,} images) {self._problem_with(name)}{matching}; "
            f"for example {name!r} ({images:,} images)"
        )
        raise UserError(
            what,
            where="labels.map" if self._outside_map(name) else "labels.space",
            next_step=self._advice(unknown, found=found, none_match=none_match),
        )

    def _outside_map(self, name: str) -> bool:
        """Whether the class is missing in the map, not in the space."""
        return self.map is not None and name not in self.map

    def _problem_with(self, name: str) -> str:
        if self._outside_map(name):
            return f"have no class in {self.settings.map!r} ({len(self.map or ()):,} rows)"
        if self.space is None:
            return "have no name"
        mapped = f" (mapped to {self.map[name]!r})" if self.map and name in self.map else ""
        if self.settings.values == "index":
            return f"are no positions 0 to {len(self.space) - 1:,} in {self._space_name()}{mapped}"
        return f"are not among the {len(self.space):,} of {self._space_name()}{mapped}"

    def _space_name(self) -> str:
        return str(self.settings.space)

    def _advice(
        self, unknown: Mapping[str, int], *, found: Mapping[str, int] | None, none_match: bool
    ) -> str:
        steps = []
        better = self._better_space(unknown, found or {})
        if better is not None:
            steps.append(better)
        if self.map is None:
            steps.append("set labels.map to a table of source class and class")
        if not none_match:
            steps.append("set labels.unknown=reject to leave these images out")
        return "; or ".join(steps) or "correct the map"

    def _better_space(self, unknown: Mapping[str, int], found: Mapping[str, int]) -> str | None:
        """Name the known space that contains most of these classes, if it contains more."""
        if self._outside_map(next(iter(unknown))) or self.space is None:
            return None
        wanted = {self.map[name] if self.map else name for name in unknown if self._in_map(name)}
        if self.settings.values == "index":
            return self._large_enough_space(wanted)
        wanted |= set(found)
        sizes = {}
        for name in LABEL_SPACES:
            classes = known_space(name)
            sizes[name] = (len(wanted.intersection(classes)), -len(classes))
        best = max(sizes, key=lambda name: sizes[name])
        fitting = sizes[best][0]
        if best == self.settings.space or fitting <= len(wanted & self.known):
            return None
        return f"labels.space={best} contains {fitting:,} of these {len(wanted):,} classes"

    def _in_map(self, name: str) -> bool:
        return self.map is None or name in self.map

    def _large_enough_space(self, indices: Iterable[str]) -> str | None:
        numbers = [int(index) for index in indices if re.fullmatch(r"[0-9]{1,9}", index)]
        sizes = {name: len(known_space(name)) for name in LABEL_SPACES}
        fitting = [name for name in sizes if numbers and sizes[name] > max(numbers)]
        if not fitting:
            return None
        best = min(fitting, key=lambda name: sizes[name])
        return f"position {max(numbers):,} exists in labels.space={best} ({sizes[best]:,} classes)"


def is_numbers(names: Collection[str]) -> bool:
    """Whether all names are plain numbers such as 0, 1, 10."""
    return bool(names) and all(map(PLAIN_NUMBER.fullmatch, names))


def _refuse_mixture(names: Collection[str], found: Mapping[str, int]) -> None:
    others = [name for name in names if not PLAIN_NUMBER.fullmatch(name)]
    # Numbers padded with zeros (001, 002, 100) sort numerically.
    padded = all(re.fullmatch("[0-9]+", name) for name in names) and len(set(map(len, names))) == 1
    if 2 * len(others) >= len(names) or padded:
        return
    name = max(others, key=lambda name: found[name])
    raise UserError(
        f"{len(names) - len(others):,} of the source's {len(names):,} labels are numbers from 0 to "
        f"999,999, and {len(others):,} ({sum(map(found.__getitem__, others)):,} images) "
        f"{'is' if len(others) == 1 else 'are'} not; for example {name!r} ({found[name]:,} images)",
        where="source.label",
        next_step="correct these labels, or name the classes: labels.map, labels.space",
    )


def _classes(num: int) -> str:
    return "class" if num == 1 else "classes"


def load_labels(settings: LabelSettings) -> Labels:
    """Read the label files. Raises UserError for unknown spaces and malformed files."""
    space = None if settings.space is None else load_space(settings.space)
    known = frozenset(space or ())
    label_map = None
    if settings.map is not None:
        label_map = read_pairs(settings.map, where="labels.map", columns="source class, class")
        _refuse_unrelated_map(settings, label_map, space)
    return Labels(settings=settings, space=space, known=known, map=label_map)


def _refuse_unrelated_map(
    settings: LabelSettings, label_map: Mapping[str, str], space: tuple[str, ...] | None
) -> None:
    """Raise UserError if no class of the map is in the space. `Labels.check` finds others."""
    if space is None:
        return
    trial = Labels(settings=settings, space=space, known=frozenset(space), map=dict(label_map))
    if any(trial.class_of(key) is not None for key in label_map):
        return
    key, value = next(iter(label_map.items()))
    kind = "positions in" if settings.values == "index" else "class names of"
    raise UserError(
        f"none of the {len(label_map):,} rows of {settings.map!r} matches: the second column must "
        f"contain {kind} {settings.space} ({len(space):,} classes); such as {key!r} -> {value!r}",
        where="labels.map",
        next_step="check that the columns are source class, class; and check labels.values",
    )
