"""Index one external tar, local or at a URL, in one pass from its start to its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from blake3 import blake3

from data_prep.formats.members import Member
from data_prep.images.check import MAX_FILE_BYTES, CheckedImage, check_image
from data_prep.sources.errors import ChangedSource, Outage, printable, source_read_error
from data_prep.sources.protocol import Container, with_damage
from data_prep.sources.webdataset import WebDataset
from data_prep.steps.labels import load_labels
from data_prep.steps.list_inputs import CONTAINERS, read_containers, set_class
from data_prep.steps.work import WorkFolder
from data_prep.steps.write_shard import commit_outcomes, outcome
from vitscale.config.errors import StorageError
from vitscale.data.storage import Location, Url, location_of, names_below, read_range, size_of
from vitscale.data.webdataset import matching
from vitscale.distributed.atomic_files import write_json

# Reason for sound images that must be converted to be usable, which would mean rewriting the tar.
PACKED = "packed"
CHUNK_BYTES = 8 << 20
# How far readers go back: a header that Python takes for the end is read again.
KEPT_BYTES = 1 << 12


class RemoteFile:
    """A file at a URL, read from its start to its end; raises StorageError."""

    def __init__(self, url: Url) -> None:
        self.url, self.at = url, 0
        num_bytes = size_of(url)
        if num_bytes is None:
            raise FileNotFoundError
        self.num_bytes = num_bytes

    def read(self, num_bytes: int) -> bytes:
        num_bytes = min(num_bytes, self.num_bytes - self.at)
        data = read_range(self.url, offset=self.at, num_bytes=num_bytes)
        self.at += len(data)
        return data


class HashedFile:
    """A file read once, from its start to its end, and hashed; may go back a few bytes."""

    def __init__(self, stream: Any, num_bytes: int) -> None:
        self.stream, self.num_bytes = stream, num_bytes
        self.digest = blake3()
        self.window, self.start, self.at = b"", 0, 0

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            return self.num_bytes + offset  # where nobody reads
        assert offset >= self.start, (offset, self.start)
        self.at = offset
        return offset

    def read(self, num_bytes: int) -> bytes:
        """Bytes from the current position; fewer only at the end of the file."""
        parts = []
        while num_bytes > 0:
            place = self.at - self.start
            part = self.window[place : place + num_bytes]
            if not part and not self._fill():
                break
            parts.append(part)
            self.at += len(part)
            num_bytes -= len(part)
        return b"".join(parts)

    def _fill(self) -> bool:
        chunk = self.stream.read(CHUNK_BYTES)
        self.digest.update(chunk)
        self.start += max(0, len(self.window) - KEPT_BYTES)
        self.window = self.window[-KEPT_BYTES:] + chunk
        return bool(chunk)

    def hexdigest(self) -> str:
        """Hash of the whole file, whose rest is read."""
        while self._fill():
            pass
        return str(self.digest.hexdigest())


def containers_units(work: WorkFolder) -> list[str]:
    return [CONTAINERS]


def list_tars(work: WorkFolder, unit: str) -> None:
    source, root = work.run.source, root_of(work)
    if isinstance(root, Url):
        listed = None
        if root.scheme not in ("http", "https"):
            listed = [name for name in names_below(root) if name.endswith(".tar")]
        found = [
            (name, split)
            for split, pattern in (source.splits or {"train": "*.tar"}).items()
            for name in matching(pattern, listed, where=f"source.splits.{split}")
        ]
    else:
        containers = WebDataset(source, work.run.labels).containers()
        found = [(container.path, container.split) for container in containers]
    write_json(work.path / unit, found)


def root_of(work: WorkFolder) -> Location:
    """The folder or URL that paths of tars are relative to."""
    place = location_of(work.run.source.path, where="source.path")
    return place if isinstance(place, Url) else WebDataset(work.run.source).root


def tar_units(work: WorkFolder) -> list[str]:
    return [f"tars/{number:06d}.arrow" for number in range(len(read_containers(work)))]


def index_tar(work: WorkFolder, unit: str) -> None:
    """Check every image of one tar without rewriting it."""
    container = read_containers(work)[int(Path(unit).stem)]
    tar = root_of(work) / container.path
    try:
        if isinstance(tar, Url):
            stream = RemoteFile(tar)
            num_bytes, modified_ns = stream.num_bytes, 0
            rows, digest = _outcomes(work, container, HashedFile(stream, num_bytes))
        else:
            with open(tar, "rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                num_bytes, modified_ns = status.st_size, status.st_mtime_ns
                rows, digest = _outcomes(work, container, HashedFile(file, num_bytes))
    except StorageError as error:
        raise Outage(error.what, where=error.where, next_step=error.next_step) from None
    except FileNotFoundError:
        raise ChangedSource(container.path) from None
    except OSError as error:
        raise source_read_error(error, container.path) from None
    facts = {"bytes": num_bytes, "modified_ns": modified_ns, "blake3": digest}
    commit_outcomes(work, unit, rows, **facts)


def _outcomes(
    work: WorkFolder, container: Container, file: Any
) -> tuple[list[tuple[Any, ...]], str]:
    """Read a tar to its end; return the outcomes of its samples, and its hash."""
    images, labels, rows = work.run.images, load_labels(work.run.labels), []

    def check(member: Member) -> CheckedImage:
        if member.num_bytes > MAX_FILE_BYTES:
            return CheckedImage("too_large", b"")
        file.seek(member.offset)
        data = file.read(member.num_bytes)
        if len(data) < member.num_bytes:
            raise ChangedSource(container.path)
        image = check_image(data, settings=images, convert=False)
        if image.reason is None and image.content_hash != image.input_hash:
            image.reason = PACKED
        image.content = b""  # all samples of the tar are kept
        return image

    source = WebDataset(work.run.source, work.run.labels)
    for item in with_damage(container, source.rows(file, container, check=check)):
        set_class(item, labels)
        image = item.checked or CheckedImage(item.reason, b"")
        image.reason, image.num_bytes = item.reason or image.reason, item.num_bytes
        place = printable(item.path), item.split, item.class_name
        rows.append(outcome(place, image, key=printable(item.name), offset=item.offset))
    return rows, file.hexdigest()
