"""Stream training samples from tars that nobody indexed, with the webdataset library.

Owns: which process reads which tar in which epoch, and opening tars.
Leaves out: names of tars (`names`), labels (`labels`), images as tensors (`vitscale.data.samples`).

The library's way of opening tars runs shell commands (`pipe:`, curl for http) and rewrites names by
environment variables; here tars are opened as files or by the bounded reader of `data.remote`.
Nothing is unpickled or decoded but the image and its label.

A stream has no positions: after a stop it goes on with freshly shuffled tars, so some samples of
the epoch are seen again and others later.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from vitscale.config.errors import UserError
from vitscale.data.remote.index import RemoteFileStream
from vitscale.data.remote.settings import RemoteSettings
from vitscale.data.remote.urls import Location, Url
from vitscale.data.tars.labels import IMAGE_SUFFIXES, LABEL_SUFFIX, TarLabels
from vitscale.data.tars.shard_files import DATA_LOSS_ERRNOS
from vitscale.distributed.random_numbers import permutation, stream_key

# First bytes of what Python decompresses: gzip, bzip2, xz, zstd.
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x5d\0\0\x80", b"\x28\xb5\x2f\xfd")
# Samples in the shuffle buffer of each loader process, as stored: about 0.1 MiB each for
# photographs.
SHUFFLE = 1000
# Tars in a row without a sample before the run ends.
MAX_EMPTY_TARS = 8


@dataclass(frozen=True, kw_only=True)
class StreamedTars:
    """The tars of a training set."""

    tars: tuple[Location, ...]
    labels: TarLabels
    num_samples: int
    """In all tars, as the settings say."""
    remote_settings: RemoteSettings
    shuffle: int = SHUFFLE


@dataclass(frozen=True, slots=True)
class TarSample:
    """One sample as stored, or a tar that ends early."""

    tar: str
    key: str
    image: bytes = b""
    label: int | None = None
    """None: the tars have no labels."""
    error: str | None = None
    """Why it cannot be used."""


class TarStream:
    """The infinite stream of samples of one loader process."""

    def __init__(
        self, streamed: StreamedTars, *, seed: int, start: int, process: int, num_processes: int
    ) -> None:
        """start: position of training where it begins; the order of the tars depends on it.

        process: number of this one among the loader processes of all ranks.
        """
        self.streamed, self.seed, self.start = streamed, seed, start
        self.process, self.num_processes = process, num_processes
        self._damaged: list[TarSample] = []

    def __iter__(self) -> Iterator[TarSample]:
        """Raises UserError if nothing can be read, or for a label outside the classes."""
        import webdataset as wds

        wanted = {*IMAGE_SUFFIXES, LABEL_SUFFIX}
        key = stream_key("tar samples", self.seed, self.start, self.process)
        pipeline = wds.DataPipeline(
            self._tars,
            self._members,
            lambda files: wds.tariterators.group_by_keys(files, suffixes=wanted),
            wds.shuffle(self.streamed.shuffle, rng=Random(key)),
            wds.map(self._sample),
        )
        for sample in pipeline:
            damaged, self._damaged = self._damaged, []
            yield from damaged
            yield sample

    def _sample(self, members: dict[str, Any]) -> TarSample:
        labels, key, tar = self.streamed.labels, members["__key__"], members["__url__"]
        images = [members[suffix] for suffix in IMAGE_SUFFIXES if suffix in members]
        if not images:
            return TarSample(tar, key, error="no image")
        try:
            label = labels.label(members.get(LABEL_SUFFIX), key=key, tar=tar)
        except UserError:
            raise
        except ValueError as error:
            return TarSample(tar, key, error=str(error))
        return TarSample(tar, key, images[0], label)

    def _tars(self) -> Iterator[Location]:
        """Every tar once per epoch over all processes; each epoch deals them anew."""
        tars, epoch = self.streamed.tars, 0
        own = slice(self.process, None, self.num_processes)
        while True:
            key = stream_key("tars", self.seed, self.start, epoch)
            for number in permutation(len(tars), key=key)[own].tolist():
                yield tars[number]
            epoch += 1

    def _members(self, tars: Iterator[Location]) -> Iterator[dict[str, Any]]:
        """Members of tars, as `group_by_keys` takes them; a damaged tar ends early."""
        import webdataset as wds

        wanted = {*IMAGE_SUFFIXES, LABEL_SUFFIX}

        def is_wanted(name: str) -> bool:
            _, suffix = wds.tariterators.base_plus_ext(name)
            return suffix is not None and suffix.lower() in wanted

        num_empty = 0
        for tar in tars:
            num_members = 0
            try:
                with self._opened(tar) as file:
                    watched = _WatchedTar(file)
                    source = {"url": str(tar), "stream": watched}
                    for member in wds.tariterators.tar_file_expander(
                        iter([source]), select_files=is_wanted
                    ):
                        num_members += bool(member)
                        yield member
                    if not watched.has_ended:
                        raise tarfile.ReadError("no end mark after its last member")
            except UserError:
                raise
            except (OSError, ValueError, tarfile.TarError) as error:
                self._damaged.append(_damaged_tar(tar, error))
                yield {}  # the end of its last sample
            num_empty = 0 if num_members else num_empty + 1
            if num_empty == MAX_EMPTY_TARS:
                raise UserError(
                    f"{num_empty} tars in a row have no image and no label, this the last",
                    where=str(tar),
                    allowed=f"members KEY.{{{','.join(sorted(wanted))}}}",
                    next_step="check data.train_split",
                )

    def _opened(self, tar: Location) -> Any:
        if isinstance(tar, Url):
            return RemoteFileStream(tar, remote_settings=self.streamed.remote_settings)
        return open(tar, "rb")


class _WatchedTar:
    """A tar being read. Python takes a cut, and a damaged header, for its end."""

    def __init__(self, file: Any) -> None:
        self.file, self.first, self.last = file, b"", b""

    def read(self, num_bytes: int) -> bytes:
        data: bytes = self.file.read(num_bytes)
        self.first = self.first or data[:6]
        self.last = data[-tarfile.BLOCKSIZE :] or self.last
        return data

    @property
    def has_ended(self) -> bool:
        """Whether the last part read ends with zeros; those of a compressed tar are not seen."""
        return self.first.startswith(COMPRESSED) or not any(self.last)


def _damaged_tar(tar: Location, error: Exception) -> TarSample:
    """Raises UserError if the tar cannot be accessed, which is not its damage."""
    # The library appends the file to the arguments.
    text = getattr(error, "strerror", None) or str(error.args[0] if error.args else error)
    if isinstance(error, OSError) and error.errno not in (None, *DATA_LOSS_ERRNOS):
        raise UserError(
            f"cannot be read ({error.strerror})",
            where=str(tar),
            next_step="check the storage, then run the same command again",
        ) from None
    return TarSample(str(tar), "after the last", error=f"the tar ends early: {text}")
