"""Stream training samples from local tars that nobody indexed, with the webdataset library.

A stream has no positions: after a stop it continues with freshly shuffled tars, so some samples of
the epoch are seen again and others later. data_prep/index_shards.py makes an index, which resumes
exactly and is needed by everything but training.

The library would open tars by shell commands (`pipe:`), rewrite names by environment variables and
stop at the first end mark; here `tar_members` lists them, and the library groups and shuffles.
Nothing is decoded but the image and its label.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, cast

from vitscale.config.errors import UserError, not_read
from vitscale.data.index import NO_LABEL
from vitscale.data.positions import read_range
from vitscale.data.tar_members import members
from vitscale.distributed.atomic_files import retried_read
from vitscale.distributed.random_numbers import permutation, stream_key

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIX = "cls"
WANTED = tuple(f".{suffix}" for suffix in (*IMAGE_SUFFIXES, LABEL_SUFFIX))
MAX_LABEL_BYTES = 60
# Samples in the shuffle buffer of each loader process, as stored: 0.1 MiB each for photographs.
SHUFFLE = 1000
READ_BYTES = 1 << 20
MAX_NAMES = 1_000_000
# Name of the tar, key, image as stored (empty: none), label.
TarSample = tuple[str, str, bytes, int]


def tar_samples(
    tars: Sequence[Path],
    *,
    num_classes: int,
    seed: int,
    start: int,
    process: int,
    num_processes: int,
) -> Iterator[TarSample]:
    """The infinite stream of samples of one loader process.

    num_classes: 0 without labels. start: position of training where the stream begins. process:
    number of this one among the loader processes of all ranks.
    Raises UserError for fewer tars than processes, a tar that is damaged or has no samples, and a
    label outside the classes.
    """
    from webdataset import shuffle

    check_shares(len(tars), num_ranks=num_processes, num_workers=1)

    def stored() -> Iterator[TarSample]:
        """Each epoch deals the tars to all processes anew."""
        for epoch in count():
            # The start is part of the key: after a resume the tars come in a fresh order.
            order = permutation(len(tars), key=stream_key("tars", seed, start, epoch))
            for number in order[process::num_processes].tolist():
                yield from _samples_of(tars[number], num_classes=num_classes)

    random = Random(stream_key("tar samples", seed, start, process))
    return shuffle(SHUFFLE, rng=random)(stored())


def check_shares(num_tars: int, *, num_ranks: int, num_workers: int) -> None:
    """Raise UserError for fewer tars than loader processes: one without a tar would wait for ever.

    num_workers: loader processes of a rank; 0: the rank reads itself.
    """
    num_processes = num_ranks * max(num_workers, 1)
    if num_tars >= num_processes:
        return
    next_step = f"use at most {num_tars:,} rank(s)"
    if num_ranks <= num_tars:
        next_step = f"set data.num_workers={num_tars // num_ranks}"
    processes = f"{num_processes:,} = {num_ranks:,} rank(s) x {max(num_workers, 1)}"
    raise UserError(
        f"there are fewer tars ({num_tars:,}) than loader processes ({processes}), and each of "
        "these needs one",
        where="data.reader=webdataset",
        allowed=f"at least {num_processes:,} tars",
        next_step=f"{next_step}, or make an index (vitscale prepare index), which all share",
    )


class _StoredTar(io.FileIO):
    """A tar whose reads are repeated where storage fails for a moment."""

    def readinto(self, buffer: Any) -> int:
        start = self.tell()
        data = read_range(Path(self.name), offset=start, num_bytes=len(buffer))
        buffer[: len(data)] = data
        self.seek(start + len(data))
        return len(data)


def _samples_of(tar: Path, *, num_classes: int) -> Iterator[TarSample]:
    from webdataset.tariterators import group_by_keys

    key = None
    try:
        stored_tar = retried_read(partial(_StoredTar, tar), name=tar)
        with io.BufferedReader(stored_tar, READ_BYTES) as file:
            for sample in group_by_keys(_wanted_members(cast(BinaryIO, file), tar)):
                key = sample["__key__"]
                label = NO_LABEL
                images = [sample[name] for name in IMAGE_SUFFIXES if name in sample]
                if num_classes:
                    stored = sample.get(LABEL_SUFFIX, b"")[:MAX_LABEL_BYTES]
                    text = stored.decode("latin1").strip()
                    if text.isdecimal():
                        label = int(text)
                    if not 0 <= label < num_classes:
                        raise ValueError(
                            f"sample {key!r} has label {text!r}, not 0 to {num_classes - 1} "
                            "(data.webdataset.num_classes)"
                        )
                yield str(tar), key, images[0] if images else b"", label
        if key is None:
            raise ValueError(f"it has no members {', '.join(WANTED)}")
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot be read ({getattr(error, 'strerror', None) or error.args[0]})",
            where=tar,
            next_step="check data.train_split and the storage; vitscale prepare index makes an "
            "index of what can be read",
        ) from None


def _wanted_members(file: BinaryIO, tar: Path) -> Iterator[dict[str, Any]]:
    """Yield images and labels as `group_by_keys` takes them. Raises TarDefect."""
    for member in members(file):
        if member.is_file and member.name.lower().endswith(WANTED):
            file.seek(member.offset)
            data = file.read(member.num_bytes)
            yield {"fname": member.name, "data": data, "__url__": str(tar)}


def tars_of_split(folder: Path, split: str, *, where: str) -> list[Path]:
    """Paths of the tars of a split, sorted by name. Raises UserError if there are none.

    split: `train` for `train-*.tar`, or names with `{0000..0146}`, `{a,b}`, `*` or `?`.
    """
    try:
        return retried_read(
            lambda: _listed_tars(folder, split, where=where), name=folder
        )
    except OSError as error:
        step = "correct data.path, or make the folder readable"
        raise not_read(error, folder, next_step=step) from None


def _listed_tars(folder: Path, split: str, *, where: str) -> list[Path]:
    """Raises OSError if storage fails."""
    if not folder.is_dir():
        what = f"no such folder: {folder}"
        step = "set it to the folder of the tars"
        raise UserError(what, where="data.path", next_step=step)
    pattern = split if ".tar" in split else f"{split}-*.tar"
    names = sorted(matching(pattern, os.listdir(folder), where=where))
    tars = [folder / name for name in names]

    missing = [tar for tar in tars if not tar.is_file()]
    what = f"no tars {split!r} in {folder}"
    if missing:
        what = (
            f"{len(missing):,} of {len(tars):,} tars are missing, such as {missing[0]}"
        )
    if missing or not tars:
        raise UserError(
            what,
            where=where,
            allowed="names such as train-{000000..000146}.tar or train-*.tar (in short: train)",
            next_step="correct the pattern, or get the files",
        )
    return tars


def matching(pattern: str, listed: Iterable[str], *, where: str) -> set[str]:
    """Names that a pattern with {0..9} and {a,b} gives; with * and ? those listed that match.

    Raises UserError for a malformed or too large pattern.
    """
    from braceexpand import braceexpand  # 14 ms, which most starts do not need

    # Counted before they are made: a range such as {0..999999999} would fill the memory.
    ranges = re.findall(r"\{(\d+)\.\.(\d+)\}", pattern)
    num_names = math.prod(abs(int(last) - int(first)) + 1 for first, last in ranges)
    try:
        names = set(braceexpand(pattern) if num_names <= MAX_NAMES else ())
    except ValueError:  # unbalanced
        names = set()
    if not names:
        what = f"{pattern!r} is not a pattern of at most {MAX_NAMES:,} names"
        raise UserError(what, where=where, allowed="{000000..000146} and {a,b}")
    wild = {name for name in names if "*" in name or "?" in name}
    # Names with wildcards stand for the listed ones; all others are meant as they are.
    found = {each for each in listed if any(fnmatchcase(each, name) for name in wild)}
    return names - wild | found
