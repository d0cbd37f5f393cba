"""Find class names that are meant to be equal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from vitscale.config.errors import nearest

# Characters that separate the words of a name, and those that show as nothing: marks of byte
# order and direction, NUL.
BETWEEN_WORDS = re.compile(r"[\s_-]+")
INVISIBLE = re.compile(r"[\0\u00ad\u200b-\u200f\u2060\ufeff]")


def look_of(name: str) -> str:
    """The name without what nobody sees: the form of its accents, kinds and number of blanks."""
    # One letter with its accent may be stored as one character or as two; NFC makes it one.
    text = INVISIBLE.sub("", unicodedata.normalize("NFC", name))
    return " ".join(text.split())


def spelling_of(name: str) -> str:
    """The same for names that differ in case, blanks, `_` and `-` alone."""
    return BETWEEN_WORDS.sub(" ", look_of(name).casefold()).strip()


def names_by(form: Callable[[str], str], names: Iterable[str]) -> dict[str, str]:
    """`look_of` or `spelling_of` each name -> the name."""
    return {form(name): name for name in names}


def closest(name: str, known: Sequence[str]) -> str | None:
    """The known name that this one is another spelling of, else the most similar one, if any."""
    # A different spelling is certain to be meant; a similar name is only a guess.
    return names_by(spelling_of, known).get(spelling_of(name)) or nearest(name, known)
