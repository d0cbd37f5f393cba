"""Tell folders and files that are splits from classes and other files, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.data.folders import folders_in

# The keywords by which Hugging Face `datasets` recognises splits.
SPLIT_OF_NAME = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "holdout"), "test"),
}
# Parts of other names of splits, such as seg_train, trainset, PublicTest, test2, val_images, and
# imagesTr and labelsTs of medical images.
OF_TRAIN = re.compile("train|trn|(image|label|mask)s?_?tr$", re.I)
OF_OTHERS = re.compile("val|dev|te?st|hold|(image|label|mask)s?_?ts$", re.I)
# Folders of pictures and of their annotations are no classes either.
OF_PARTS = re.compile("(image|label|mask)s?_?(tr|ts|val|train|test)", re.I)
# A word such as trainval, testset or testA in a file's name, but not valley, contest, developer.
WORD_OF_SPLIT = re.compile(
    rf"[a-z]*train[a-z]*|({'|'.join(SPLIT_OF_NAME)}|trn|tst)(sets?|s|data|images?|[a-z])?"
)
NAMES_SHOWN = 10


def splits_of_folders(root: Path) -> dict[str, str]:
    """Split -> sub-folder if all sub-folders are named like splits; nothing if they are classes.

    Raises UserError if they may be either, OSError.
    """
    names = folders_in(root)
    keywords = [name for name in names if name.lower() in SPLIT_OF_NAME]
    splits = {SPLIT_OF_NAME[name.lower()]: name for name in keywords}
    if len(splits) == len(names) and "train" in splits:
        return splits

    like_train = set(filter(OF_TRAIN.search, names))
    like_splits = like_train.union(filter(OF_OTHERS.search, names))
    has_both = like_train and like_splits - like_train
    are_all = len(like_splits) == len(names)

    # A class may be called train, too, as in CIFAR-100. Splits have folders inside, or are most
    # of the folders.
    nested = {name for name in like_splits if folders_in(root / name)}
    are_splits = has_both and 2 * len(like_splits) >= len(names)
    are_splits = are_splits or (are_all and (nested or len(keywords) == len(names)))
    are_splits = are_splits or (are_all and any(map(OF_PARTS.fullmatch, names)))
    if "train" in splits and nested.intersection(keywords):
        others = (name for name in names if name not in like_splits)
        are_splits = are_splits or len(splits) > 1
        are_splits = are_splits or not any(folders_in(root / name) for name in others)
    if names and are_splits:
        raise ambiguous_splits(sorted(like_splits) + sorted(set(names) - like_splits))
    return {}


def splits_of_files(names: Set[str], *, are_classes: bool = False) -> dict[str, str]:
    """File -> split, by the one keyword in which each name differs; nothing if none has a word of
    a split, or all have the same.

    are_classes: of which a few may be called like splits, as with folders. Raises UserError for
    other names with such words, and where no split is `train`.
    """
    words = dict[str, set[str]]()
    for name in names:
        words[name] = set(
            filter(WORD_OF_SPLIT.fullmatch, re.findall("[a-z]+", name.lower()))
        )
    common = set.intersection(*words.values())

    # A word that is no keyword stays, and so do several.
    found = dict[str, str]()
    for name in names:
        word = "".join(words[name] - common)
        found[name] = SPLIT_OF_NAME.get(word, word)
    num_others = list(found.values()).count("")
    if num_others == len(names) or (are_classes and 2 * num_others > len(names)):
        return {}

    splits = set(found.values())
    if "train" not in splits or not splits.issubset(SPLIT_OF_NAME.values()):
        patterns = {re.sub("[0-9]+", "*", name) for name in names}
        raise ambiguous_splits(sorted(patterns), everything='"*"')
    return found


def ambiguous_splits(names: Sequence[str], *, everything: str = ".") -> UserError:
    """The error for folders or files of which some, or all, are named like splits.

    everything: what stands for all of them in `source.splits`.
    """
    example = dict[str, str]()
    for name in names:
        if OF_TRAIN.search(name):
            example.setdefault("train", name)
        elif OF_OTHERS.search(name):
            example.setdefault(
                "test" if re.search("te?st|hold", name, re.I) else "val", name
            )

    places = ", ".join(f"{split}: {name!r}" for split, name in example.items())
    return UserError(
        f"these are named like splits, all or some: {', '.join(map(repr, names[:NAMES_SHOWN]))}",
        where="source.path",
        next_step=f'if they are splits, say which are which: "source.splits={{{places}}}", which '
        f"ignores all others; if they are not: 'source.splits={{train: {everything}}}'",
    )
