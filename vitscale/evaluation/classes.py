"""How a model's outputs meet the classes of a data set: the one rule for all that compare them.

Needs no torch. Leaves out: the lists of ImageNet's releases (`data.label_spaces`).
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from vitscale.config.errors import UserError
from vitscale.data.label_spaces import (
    LABEL_SPACES,
    SUBSETS,
    known_space,
    timm_file,
)

LACKING = -1
# Libraries word up to 3 % of ImageNet's classes in their own way.
MIN_AGREEING = 0.9


class ClassMap(NamedTuple):
    """The model's output for each class of a data set."""

    columns: tuple[int, ...]
    """By label of the data: the position of its output, LACKING without one."""
    how: str = ""
    """A sentence on how they were matched; empty where names and order are the same."""

    def lacking(self, data: Sequence[str]) -> list[str]:
        """The classes of `data` that the model has no output for."""
        pairs = zip(data, self.columns, strict=True)
        return [name for name, column in pairs if column == LACKING]


def column_of_each_class(
    model: Sequence[str] | None, data: Sequence[str], *, num_outputs: int
) -> ClassMap:
    """Find the model's output for each class of a data set.

    By name; else by what names mean in ImageNet's releases: WordNet ids, WordNet's words, or
    numbers, in any mixture of the two sides; by position only where neither side has names.

    model: name of each output; None: unknown. data: class names by label.
    Raises UserError where the data's classes alone have names.
    """
    named = _columns(
        [_plain(name) for name in model or ()], [_plain(name) for name in data]
    )
    if named == tuple(range(num_outputs)):
        return ClassMap(named)
    if LACKING not in named:
        return ClassMap(named, "matched by name")

    # Neither side has a name that says which class it is.
    if model is None and num_outputs == len(data):
        numbers = _numbers(data)
        if numbers:
            return ClassMap(
                numbers, "matched by position, since neither side has names"
            )

    # A name says more than a meaning, which the other classes may still have.
    meant = list(named)
    theirs, ours = _meanings(model, data, num_outputs=num_outputs)
    for label, column in enumerate(_columns(theirs, ours)):
        if meant[label] == LACKING:
            meant[label] = column
    if meant.count(LACKING) < named.count(LACKING):
        how = "matched by WordNet's ids and words"
        if not model:
            how += f", the model's {num_outputs:,} outputs taken as ImageNet's"
        return ClassMap(tuple(meant), how)

    # With names on one side alone a position would be a guess.
    if model is None:
        raise UserError(
            f"the classes of the model's {num_outputs:,} outputs are unknown, and the data's have "
            f"names, such as {data[0]!r}",
            where="init",
            allowed="names of the outputs, or as many outputs as a release of ImageNet has",
            next_step="put their names by label into a JSON list classes.json beside the "
            "weights, or give a folder of timm or Hugging Face that has them",
        )
    return ClassMap(named, "matched by name")


def _plain(name: str) -> str:
    """Accents have two spellings in Unicode; macOS writes folders in the other one."""
    return unicodedata.normalize("NFC", name)


def _columns(
    outputs: Sequence[str | None], classes: Sequence[str | None]
) -> tuple[int, ...]:
    """The output of each class, by name.

    A name that two outputs or two classes have is the name of none.
    """
    # Which of the two is meant, nobody can tell.
    ambiguous: set[str | None] = {None}
    for names in (outputs, classes):
        counts = Counter(names)
        ambiguous.update(name for name, count in counts.items() if count > 1)

    columns = {
        name: column for column, name in enumerate(outputs) if name not in ambiguous
    }
    return tuple(columns.get(name, LACKING) for name in classes)


def _numbers(names: Sequence[str]) -> tuple[int, ...] | None:
    """Names that are the numbers from 0 on, in any order, as numbers; None for others."""
    if not all(name.isascii() and name.isdigit() for name in names):
        return None
    numbers = tuple(map(int, names))
    if sorted(numbers) != list(range(len(numbers))):
        return None
    return numbers


def _meanings(
    model: Sequence[str] | None, data: Sequence[str], *, num_outputs: int
) -> tuple[list[str | None], list[str | None]]:
    """The WordNet id of each output and of each class; None where there is none."""
    outputs = _in_order(model, num_outputs)
    classes = _in_order(data, len(data))

    # Words are looked up among few ids: 43 of 21,843 synsets are called "bay".
    names = (*(outputs or model or ()), *(classes or data))
    ids = [name for name in names if name in _words()]
    among = tuple(dict.fromkeys(ids)) or known_space("imagenet_1k")
    theirs = outputs or _by_word(model or (), among)
    ours = classes or _by_word(data, among)

    # Numbers are positions in the list that the model has, or in the release with as many classes.
    numbers = _numbers(data)
    if numbers:
        listed: Sequence[str | None] = ()
        space = _space_of_length(len(data))
        if outputs is not None and len(theirs) == len(data):
            listed = theirs
        elif space is not None:
            listed = known_space(space)
        if listed:
            ours = [listed[number] for number in numbers]
    return list(theirs), list(ours)


def _space_of_length(num_classes: int) -> str | None:
    """The name of the label space with so many classes."""
    sizes = {len(known_space(name)): name for name in LABEL_SPACES}
    return sizes.get(num_classes)


def _in_order(names: Sequence[str] | None, count: int) -> Sequence[str] | None:
    """The ids of a list of ImageNet that these names are, in its order; None if they are none.

    names: None: unknown; then their number tells the release.
    """
    if names is None:
        space = _space_of_length(count)
        if space is None:
            return None
        return known_space(space)

    # Lists of other libraries are compared word by word: a few of their names differ.
    for name in LABEL_SPACES | SUBSETS:
        ids = known_space(name)
        if len(ids) == count:
            pairs = zip(names, ids, strict=False)
            agreeing = [synset for word, synset in pairs if _means(word, synset)]
            if len(agreeing) >= MIN_AGREEING * count:
                return ids
    return None


def _means(name: str, synset: str) -> bool:
    return name == synset or bool(_terms(name) & _terms(_words()[synset]))


def _by_word(names: Sequence[str], among: Sequence[str]) -> list[str | None]:
    """The id in `among` that each name is, or whose words it is; None for none and for several."""
    by_words: dict[frozenset[str], set[str]] = {}
    by_term: dict[str, set[str]] = {}
    for synset in among:
        # Two synsets may share one word, but rarely all.
        terms = _terms(_words()[synset])
        by_words.setdefault(terms, set()).add(synset)
        for term in terms:
            by_term.setdefault(term, set()).add(synset)

    matched: list[str | None] = []
    for name in names:
        if name in _words():
            matched.append(name)
            continue

        # All words at once are rarer than one of them: a "crane" is a bird and a machine.
        terms = _terms(name)
        candidates = by_words.get(terms)
        if candidates is None:
            candidates = set().union(*(by_term.get(term, ()) for term in terms))
        matched.append(min(candidates) if len(candidates) == 1 else None)
    return matched


def _terms(words: str) -> frozenset[str]:
    """`Great_white shark, white shark: a fish` -> {great white shark, white shark}."""
    # Folder names have underscores for spaces, and some lists a definition behind the words.
    plain = _plain(words).casefold().replace("_", " ").partition(": ")[0]
    return frozenset(term.strip() for term in plain.split(","))


@cache
def _words() -> dict[str, str]:
    """WordNet's words of each of ImageNet's ids, such as `tench, Tinca tinca`."""
    path = timm_file("imagenet_synset_to_lemma.txt", where="data.path")
    lines = path.read_text("utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)
