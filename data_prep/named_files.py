"""What stands in the files that settings name: a path alone does not say which bytes come out.

Owns: hashes of the label files, and of the listing of evaluation sets.
Leaves out: reading them (`labels`, `evaluation_sets`), and comparing (`preparation`).
"""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from data_prep.labels import LABEL_SPACES, load_space
from data_prep.outages import Interrupted
from data_prep.sources.places import is_image_name
from vitscale.atomic_files import blake3_of_file
from vitscale.data.index import INDEX_NAME
from vitscale.runs.data_prep import LabelSettings


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

    Raises Interrupted for a folder that is not there.
    """
    folder, where = Path(path).expanduser(), f"selection.evaluation_sets: {path}"
    if not folder.is_dir():
        raise Interrupted("no such folder", where=where)
    if (folder / INDEX_NAME).is_file():
        return _hash(folder / INDEX_NAME, where=where)
    digest, seen = blake3(), set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = os.path.join(parent, name)
            if is_image_name(name) and os.path.isfile(file):
                place = os.path.relpath(file, folder)
                digest.update(os.fsencode(f"{place}\0{os.path.getsize(file)}\0"))
    return digest.hexdigest()


def _hash(file: Path, *, where: str) -> str:
    try:
        return blake3_of_file(file)
    except OSError as error:
        what = f"{str(file)!r} cannot be read ({error.strerror or error})"
        raise Interrupted(what, where=where) from None
