"""List the files of each split: one file, all files of a kind in a folder, or those of a pattern.

Owns: name patterns with `*`, `?`, `{a,b}` and `{0000..0146}`, and other files in the same folder.
Leaves out: the content of the files (`webdataset_tars`, `parquet_images`, `path_table`).
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
from data_prep.sources.protocol import Container, Input
from vitscale.config.errors import UserError, UserErrors
from vitscale.runs.data_prep import SourceSettings

PATTERN_SIGNS = frozenset("*?{")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A set of file names, without writing out its ranges."""

    text: str
    expression: re.Pattern[str]
    ranges: tuple[range, ...]
    num_names: int | None
    """Number of names in the set; None: unlimited."""

    def matches(self, name: str) -> bool:
        found = self.expression.fullmatch(name)
        return found is not None and all(
            int(number) in values
            for number, values in zip(found.groups(), self.ranges, strict=True)
        )


def name_pattern(text: str) -> NamePattern:
    """Parse a pattern. Raises ValueError for malformed braces."""
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
                    raise ValueError(f"{piece} is an empty range")
            elif "," in piece:
                options = sorted(set(piece[1:-1].split(",")))
                expression += "(?:" + "|".join(map(re.escape, options)) + ")"
                num_names *= len(options)
            else:
                raise ValueError(
                    f"{piece} is neither a range such as {{0000..0146}} nor a list such as {{a,b}}"
                )
        elif "{" in piece or "}" in piece:
            raise ValueError("braces are unbalanced or nested")
        else:
            expression += re.escape(piece)
    num_names *= prod(map(len, ranges))
    compiled = re.compile(expression, re.DOTALL | re.ASCII)
    return NamePattern(text, compiled, tuple(ranges), None if is_open else num_names)


@dataclass(frozen=True, slots=True)
class FileList:
    """All files whose names `is_wanted` accepts."""

    settings: SourceSettings
    is_wanted: Callable[[str], bool]
    kind: str
    """What such files are called in messages, plural."""

    @property
    def root(self) -> Path:
        return source_root(self.settings)

    def containers(self) -> list[Container]:
        """Per split its folder (unless the split is one file), then its files, sorted by bytes."""
        found: list[Container] = []
        errors: list[UserError] = []
        for top, pattern in self._split_roots():
            full = self.root / top.path
            if full.is_file():
                if not self.is_wanted(full.name):
                    what = f"{printable(str(full))!r} is not one of the {self.kind}"
                    errors.append(UserError(what, where=top.where))
                found.append(Container(top.path, top.split))
                continue
            names = self._names(top, pattern)
            if isinstance(names, UserError):
                errors.append(names)
                continue
            found.append(Container(top.path or ".", top.split))
            found += [Container(os.path.join(top.path, name), top.split) for name in names]
        if errors:
            raise UserErrors(errors)
        files = [box.path for box in found if not (self.root / box.path).is_dir()]
        if len(set(files)) != len(files):
            what = "two splits share files"
            raise UserError(what, where="source.splits", allowed="separate files")
        return found

    def is_folder(self, container: Container) -> bool:
        return (self.root / container.path).is_dir()

    def other_files(self, container: Container) -> Iterator[Input]:
        """Other files in the folder of a split; none if the split is a pattern."""
        if _pattern_of(self.settings.splits.get(container.split, "."), self.root) is not None:
            return
        for row in walk_folder(
            self.root, container, is_container=partial(_is_listed, is_wanted=self.is_wanted)
        ):
            if row.reason == "other_name" and self.is_wanted(row.path):
                yield replace(row, reason="no_class")  # in a sub-folder, where files are not listed
            else:
                yield row

    def _split_roots(self) -> list[tuple[SplitRoot, NamePattern | None]]:
        """Roots of the splits, and their patterns. Several patterns may share a folder."""
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
            return [(top, None) for top in find_split_roots(self.settings, may_be_file=True)]
        found = []
        for split, folder in folders.items():
            one = self.settings.model_copy(update={"splits": {split: folder}})
            found += [(top, patterns.get(split)) for top in find_split_roots(one, may_be_file=True)]
        return found

    def _names(self, top: SplitRoot, pattern: NamePattern | None) -> list[str] | UserError:
        real_root, real_top = os.path.realpath(self.root), os.path.realpath(self.root / top.path)
        names = []
        with os.scandir(self.root / top.path) as entries:
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
                        f"{printable(entry.path)!r} is a link out of the source, and not followed",
                        where=top.where,
                        next_step="choose a source.path that contains the links and their targets",
                    )
                if reason is None:
                    names.append(entry.name)
        folder = repr(printable(str(self.root / top.path)))
        if not names:
            like = f" matching {pattern.text!r}" if pattern else ""
            return UserError(f"{folder} contains no {self.kind}{like}", where=top.where)
        if pattern is not None and pattern.num_names not in (None, len(names)):
            what = f"{folder} contains {len(names)} of the {pattern.num_names:,} {self.kind} named"
            return UserError(what, where=top.where, next_step="get the missing files")
        return sorted(names, key=os.fsencode)


def _is_listed(entry: os.DirEntry[str], *, is_wanted: Callable[[str], bool]) -> bool:
    return not is_hidden(entry.name) and is_wanted(entry.name) and entry.is_file()


def _pattern_of(text: str, root: Path) -> NamePattern | None:
    """The pattern in the last part of a path; None if a file or folder has that very name."""
    name = os.path.basename(text)
    if not PATTERN_SIGNS & set(name) or os.path.exists(root / text):
        return None
    return name_pattern(name)
