"""Stream training samples from local tars that nobody indexed, with the webdataset library.

A stream has no positions: after a stop it continues with freshly shuffled tars, so some samples of
the epoch are seen again and others later. data_prep/index_shards.py makes an index, which resumes
exactly and is needed by everything but training.

The library would open tars by shell commands (`pipe:`) and rewrite names by environment variables;
here they are opened as files. Nothing is unpickled or decoded but the image and its label.
"""

from __future__ import annotations

import math
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from braceexpand import braceexpand

from vitscale.config.errors import UserError
from vitscale.data.index import NO_LABEL
from vitscale.distributed.random_numbers import permutation, stream_key

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIX = "cls"
WANTED = (*(f".{suffix}" for suffix in IMAGE_SUFFIXES), f".{LABEL_SUFFIX}")
MAX_LABEL_BYTES = 100
# Samples in the shuffle buffer of each loader process, as stored: about 0.1 MiB each for
# photographs.
SHUFFLE = 1000
MAX_TARS = 1_000_000


class TarSample(NamedTuple):
    """One sample as stored."""

    tar: str
    key: str
    image: bytes
    label: int


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

    num_classes: 0 without labels. start: position of training where the stream begins; the order
    depends on it. process: number of this one among the loader processes of all ranks.
    Raises UserError for a tar that is damaged or has no samples, or a label outside the classes.
    """
    import webdataset as wds

    def stored() -> Iterator[TarSample]:
        """Each epoch deals the tars to all processes anew."""
        for epoch in count():
            order = permutation(len(tars), key=stream_key("tars", seed, start, epoch))
            for number in order[process::num_processes].tolist():
                yield from _samples_of(tars[number], num_classes=num_classes)

    random = Random(stream_key("tar samples", seed, start, process))
    return wds.shuffle(SHUFFLE, rng=random)(stored())


def _samples_of(tar: Path, *, num_classes: int) -> Iterator[TarSample]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    sample = None
    try:
        with open(tar, "rb") as file:
            source = [{"url": str(tar), "stream": file}]
            members = tar_file_expander(
                source, select_files=lambda name: name.lower().endswith(WANTED)
            )
            for sample in group_by_keys(members):
                found = [sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample]
                label = _label(sample, num_classes=num_classes) if num_classes else NO_LABEL
                yield TarSample(str(tar), sample["__key__"], found[0] if found else b"", label)
        if sample is None:
            raise ValueError(f"no members {', '.join(WANTED)}")
    except UserError:
        raise
    except (OSError, ValueError, tarfile.TarError) as error:
        raise UserError(
            f"cannot be read ({getattr(error, 'strerror', None) or error.args[0]})",
            where=str(tar),
            next_step="check data.train_split and the storage; vitscale prepare index makes an "
            "index of what can be read",
        ) from None


def _label(sample: dict[str, Any], *, num_classes: int) -> int:
    """Raises UserError for a label outside the classes."""
    value = sample.get(LABEL_SUFFIX, b"")[:MAX_LABEL_BYTES].decode(errors="replace").strip()
    if value.isdecimal() and int(value) < num_classes:
        return int(value)
    raise UserError(
        f"sample {sample['__key__']!r} has label {value[:60]!r}",
        where=sample["__url__"],
        allowed=f"0 to {num_classes - 1} in a member .{LABEL_SUFFIX}",
        next_step="correct data.webdataset.num_classes, or make an index with "
        "vitscale prepare index",
    )


def tars_of_split(folder: Path, split: str, *, where: str) -> list[Path]:
    """Paths of the tars of a split, sorted by name. Raises UserError if there are none.

    split: `train` for `train-*.tar`, or names with `{0000..0146}`, `{a,b}`, `*` or `?`.
    """
    if not folder.is_dir():
        next_step = "set it to the folder of the tars"
        raise UserError(f"no such folder: {folder}", where="data.path", next_step=next_step)
    names = matching(split, (path.name for path in folder.iterdir()), where=where)
    tars = [folder / name for name in names]
    missing = [tar for tar in tars if not tar.is_file()]
    if missing:
        what = f"{len(missing):,} of {len(tars):,} tars are missing, such as {missing[0]}"
        raise UserError(what, where=where, next_step="correct the pattern, or get the files")
    return tars


def matching(split: str, listed: Iterable[str], *, where: str) -> list[str]:
    """Names of the tars of a split, sorted. Raises UserError for none, or a malformed pattern.

    listed: names that `*` and `?` choose among.
    """
    names = expanded(split if ".tar" in split else f"{split}-*.tar", where=where)
    if any("*" in name or "?" in name for name in names):
        names = [each for each in listed if any(fnmatchcase(each, name) for name in names)]
    if not names:
        raise UserError(
            f"no tars {split!r}",
            where=where,
            allowed="names such as train-{000000..000146}.tar or train-*.tar (in short: train)",
            next_step="correct it, or the folder; a web server cannot list its files: name them",
        )
    return sorted(set(names))


def expanded(text: str, *, where: str) -> list[str]:
    """All names of a pattern with braces. Raises UserError for a malformed or too large one."""
    ranges = re.findall(r"\{(\d+)\.\.(\d+)\}", text)
    try:
        if math.prod(abs(int(last) - int(first)) + 1 for first, last in ranges) <= MAX_TARS:
            return list(braceexpand(text))
    except ValueError:  # unbalanced
        pass
    what = f"{text!r} is not a pattern of at most {MAX_TARS:,} names"
    raise UserError(what, where=where, allowed="{000000..000146} and {a,b}")
