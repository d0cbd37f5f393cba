"""Check that a contender wrote what it was given, outside the timed part.

Owns: reading every output and comparing hashes of content. Raises WrongOutput.
Leaves out: `data_prep/verify_shards.py` on purpose: a benchmark does not trust what it measures.
"""

from __future__ import annotations

import json
import mmap
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import pyarrow.parquet as pq
from blake3 import blake3
from PIL import Image

from benchmarks.corpora.photo_folder import PhotoFolder


class WrongOutput(Exception):
    """An output is not what it should be; the text says where."""


def check_one_file(source: PhotoFolder, output: Path) -> None:
    if file_digest(output / "all") != source.whole:
        raise WrongOutput(f"{output / 'all'} is not the concatenation of the files")


def check_copied_folder(source: PhotoFolder, output: Path) -> None:
    found = {
        str(path.relative_to(output)): file_digest(path)
        for path in output.rglob("*")
        if path.is_file()
    }
    if found != source.digests:
        raise WrongOutput(f"{output} is not a copy of {source.root}")


def check_plain_tars(source: PhotoFolder, output: Path) -> None:
    """Tars without an index: the images by their keys."""
    expected = {Path(path).stem: digest for path, digest in source.digests.items()}
    found = {}
    for path in sorted(output.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                if member.name.endswith(".jpg"):
                    content = tar.extractfile(member)
                    assert content is not None
                    found[member.name.removesuffix(".jpg")] = blake3(content.read()).digest()
    if found != expected:
        raise WrongOutput(f"{output} does not contain the images of {source.root}")


def check_shards(output: Path, *, digests: Mapping[str, bytes]) -> None:
    """Every image of the source, given as path -> hash, is where the index says, once, under
    its class; the hashes in index, manifest and tars agree; stored order is not source order."""
    manifest = json.loads((output / "manifest.json").read_text())
    index = pq.read_table(output / "index.parquet")
    path_of, repaired = _stored_inputs(output, digests)
    columns = ["key", "shard", "offset", "length", "label", "blake3"]
    rows = zip(*(index.column(name).to_pylist() for name in columns), strict=True)
    order = []
    tars: dict[str, mmap.mmap] = {}
    for key, shard, offset, length, label, stored in rows:
        if shard not in tars:
            with open(output / shard, "rb") as file:
                tars[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        path = path_of.pop(key, None)
        if path is None or path not in digests:
            raise WrongOutput(f"{output}: {key} is of no image of the source, or stored twice")
        digest = blake3(tars[shard][offset : offset + length]).digest()
        whole = path in repaired or digest == digests[path]
        if not whole or digest != stored:
            raise WrongOutput(f"{output / shard}: {key} does not contain the bytes of {path}")
        if path in repaired:
            _check_decodes(tars[shard][offset : offset + length], f"{output / shard}: {key}")
        if manifest["classes"][label] != path.split("/")[0].removesuffix(".tar"):
            raise WrongOutput(f"{output / shard}: {key} has label {label}, but is {path}")
        order.append(path)
    if path_of or len(order) != len(digests):
        raise WrongOutput(f"{output}: {len(order)} of {len(digests)} images are stored")
    neighbours = sum(a < b for a, b in zip(order, order[1:], strict=False))
    if len(order) > 100 and not 0.3 < neighbours / len(order) < 0.7:
        raise WrongOutput(f"{output} is not shuffled")
    for split in manifest["splits"].values():
        for entry in split["shards"]:
            if file_digest(output / entry["name"]).hex() != entry["blake3"]:
                raise WrongOutput(
                    f"{output / entry['name']} does not have the hash of the manifest"
                )


def _stored_inputs(output: Path, digests: Mapping[str, bytes]) -> tuple[dict[str, str], set[str]]:
    """(key -> path of every stored input, paths of those stored with other bytes).

    A repaired input must have been read as it is: the ledger has the hash of the file.
    """
    columns = ["path", "key", "status", "blake3"]
    ledger = pq.read_table(output / "ledger.parquet", columns=columns)
    path_of, repaired = {}, set()
    for path, key, status, read in zip(*(c.to_pylist() for c in ledger.columns), strict=True):
        if status == "rejected":
            continue
        path_of[key] = path
        if status == "repaired":
            repaired.add(path)
            if read != digests.get(path):
                raise WrongOutput(f"{output}: {path} was repaired from other bytes than its own")
    return path_of, repaired


def _check_decodes(content: bytes, where: str) -> None:
    try:
        with Image.open(BytesIO(content), formats=("JPEG", "PNG", "WEBP")) as image:
            image.load()
    except Exception as error:  # damaged images make decoders raise anything
        raise WrongOutput(f"{where} was repaired and cannot be decoded ({error})") from None


def tar_folder_digests(folder: Path) -> dict[str, bytes]:
    """TAR/MEMBER -> hash of content, for a folder of tars."""
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                content = tar.extractfile(member)
                assert content is not None
                found[f"{path.name}/{member.name}"] = blake3(content.read()).digest()
    return found


def folder_digests(folder: Path) -> dict[str, str]:
    """Path -> hash for every file below `folder`."""
    return {
        str(path.relative_to(folder)): file_digest(path).hex()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def file_digest(path: Path) -> bytes:
    return blake3().update_mmap(path).digest()


def corrupt(output: Path) -> None:
    """Flip one bit in the middle of the largest file, to test the checks."""
    path = max((p for p in output.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
