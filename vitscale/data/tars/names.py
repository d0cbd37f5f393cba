"""Find the tars of a split that nobody indexed: by name, by pattern, or in a folder.

Leaves out: what is in them (`stream`, `scan`).
"""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from vitscale.config.errors import UserError
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.store import RemoteStore
from vitscale.data.remote.urls import Location, Url

MAX_TARS = 1_000_000
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


def tars_of_split(
    folder: Location, split: str, *, where: str, remote_settings: RemoteSettings
) -> list[Location]:
    """The tars of a split, sorted by name.

    split: `train` for `train-*.tar`, or names with `{0000..0146}`, `{a,b}`, `*` or `?`.
    Raises UserError if there are none, or if the server cannot list a folder.
    """
    names = expanded(split if ".tar" in split else f"{split}-*.tar", where=where)
    if any("*" in name or "?" in name for name in names):
        found = _listing(folder, where=where, remote_settings=remote_settings)
        names = [each for each in found if any(fnmatchcase(each, name) for name in names)]
    if not names:
        raise UserError(
            f"no tars {split!r} in {folder}",
            where=where,
            allowed="names such as train-{000000..000146}.tar, train-*.tar, or train for the "
            "latter",
            next_step="correct it, or data.path",
        )
    tars = [folder / name for name in sorted(set(names))]
    missing = [tar for tar in tars if isinstance(tar, Path) and not tar.is_file()]
    if missing:
        what = f"{len(missing):,} of {len(tars):,} tars are missing, such as {missing[0]}"
        raise UserError(what, where=where, next_step="correct the pattern, or get the files")
    return tars


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


def _listing(folder: Location, *, where: str, remote_settings: RemoteSettings) -> list[str]:
    if isinstance(folder, Url):
        return remote_tars(folder, where=where, remote_settings=remote_settings)
    if not folder.is_dir():
        raise UserError(
            f"no such folder: {folder}",
            where="data.path",
            next_step="set it to the folder or URL of the tars",
        )
    return [path.name for path in folder.iterdir()]


def remote_tars(folder: Url, *, where: str, remote_settings: RemoteSettings) -> list[str]:
    """Names of the tars directly below a URL, sorted. Raises UserError where nothing lists them."""
    if folder.scheme in ("http", "https"):
        raise UserError(
            f"a web server cannot list {folder}",
            where=where,
            allowed="s3 and gs for patterns with * and ?",
            next_step="give the names, such as train-{000000..000146}.tar",
        )
    names = RemoteStore(patience_s=remote_settings.patience_s).names(folder)
    return sorted(name for name in names if name.endswith(".tar"))
