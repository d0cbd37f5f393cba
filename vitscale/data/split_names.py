"""Tell folders and files that are splits from classes and other files, by their names."""

from __future__ import annotations

import os
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
# Parts of other names of splits, such as seg_train, trainset, PublicTest, test2, val_images.
OF_TRAIN, OF_OTHERS = re.compile("train", re.I), re.compile("val|dev|test|hold", re.I)
NAMES_SHOWN = 10


def splits_of_folders(root: Path) -> dict[str, str]:
    """Split -> sub-folder if all sub-folders are named like splits; nothing if they are classes.

    Raises UserError if they may be either, OSError.
    """
    names = folders_in(root)
    keywords = [name for name in names if name.lower() in SPLIT_OF_NAME]
    splits = {SPLIT_OF_NAME[name.lower()]: name for name in keywords}
    if names and len(splits) == len(names) and "train" in splits:
        return splits

    like_train = set(filter(OF_TRAIN.search, names))
    like_splits = like_train.union(filter(OF_OTHERS.search, names))
    has_both = like_train and like_splits - like_train
    are_all = len(like_splits) == len(names)

    # A class may be called train, too, as in CIFAR-100. Splits have folders inside, or are most.
    nested = {name for name in like_splits if folders_in(root / name)}
    are_splits = has_both and 2 * len(like_splits) >= len(names)
    are_splits = are_splits or (are_all and (nested or len(keywords) == len(names)))
    if "train" in splits and nested.intersection(keywords):
        others = (name for name in names if name not in like_splits)
        are_splits = are_splits or len(splits) > 1 or not any(folders_in(root / o) for o in others)
    if names and are_splits:
        raise ambiguous_splits(sorted(like_splits) + sorted(set(names) - like_splits))
    return {}


def splits_of_files(names: Set[str]) -> dict[str, str]:
    """File -> split, if every name has one keyword of a split as a word; else nothing.

    Raises UserError if most but not all have one, and where none is of `train`.
    """
    found = dict[str, str]()
    for name in names:
        words = re.split(r"[^a-z]+", name.lower())
        splits = {SPLIT_OF_NAME[word] for word in words if word in SPLIT_OF_NAME}
        if len(splits) == 1:
            found[name] = splits.pop()
    if len(set(found.values())) < 2 or 2 * len(found) < len(names):
        return {}
    if len(found) < len(names) or "train" not in found.values():
        raise ambiguous_splits(sorted(names))
    return found


def ambiguous_splits(names: Sequence[str]) -> UserError:
    """The error for folders or files of which some, or all, are named like splits."""
    shown = [os.fsencode(name).decode("utf-8", "backslashreplace") for name in names]
    example = dict[str, str]()
    for name in shown:
        if OF_TRAIN.search(name):
            example.setdefault("train", name)
        elif OF_OTHERS.search(name):
            example.setdefault("test" if re.search("test|hold", name, re.I) else "val", name)
    places = ", ".join(f"{split}: {name!r}" for split, name in example.items())
    return UserError(
        f"these are named like splits, all or some: {', '.join(map(repr, shown[:NAMES_SHOWN]))}",
        where="source.path",
        next_step=f'if they are splits, say which are which: "source.splits={{{places}}}", which '
        "ignores all others; if they are not: 'source.splits={train: .}'",
    )
