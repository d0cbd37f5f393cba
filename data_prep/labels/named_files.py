"""What stands in the files that settings name: a path alone does not say which bytes come out.

Owns: hashes of the label files and of the listing of evaluation sets, and that listing.
Leaves out: reading them (`labels`, `evaluation_sets`), and comparing (`preparation`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from blake3 import blake3

from data_prep.labels.assignment import LABEL_SPACES, load_space
from data_prep.sources.outages import Interrupted, refuse_outage, source_error
from data_prep.sources.places import is_image_name
from vitscale.data.index import INDEX_NAME
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.runs.data_prep import LabelSettings

EVALUATION_FOLDERS = "folders with image files, or shards with index.parquet"


def label_hashes(settings: LabelSettings) -> dict[str, str]:
    """BLAKE3 of each file that `labels` names, as `KEY_blake3`. Raises UserError."""
    files = {"map": settings.map, "parents": settings.parents, "space": settings.space}
    if settings.space in LABEL_SPACES:
        del files["space"]
    elif settings.space is not None and not Path(settings.space).expanduser().is_file():
        load_space(settings.space)  # says which names there are
    return {
        f"{key}_blake3": _hash(Path(file).expanduser(), where=f"labels.{key}")
        for key, file in files.items()
        if file is not None
    }


def evaluation_listing(path: str) -> str:
    """Hash over the names and sizes of a folder's images, or over the index of a shard folder.

    Raises Interrupted for a folder that is not there, or holds nothing.
    """
    folder, where = Path(path).expanduser(), f"selection.evaluation_sets: {path}"
    if os.path.isfile(folder / INDEX_NAME):
        return _hash(folder / INDEX_NAME, where=where)
    digest = blake3()
    for file in image_files(folder):
        try:
            num_bytes = os.path.getsize(file)
        except OSError as error:
            refuse_outage(error, str(file))
            num_bytes = -1
        digest.update(os.fsencode(f"{os.path.relpath(file, folder)}\0{num_bytes}\0"))
    return digest.hexdigest()


def image_files(folder: Path) -> Iterator[Path]:
    """Files named as images below a folder, sorted within each; links are followed, each once.

    Hidden ones are passed over. Raises Interrupted when there are none, or a folder cannot be read.
    """

    def refuse(error: OSError) -> NoReturn:
        raise source_error(error, error.filename or str(folder)) from None

    where = f"selection.evaluation_sets: {folder}"
    if not os.path.isdir(folder):
        raise Interrupted("no such folder", where=where, allowed=EVALUATION_FOLDERS)
    seen, found = set(), False
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and is_image_name(name):
                found = True
                yield Path(parent, name)
    if not found:
        raise Interrupted("holds no images", where=where, allowed=EVALUATION_FOLDERS)


def _hash(file: Path, *, where: str) -> str:
    try:
        return blake3_of_file(file)
    except OSError as error:
        what = f"{str(file)!r} cannot be read ({error.strerror or error})"
        raise Interrupted(what, where=where) from None
