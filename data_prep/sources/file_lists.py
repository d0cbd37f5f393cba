"""The files of each split: one file, a folder's files of one kind, or those a pattern names.

Owns: name patterns with `*`, `?`, `{a,b}` and `{0000..0146}`, and what lies beside such files.
Leaves out: what the files hold (`webdataset_tars`, `parquet_images`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

from data_prep.sources.outages import printable
from data_prep.sources.paths import (
    SplitRoot,
    find_split_roots,
    is_hidden,
    link_reason,
    source_root,
    walk_folder,
)
from data_prep.sources.protocol import Container, Input, Watched
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import SourceSettings

PATTERN_SIGNS = frozenset("*?{")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """File names, without writing out the ones a range stands for."""

    text: str
    expression: re.Pattern[str]
    ranges: tuple[range, ...]
    num_names: int | None
    """How many names there are; None: any number."""

    def matches(self, name: str) -> bool:
        found = self.expression.fullmatch(name)
        return found is not None and all(
            int(number) in values
            for number, values in zip(found.groups(), self.ranges, strict=True)
        )


def name_pattern(text: str) -> NamePattern:
    """Raises ValueError for braces that make no sense."""
    expression, ranges, num_names, is_open = "", [], 1, False
    for piece in re.split(r"(\*|\?|\{[^{}]*\})", text):
        if piece in ("*", "?"):
            expression, is_open = expression + (".*" if piece == "*" else "."), True
        elif piece.startswith("{"):
            bounds = re.fullmatch(r"\{(\d{1,9})\.\.(\d{1,9})\}", piece)
            if bounds:
                low, high = bounds.groups()
                padded = low != str(int(low)) or high != str(int(high))
                width = max(len(low), len(high))
                expression += rf"(\d{{{width}}})" if padded else r"(0|[1-9]\d{0,8})"
                ranges.append(range(int(low), int(high) + 1))
                if not ranges[-1]:
                    raise ValueError(f"{piece} counts down")
            elif "," in piece:
                options = sorted(set(piece[1:-1].split(",")))
                expression += "(?:" + "|".join(map(re.escape, options)) + ")"
                num_names *= len(options)
            else:
                raise ValueError(f"{piece} is neither {{0000..0146}} nor {{one,other}}")
        elif "{" in piece or "}" in piece:
            raise ValueError("braces do not pair up, or lie inside each other")
        else:
            expression += re.escape(piece)
    num_names *= prod(map(len, ranges))
    compiled = re.compile(expression, re.DOTALL | re.ASCII)
    return NamePattern(text, compiled, tuple(ranges), None if is_open else num_names)


@dataclass(frozen=True, slots=True)
class FileList:
    """Files of the kind `is_wanted` says, by name."""

    settings: SourceSettings
    is_wanted: Callable[[str], bool]
    what: str
    """The kind in words, plural."""

    @property
    def root(self) -> Path:
        return source_root(self.settings)

    def containers(self) -> list[Container]:
        """Per split its folder (unless one file was named), then its files by their bytes."""
        found: list[Container] = []
        errors: list[UserError] = []
        for place, pattern in self._split_roots():
            full = self.root / place.path
            if full.is_file():
                if not self.is_wanted(full.name):
                    what = f"{printable(str(full))!r} is not one of the {self.what}"
                    errors.append(UserError(what, where=place.where))
                found.append(Container(place.path, place.split))
                continue
            names = self._names(place, pattern)
            if isinstance(names, UserError):
                errors.append(names)
                continue
            found.append(Container(place.path or ".", place.split))
            found += [Container(os.path.join(place.path, name), place.split) for name in names]
        if errors:
            raise UserErrors(errors)
        files = [box.path for box in found if not (self.root / box.path).is_dir()]
        if len(set(files)) != len(files):
            what = "two splits share files"
            raise UserError(what, where="source.splits", allowed="separate files")
        return found

    def is_folder(self, container: Container) -> bool:
        return (self.root / container.path).is_dir()

    def rest(self, container: Container) -> Iterator[Input | Watched]:
        """What lies beside the files of a folder; for a pattern nothing does."""
        pattern = _pattern_of(self.settings.splits.get(container.split, "."), self.root)
        for row in walk_folder(
            self.root, container, is_container=partial(_is_listed, is_wanted=self.is_wanted)
        ):
            if isinstance(row, Watched):
                yield row
                if pattern is not None:
                    return
            elif row.reason == "other_name" and self.is_wanted(row.path):
                yield replace(row, reason="no_class")  # deeper down, where nobody looks for it
            else:
                yield row

    def _split_roots(self) -> list[tuple[SplitRoot, NamePattern | None]]:
        """Patterns are looked up in their folder, which several splits may share."""
        patterns: dict[str, NamePattern] = {}
        folders = dict(self.settings.splits)
        for split, text in self.settings.splits.items():
            try:
                pattern = _pattern_of(text, self.root)
            except ValueError as error:
                raise UserError(str(error), where=f"source.splits.{split}") from None
            if pattern is not None:
                patterns[split] = pattern
                folders[split] = os.path.dirname(text) or "."
        if not patterns:
            return [(place, None) for place in find_split_roots(self.settings, may_be_file=True)]
        found = []
        for split, folder in folders.items():
            one = self.settings.model_copy(update={"splits": {split: folder}})
            found += [
                (place, patterns.get(split)) for place in find_split_roots(one, may_be_file=True)
            ]
        return found

    def _names(self, place: SplitRoot, pattern: NamePattern | None) -> list[str] | UserError:
        real_root, real_top = os.path.realpath(self.root), os.path.realpath(self.root / place.path)
        names = []
        with os.scandir(self.root / place.path) as entries:
            for entry in entries:
                if not _is_listed(entry, is_wanted=self.is_wanted):
                    continue
                if pattern is not None and not pattern.matches(entry.name):
                    continue
                reason = None
                if entry.is_symlink():
                    reason = link_reason(entry.path, real_root=real_root, real_folders=[real_top])
                if reason and pattern is not None:
                    return UserError(
                        f"{printable(entry.path)!r} is a link out of the source",
                        where=place.where,
                        next_step="choose a source.path that holds the links and what they lead to",
                    )
                if reason is None:
                    names.append(entry.name)
        folder = repr(printable(str(self.root / place.path)))
        if not names:
            like = f" like {pattern.text!r}" if pattern else ""
            return UserError(f"{folder} holds no {self.what}{like}", where=place.where)
        if pattern is not None and pattern.num_names not in (None, len(names)):
            what = f"{folder} holds {len(names)} of the {pattern.num_names:,} {self.what} named"
            return UserError(what, where=place.where, next_step="get the missing files")
        return sorted(names, key=os.fsencode)


def _is_listed(entry: os.DirEntry[str], *, is_wanted: Callable[[str], bool]) -> bool:
    return not is_hidden(entry.name) and is_wanted(entry.name) and entry.is_file()


def _pattern_of(text: str, root: Path) -> NamePattern | None:
    """The pattern in a split's last part; a file or folder of just that name is none."""
    name = os.path.basename(text)
    if not PATTERN_SIGNS & set(name) or (root / text).exists():
        return None
    return name_pattern(name)
