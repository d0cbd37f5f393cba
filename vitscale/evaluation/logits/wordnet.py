"""Read the hierarchy of nouns from WordNet's `data.noun`.

Format: wndb(5WN) of WordNet 3.0. A synset's id is `n` and its eight-digit offset in the file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vitscale.config.errors import UserError

SYNSET = re.compile(r"n\d{8}")
NEXT_STEP = (
    "install WordNet (Debian: apt-get install wordnet-base), or set wordnet to its data.noun"
)
# Hypernyms, and those of instances.
POINTERS = ("@", "@i")


@dataclass(frozen=True, slots=True)
class Noun:
    lemma: str
    parent: str | None
    """The first hypernym; None: the root."""


@cache
def read_nouns(path: Path) -> dict[str, Noun]:
    """Every noun by its id. Raises UserError where the file is missing or is none of WordNet's."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not ASCII"
        raise UserError(
            f"WordNet's nouns cannot be read ({reason})", where=str(path), next_step=NEXT_STEP
        ) from None
    nouns = {}
    for number, line in enumerate(lines, start=1):
        if line.startswith(" "):  # the licence
            continue
        try:
            name, noun = _noun(line.split(" | ")[0].split())
        except (ValueError, IndexError):
            raise UserError(
                f"line {number} is not one of WordNet's data files",
                where=str(path),
                next_step=NEXT_STEP,
            ) from None
        nouns[name] = noun
    return nouns


def _noun(fields: list[str]) -> tuple[str, Noun]:
    offset, kind, num_words = fields[0], fields[2], int(fields[3], 16)
    if kind != "n" or not SYNSET.fullmatch(f"n{offset}"):
        raise ValueError(offset)
    start = 4 + 2 * num_words
    pointers = fields[start + 1 : start + 1 + 4 * int(fields[start])]
    for i in range(0, len(pointers), 4):
        symbol, target = pointers[i : i + 2]
        if symbol in POINTERS:
            return f"n{offset}", Noun(fields[4], f"n{target}")
    return f"n{offset}", Noun(fields[4], None)


def path_to(name: str, nouns: Mapping[str, Noun]) -> list[str]:
    """From the root to the synset itself. Raises KeyError for an unknown one."""
    path: list[str] = []
    current: str | None = name
    while current is not None:
        path.append(current)
        current = nouns[current].parent
    return path[::-1]


def ancestor(name: str, nouns: Mapping[str, Noun], *, depth: int, among: Collection[str]) -> str:
    """The nearest synset of `among` at or above one, or without `among` that at `depth`.

    The synset itself where there is none. The root has depth 0.
    """
    path = path_to(name, nouns)
    if not among:
        return path[min(depth, len(path) - 1)]
    return next((each for each in reversed(path) if each in among), name)
