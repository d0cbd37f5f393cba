"""Stream training samples from local tars that nobody indexed, with the webdataset library.

A stream has no positions: after a stop it continues with freshly shuffled tars, so some samples of
the epoch are seen again and others later. data_prep/index_shards.py makes an index, which resumes
exactly and is needed by everything but training.

The library would open tars by shell commands (`pipe:`) and rewrite names by environment variables;
here they are opened as files. Nothing is unpickled or decoded but the image and its label.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import count, product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from vitscale.config.errors import UserError
from vitscale.data.index import NO_LABEL
from vitscale.data.settings import DataSettings
from vitscale.data.shards import DATA_LOSS_ERRNOS
from vitscale.distributed.random_numbers import permutation, stream_key

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIX = "cls"
MAX_LABEL_BYTES = 100
# Samples in the shuffle buffer of each loader process, as stored: about 0.1 MiB each for
# photographs.
SHUFFLE = 1000
# Tars in a row without a sample before the run ends.
MAX_EMPTY_TARS = 8
MAX_TARS = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


class StreamedTars(NamedTuple):
    """The tars of a training set."""

    tars: tuple[Path, ...]
    num_samples: int
    """In all tars, as the settings say."""
    classes: tuple[str, ...]
    """Labels are numbers below their count; empty: no labels."""
    shuffle: int = SHUFFLE

    @property
    def fingerprint(self) -> str:
        facts = ["webdataset", [tar.name for tar in self.tars], self.num_samples, self.classes]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class TarSample(NamedTuple):
    """One sample as stored, or a tar that ends early."""

    tar: str
    key: str
    image: bytes = b""
    label: int = NO_LABEL
    error: str | None = None
    """Why it cannot be used."""


def open_tars(settings: DataSettings) -> StreamedTars:
    """Raises UserError where tars are missing."""
    tars = tars_of_split(Path(settings.path), settings.train_split, where="data.train_split")
    assert settings.webdataset.num_samples is not None  # the settings are validated
    return StreamedTars(tuple(tars), settings.webdataset.num_samples, tar_classes(settings))


def tar_classes(settings: DataSettings) -> tuple[str, ...]:
    return tuple(map(str, range(settings.webdataset.num_classes or 0)))


def tar_samples(
    streamed: StreamedTars, *, seed: int, start: int, process: int, num_processes: int
) -> Iterator[TarSample]:
    """The infinite stream of samples of one loader process.

    start: position of training where it begins; the order of the tars depends on it. process:
    number of this one among the loader processes of all ranks.
    Raises UserError if nothing can be read, or for a label outside the classes.
    """
    import webdataset as wds

    damaged: list[TarSample] = []
    tar, num_empty = "", 0

    def files() -> Iterator[dict[str, Any]]:
        """Open every tar once per epoch over all processes; each epoch deals them anew."""
        nonlocal tar, num_empty
        for epoch in count():
            key = stream_key("tars", seed, start, epoch)
            order = permutation(len(streamed.tars), key=key)[process::num_processes]
            for number in order.tolist():
                tar = str(streamed.tars[number])
                if num_empty == MAX_EMPTY_TARS:
                    raise UserError(
                        f"{MAX_EMPTY_TARS} tars in a row have no image and no label, the next is "
                        "this",
                        where=tar,
                        allowed=f"members KEY.{{{','.join((*IMAGE_SUFFIXES, LABEL_SUFFIX))}}}",
                        next_step="check data.train_split",
                    )
                num_empty += 1
                try:
                    file = open(tar, "rb")
                except OSError as error:
                    raise _unreachable(tar, error) from None
                with file:
                    yield {"url": tar, "stream": file}

    def note_damage(error: Exception) -> bool:
        """Remember that the open tar is damaged; reading goes on. Raises UserError for outages."""
        if isinstance(error, OSError) and error.errno not in (None, *DATA_LOSS_ERRNOS):
            raise _unreachable(tar, error) from None
        if not isinstance(error, OSError | ValueError | tarfile.TarError):
            raise error
        text = getattr(error, "strerror", None) or str(error.args[0] if error.args else error)
        if all(each.tar != tar for each in damaged):
            damaged.append(TarSample(tar, "after the last", error=f"damaged: {text}"))
        return True

    def sample(members: dict[str, Any]) -> TarSample:
        nonlocal num_empty
        num_empty = 0
        return _sample(members, num_classes=len(streamed.classes))

    pipeline = wds.DataPipeline(
        files,
        lambda tars: wds.tariterators.tar_file_expander(
            tars, handler=note_damage, select_files=_is_wanted
        ),
        lambda tars: wds.tariterators.group_by_keys(tars, handler=note_damage),
        wds.map(sample),
        wds.shuffle(streamed.shuffle, rng=Random(stream_key("tar samples", seed, start, process))),
    )
    for each in pipeline:
        yield from damaged
        damaged.clear()
        yield each


def _sample(members: dict[str, Any], *, num_classes: int) -> TarSample:
    """Raises UserError for a label outside the classes."""
    key, tar = members["__key__"], members["__url__"]
    images = [members[suffix] for suffix in IMAGE_SUFFIXES if suffix in members]
    label = members.get(LABEL_SUFFIX)
    if not images:
        return TarSample(tar, key, error="no image")
    if not num_classes:
        return TarSample(tar, key, images[0])
    if label is None:
        return TarSample(tar, key, error=f"no member .{LABEL_SUFFIX}")
    value = label[:MAX_LABEL_BYTES].decode("utf-8", errors="replace").strip()
    if not (value.isdecimal() and int(value) < num_classes):
        raise UserError(
            f"sample {key!r} has label {value[:60]!r}",
            where=tar,
            allowed=f"0 to {num_classes - 1}",
            next_step="correct data.webdataset.num_classes, or make an index with "
            "data_prep/index_shards.py",
        )
    return TarSample(tar, key, images[0], int(value))


def _is_wanted(name: str) -> bool:
    return name.rpartition(".")[2].lower() in (*IMAGE_SUFFIXES, LABEL_SUFFIX)


def _unreachable(tar: str, error: OSError) -> UserError:
    return UserError(
        f"cannot be read ({error.strerror})",
        where=tar,
        next_step="check the storage, then run the same command again",
    )


def tars_of_split(folder: Path, split: str, *, where: str) -> list[Path]:
    """Paths of the tars of a split, sorted by name. Raises UserError if there are none.

    split: `train` for `train-*.tar`, or names with `{0000..0146}`, `{a,b}`, `*` or `?`.
    """
    if not folder.is_dir():
        raise UserError(
            f"no such folder: {folder}",
            where="data.path",
            next_step="set it to the folder of the tars",
        )
    names = matching(split, (path.name for path in folder.iterdir()), where=where)
    tars = [folder / name for name in names]
    missing = [tar for tar in tars if not tar.is_file()]
    if missing:
        what = f"{len(missing):,} of {len(tars):,} tars are missing, such as {missing[0]}"
        raise UserError(what, where=where, next_step="correct the pattern, or get the files")
    return tars


def matching(split: str, listed: Iterable[str] | None, *, where: str) -> list[str]:
    """Names of the tars of a split, sorted. Raises UserError for none, or a malformed pattern.

    listed: names that `*` and `?` choose among; None: nothing can list them.
    """
    names: Sequence[str] = expanded(split if ".tar" in split else f"{split}-*.tar", where=where)
    if any("*" in name or "?" in name for name in names):
        if listed is None:
            raise UserError(
                "a web server cannot list its files",
                where=where,
                allowed="patterns with * and ? on s3 and gs",
                next_step="give the names, such as train-{000000..000146}.tar",
            )
        names = [each for each in listed if any(fnmatchcase(each, name) for name in names)]
    if not names:
        raise UserError(
            f"no tars {split!r}",
            where=where,
            allowed="names such as train-{000000..000146}.tar, train-*.tar, or train for the "
            "latter",
            next_step="correct it, or the folder",
        )
    return sorted(set(names))


def expanded(text: str, *, where: str) -> list[str]:
    """All names of a pattern with braces. Raises UserError for a malformed or too large one."""
    pieces = _BRACES.split(text)
    choices = [[piece] if i % 2 == 0 else _choices(piece) for i, piece in enumerate(pieces)]
    num = math.prod(len(each) for each in choices)
    if num > MAX_TARS or any("{" in piece or "}" in piece for piece in pieces[::2]):
        raise UserError(
            f"{text!r} is not a pattern of at most {MAX_TARS:,} names",
            where=where,
            allowed="{000000..000146} and {a,b}, not nested",
        )
    return ["".join(each) for each in product(*choices)]


def _choices(piece: str) -> list[str]:
    """What one pair of braces stands for, at most one name too many. `{00..03}` keeps its zeros."""
    bounds = _RANGE.fullmatch(piece)
    if bounds is None:
        return piece.split(",")
    first, last = bounds.groups()
    numbers = range(int(first), int(last) + 1)[: MAX_TARS + 1]
    return [str(number).zfill(len(first)) for number in numbers]
