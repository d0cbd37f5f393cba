"""Read shard folders: manifest, samples of a split, and their keys. See docs/data_format.md.

Pyarrow is imported only to open a split, so that `read_manifest` stays light. What is read for each
sample: `data.positions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from vitscale.config.errors import UserError
from vitscale.config.redaction import redact
from vitscale.config.text_files import read_text
from vitscale.data.positions import (
    BLOCK_BYTES,
    POSITION,
    Place,
    Tars,
    forget_opened,
    open_tars,
    positions_name,
    read_checked,
    tars_name,
)
from vitscale.data.positions import (
    read_shard as read_shard,
)
from vitscale.data.remote import (
    Location,
    RemoteFile,
    Url,
    is_url,
    location_of,
    open_cache,
    read_chunks,
)
from vitscale.data.settings import RemoteSettings
from vitscale.distributed.atomic_files import retried_read
from vitscale.images.jpeg.entry_points import (
    FOLDER_NAME,
    entry_points_file,
    read_entry_points,
)

if TYPE_CHECKING:
    import pyarrow as pa

MAX_SHOWN = 10
FORMAT_VERSION: Literal[3] = 3
INDEX_NAME = "index.parquet"
MANIFEST_NAME = "manifest.json"
NO_LABEL = -1
# Row groups whose keys are searched at once: a million keys.
GROUPS_AT_ONCE = 128
# Up to so many, all tars and all records are looked at when a split is opened, in less than .2 s;
# of more, each when it is first read.
TARS_AT_START = 4096
SAMPLES_AT_START = 1 << 21
# Tars whose records a process keeps: those of the current block of the order, and two more.
RECENT_TARS = 48
# Samples that are looked at together where all are.
PIECE_SAMPLES = 1 << 18


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One tar file."""

    name: str
    samples: int
    bytes: int
    blake3: str


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and hash of a file beside the manifest."""

    bytes: int
    blake3: str


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """One split: its size, a hash of its samples in order, and the files of their places."""

    num_samples: int
    num_bytes: int
    num_tars: int
    fingerprint: str
    layout: str
    """`layout_hash` of the table of tars."""
    tars: StoredFile
    positions: StoredFile


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json."""

    format_version: Literal[3]
    tool_version: str
    fingerprint: str
    """Hash over the fingerprints of all splits and the label map."""
    source_fingerprint: str
    """Hash over every input's path, content and assignment."""
    label_map_sha256: str
    classes: tuple[str, ...]
    """Class names; the position is the label. Empty: the samples have no labels."""
    index_bytes: int
    index_blake3: str
    splits: dict[str, SplitEntry]
    inputs: dict[str, Any]
    """Totals of the ledger: rows, kept, repaired, rejected by reason with examples."""
    config: dict[str, Any]
    """The resolved configuration of the preparation."""
    shards_root: str = "."
    """Folder of the tars: this one, or that of external tars indexed in place. An absolute path, a
    path relative to this folder, or a URL."""
    source_path: str = ""
    """What it was made from, as `SourceSettings.place`; empty: made by an earlier version."""
    notes: tuple[str, ...] = ()
    """Sentences about what people may not expect of the corpus."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitIndex:
    """The samples of one split, or some of them, in stored order.

    Holds nothing for each sample, unless some were chosen. Passed to another process, it is a few
    paths, and opens the files there.
    """

    folder: Location
    split: str
    root: Location
    """Folder of the tars."""
    classes: tuple[str, ...]
    fingerprint: str
    """Hash of this split's samples, labels, order and division into tars."""
    label_map_sha256: str
    entry: SplitEntry
    """The stored split."""
    tars_path: Path
    """The local table of tars."""
    positions: Path | RemoteFile
    keys: Path | RemoteFile
    """index.parquet, which has the keys."""
    remote: RemoteSettings
    stored: range | np.ndarray
    """Rows of the samples in the stored split, increasing."""
    key_hash: str | None = None
    """Hash of the rows that `choose_by_key` left of the stored split."""
    note: str = ""
    """What to say about that choice."""
    is_shuffled: bool = True
    """In random order, as `vitscale prepare shards` writes; other tars may be sorted by class."""
    has_entry_points: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # Without what is mapped or was read, which each process has from the files.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def num_samples(self) -> int:
        return len(self.stored)

    @property
    def is_remote(self) -> bool:
        return isinstance(self.root, Url)

    @property
    def title(self) -> str:
        """Name, size and fingerprint, by which runs say what they read."""
        name = "/".join(redact(str(self.folder)).rstrip("/").split("/")[-2:])
        return (
            f"{name}/{self.split}, {self.num_samples:,} images, {self.fingerprint[:12]}"
        )

    @cached_property
    def tars(self) -> Tars:
        """The table of the stored tars. Raises UserError where it cannot be read."""
        return _read(
            self.tars_path, lambda: open_tars(self.tars_path, self.entry.layout)
        )

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [tars]: samples up to the end of each tar; those of a tar are stored one after the
        other."""
        ends = self.tars.ends
        if isinstance(self.stored, np.ndarray):
            # Of the same type: others would be converted, all of them.
            return np.searchsorted(self.stored, ends.astype(self.stored.dtype))
        if self.num_samples == self.entry.num_samples:
            return ends
        return np.clip(ends - self.stored.start, 0, self.num_samples)

    @property
    def shard_lengths(self) -> np.ndarray:
        """int64 [tars]: samples per tar."""
        return np.diff(self.ends, prepend=0)

    @property
    def index_path(self) -> Path:
        """The local index.parquet."""
        return self.keys.verified() if isinstance(self.keys, RemoteFile) else self.keys

    def subset(self, rows: slice | np.ndarray, *, name: str) -> SplitIndex:
        """Select samples. rows: increasing. name: becomes part of the fingerprint."""
        if isinstance(rows, np.ndarray):
            stored: range | np.ndarray = self.rows_of(rows).astype(self.narrow)
        else:
            stored = self.stored[rows]
        digest = hashlib.sha256(f"{self.fingerprint}\0{name}".encode()).hexdigest()
        return replace(self, fingerprint=digest, stored=stored)

    @property
    def narrow(self) -> np.dtype[Any]:
        """The narrowest type of the numbers of samples."""
        return np.dtype(np.min_scalar_type(self.entry.num_samples))

    def rows_of(self, samples: np.ndarray) -> np.ndarray:
        """Rows of some samples in the stored split."""
        if isinstance(self.stored, np.ndarray):
            return self.stored[samples]
        return samples + self.stored.start

    def shard_of(self, sample: int) -> int:
        """Number of a sample's tar."""
        return int(self.tars.ends.searchsorted(self.stored[sample], side="right"))

    def tar(self, shard: int) -> Path | RemoteFile:
        """A tar. Raises UserError for a name that leads out of the folder."""
        entry = shard_entry(self.tars, shard, where=self.tars_path)
        return stored_file(self.root / entry.name, entry, self.remote)

    def locate(self, sample: int) -> Place:
        """Where a sample is. Raises UserError where what says it is damaged or cannot be read."""
        row = self.stored[sample]
        shard = int(self.tars.ends.searchsorted(row, side="right"))
        first, records, tar, points = self._recent.get(shard) or self._loaded(shard)
        prefix, block, length, label = records[int(row) - first].item()
        return Place(tar, BLOCK_BYTES * block, length, label, prefix, points)

    def read(self, place: int | Place, *, verify: bool = False) -> bytes:
        """The image of a sample as stored, by its number or place.

        verify: compare it with its hash, which is always done for remote shards.
        Raises OSError if its bytes are lost or changed, UserError if the storage cannot be read.
        """
        if not isinstance(place, Place):
            place = self.locate(place)
        return read_checked(
            place.tar,
            offset=place.offset,
            num_bytes=place.length,
            hash_prefix=place.hash_prefix,
            verify=verify,
        )

    def entry_points_of(self, place: Place) -> bytes:
        """Where decoding of the image can start; empty: at its top."""
        if place.entry_points is None:
            return b""
        return read_entry_points(place.entry_points, key=place.hash_prefix)

    @cached_property
    def _recent(self) -> dict[int, tuple[int, np.ndarray, Any, Path | None]]:
        """Tar -> (row of its first sample, its records, itself, its entry points)."""
        return {}

    def _loaded(self, shard: int) -> tuple[int, np.ndarray, Any, Path | None]:
        """Read the records of a tar into `_recent`."""
        records = self._checked(self._bytes_of(shard), slice(shard, shard + 1))
        entry = shard_entry(self.tars, shard, where=self.tars_path)
        tar = stored_file(self.root / entry.name, entry, self.remote)
        # Of fewer, all were looked at when the split was opened.
        if self.entry.num_tars > TARS_AT_START:
            check_tars(self.split, [(tar, entry.bytes)], where=self.folder)

        points = None
        if self.has_entry_points and isinstance(self.folder, Path):
            points = entry_points_file(self.folder, entry.name)
        if len(self._recent) >= RECENT_TARS:
            del self._recent[next(iter(self._recent))]
        loaded = (self._first(shard), records, tar, points)
        self._recent[shard] = loaded
        return loaded

    def _first(self, shard: int) -> int:
        """Row of the first sample of a tar."""
        return int(self.tars.ends[shard - 1]) if shard else 0

    def _bytes_of(self, shard: int) -> bytes:
        """The records of a tar as stored, which have their hash."""
        tars = self.tars
        first = self._first(shard)
        try:
            return read_checked(
                self.positions,
                offset=POSITION.itemsize * first,
                num_bytes=POSITION.itemsize * (int(tars.ends[shard]) - first),
                hash_prefix=int(tars.checks[shard]),
            )
        except OSError as error:
            raise UserError(
                f"the records of the samples of {tars.names[shard].as_py()} are damaged "
                f"({error.strerror or error})",
                where=str(self.positions),
                next_step="copy this file again, or make the shards again",
            ) from None

    def _checked(self, data: bytes, shards: slice) -> np.ndarray:
        """The records of some tars. Raises UserError where they contradict the manifest: training
        trusts these numbers."""
        records = np.frombuffer(data, POSITION)
        ends = self.tars.ends[shards]
        lengths = np.diff(ends, prepend=ends[-1] - len(records))
        label = records["label"]
        least = 0 if self.classes else NO_LABEL
        stop = records["block"].astype(np.int64) * BLOCK_BYTES + records["length"]
        agrees = (
            np.all((label >= least) & (label < len(self.classes)))
            and np.all(records["length"] > 0)
            and np.all(stop <= np.repeat(self.tars.num_bytes[shards], lengths))
        )
        if not agrees:
            raise _disagrees(self.positions, self.split)
        return records

    def records(self, start: int, stop: int) -> np.ndarray:
        """The records of the samples in some tars, POSITION [samples]. Raises UserError."""
        low = int(self.ends[start - 1]) if start else 0
        chosen = self.stored[low : int(self.ends[stop - 1])]
        # Where no sample was chosen, nothing is read.
        if not len(chosen):
            return np.empty(0, POSITION)

        data = b"".join(self._bytes_of(shard) for shard in range(start, stop))
        records = self._checked(data, slice(start, stop))
        first = self._first(start)
        if isinstance(chosen, range):
            return records[chosen.start - first : chosen.stop - first]
        return records[chosen.astype(np.int64) - first]

    def pieces(self) -> Iterator[np.ndarray]:
        """The records of all samples in order, those of some tars at a time."""
        ends = self.tars.ends
        stop = 0
        while stop < len(ends):
            start = stop
            stop = int(ends.searchsorted(self._first(start) + PIECE_SAMPLES))
            stop = max(start + 1, stop)
            yield self.records(start, stop)

    @cached_property
    def label(self) -> np.ndarray:
        """int32 [samples]: positions in `classes`; NO_LABEL everywhere if there are none.

        This one is held in memory.
        """
        return np.concatenate([piece["label"] for piece in self.pieces()])


def _disagrees(file: Location | RemoteFile, split: str) -> UserError:
    return UserError(
        f"disagrees with {MANIFEST_NAME} (samples, tars, labels or offsets of {split!r})",
        where=str(file),
        next_step="make the shards again",
    )


def shard_entry(tars: Tars, shard: int, *, where: Path) -> ShardEntry:
    """A row of a table of tars. Raises UserError for a name that leads out of the folder."""
    name = tars.names[shard].as_py()
    # Tars are opened by these names, and the table may be from elsewhere.
    if not stays_inside(name):
        raise UserError(
            f"names the tar {name!r}, which may lie outside its folder",
            where=where,
            allowed="relative names without '..'",
            next_step="do not use this folder unless you trust who made it",
        )
    first = int(tars.ends[shard - 1]) if shard else 0
    return ShardEntry(
        name=name,
        samples=int(tars.ends[shard]) - first,
        bytes=int(tars.num_bytes[shard]),
        blake3=tars.hashes[shard].as_py().hex(),
    )


def stored_file(
    place: Location, stored: StoredFile | ShardEntry, settings: RemoteSettings
) -> Path | RemoteFile:
    """A file of a shard folder; one at a URL is read through the cache."""
    if isinstance(place, Path):
        return place
    folder = open_cache(settings.cache_path)
    limit = int(settings.cache_gib * 2**30)
    return RemoteFile(place, stored.bytes, stored.blake3, folder, limit)


def read_manifest(folder: Location | str) -> Manifest:
    """Read manifest.json. Raises UserError when `folder` is not a finished shard folder."""
    path = location_of(folder) / MANIFEST_NAME
    try:
        manifest = TypeAdapter(Manifest).validate_json(read_file(path))
    except OSError as error:
        folder = Path(path).parent
        what = "no such folder"
        if folder.is_dir():
            what = f"is not a shard folder: {MANIFEST_NAME} cannot be read ({error.strerror})"
        raise UserError(
            what,
            where=folder,
            next_step="correct the path, of a run by data.path=SHARDS; vitscale prepare shards "
            "data/image_folder makes shards of images, vitscale prepare index data/index_shards an "
            "index of tars",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(
            f"is not a valid manifest ({key}: {first['msg']})",
            where=path,
            allowed=f"format version {FORMAT_VERSION}",
            next_step="install the vitscale version that wrote it, or make the shards again",
        ) from None

    # Files have these in their names: a manifest from elsewhere must not lead out of its folder.
    for split in manifest.splits:
        if "/" in split or not stays_inside(split):
            raise UserError(
                f"names the split {split!r}, whose files may lie outside its folder",
                where=path,
                allowed="names without '/'",
                next_step="do not use this folder unless you trust who made it",
            )
    return manifest


def read_file(path: Location) -> bytes:
    """A whole small file. Raises OSError, and what `retried_read` and `read_chunks` raise."""
    if isinstance(path, Path):
        return retried_read(path.read_bytes, name=path)
    return b"".join(read_chunks(path))


def stays_inside(name: str) -> bool:
    """Return True for a relative name that cannot leave the folder that it is joined to."""
    parts = PurePosixPath(name).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in name


def read_split(
    folder: Location | str,
    *,
    split: str,
    key: str | None = None,
    remote_settings: RemoteSettings | None = None,
    check_files: bool = True,
) -> SplitIndex:
    """Open one split; check that local files exist with the right sizes, and what says where the
    samples are, where that takes no time (`TARS_AT_START`, `SAMPLES_AT_START`).

    key: the setting that names the split. check_files: False where another rank checks them.
    Raises UserError, with all problems at once.
    """
    folder = location_of(folder)
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise UserError(
            f"no split {split!r}",
            where=folder,
            allowed=", ".join(sorted(manifest.splits)),
            next_step=f"set {key} to one of these" if key else None,
        )
    entry = manifest.splits[split]
    settings = remote_settings or RemoteSettings()
    # The folder may have been made again since this process read it.
    forget_opened()

    root = location_of_tars(folder, manifest)
    index = StoredFile(bytes=manifest.index_bytes, blake3=manifest.index_blake3)
    stored = {
        tars_name(split): entry.tars,
        positions_name(split): entry.positions,
        INDEX_NAME: index,
    }
    tars, positions, keys = (
        stored_file(folder / name, file, settings) for name, file in stored.items()
    )
    sizes = [
        (place, file.bytes)
        for place, file in zip((tars, positions, keys), stored.values(), strict=True)
    ]
    check_tars(split, sizes if check_files else [], where=folder)

    has_points = False
    if isinstance(folder, Path):
        points_folder = folder / FOLDER_NAME
        has_points = _read(points_folder, points_folder.is_dir)
    opened = SplitIndex(
        folder=folder,
        split=split,
        root=root,
        classes=manifest.classes,
        fingerprint=entry.fingerprint,
        label_map_sha256=manifest.label_map_sha256,
        entry=entry,
        tars_path=tars.verified() if isinstance(tars, RemoteFile) else tars,
        positions=positions,
        keys=keys,
        remote=settings,
        stored=range(entry.num_samples),
        is_shuffled=manifest.shards_root == ".",
        has_entry_points=has_points,
    )

    ends = opened.tars.ends
    if (
        len(ends) != entry.num_tars
        or ends[-1] != entry.num_samples
        or entry.positions.bytes != POSITION.itemsize * entry.num_samples
    ):
        raise _disagrees(opened.tars_path, split)
    if check_files and entry.num_tars <= TARS_AT_START:
        entries = [
            shard_entry(opened.tars, shard, where=opened.tars_path)
            for shard in range(entry.num_tars)
        ]
        files = [(opened.root / shard.name, shard.bytes) for shard in entries]
        check_tars(split, files, where=folder)
    if check_files and entry.num_samples <= SAMPLES_AT_START:
        for _ in opened.pieces():
            pass
    return opened


def check_tars(
    split: str, files: Sequence[tuple[Any, int]], *, where: Location
) -> None:
    """`check_sizes` of files of a split."""
    check_sizes(
        files,
        what=f"files of split {split!r}",
        where=where,
        again="make the shards again",
    )


def check_sizes(
    files: Sequence[tuple[Any, int]], *, what: str, where: Location, again: str
) -> None:
    """Raise UserError that names the local files that are missing or have another size.

    files: (path, bytes); those that are not local are left out. again: how to make them.
    """
    wrong = []
    for path, num_bytes in files:
        if not isinstance(path, Path):
            continue
        try:
            size = retried_read(path.stat, name=path).st_size
            if size != num_bytes:
                wrong.append(f"{path}: {size} bytes, but the manifest says {num_bytes}")
        except OSError as error:
            wrong.append(f"{path}: missing ({error.strerror})")

    if wrong:
        raise UserError(
            f"{len(wrong)} of {len(files)} {what} cannot be used, such as\n"
            + "\n".join(f"    {line}" for line in wrong[:MAX_SHOWN]),
            where=where,
            next_step=f"copy the folder again, or {again}",
        )


def label_map_sha256(classes: Sequence[str]) -> str:
    """Hash of the class names in label order."""
    text = json.dumps(list(classes), ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def location_of_tars(folder: Location, manifest: Manifest) -> Location:
    """Folder of the tars. Raises UserError if it cannot be read from this machine."""
    root = manifest.shards_root
    where = f"{folder / MANIFEST_NAME}: shards_root"
    if is_url(root):
        return location_of(root, where=where)
    # An absolute path belongs to the machine that wrote it, and means nothing beside a URL.
    if isinstance(folder, Url) and Path(root).is_absolute():
        raise UserError(
            f"is {root!r}, a path on one machine, but the manifest was read from a URL",
            where=where,
            next_step="set it to the URL of the tars",
        )
    return folder / root


def _read(path: Path, read: Callable[[], Any]) -> Any:
    """What `read` returns; its errors as UserError, and those that often pass as StorageError."""
    import pyarrow as pa

    try:
        return retried_read(read, name=path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        what = f"cannot be read ({error})"
        step = "make the shards again"
        raise UserError(what, where=path, next_step=step) from None


# ---- keys ----------------------------------------------------------------------------------------


def choose_by_key(index: SplitIndex, path: str) -> SplitIndex:
    """The samples of an index whose keys a text file lists, one per line.

    Keys stay Arrow strings, about 30 bytes each: as Python's 14 million would take 2 GB.
    Raises UserError if the file cannot be read, no sample has one of its keys, or several have the
    same one.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pa.array(
        [read_text(path, where="data.only_keys").rstrip("\n")], pa.large_string()
    )
    wanted = pc.split_pattern(text, "\n").flatten()

    def search() -> tuple[np.ndarray, Any]:
        """Rows of the stored split that are wanted, and their keys."""
        rows: list[np.ndarray] = []
        chosen: list[pa.Array] = []
        with _SplitGroups(index.index_path, index.split) as groups:
            # Many at once: each search hashes all keys of the file first.
            for start in range(0, len(groups.ends), GROUPS_AT_ONCE):
                table = groups.read(["key"], start, start + GROUPS_AT_ONCE)
                keys = table.column("key").cast(wanted.type)
                mask = pc.is_in(keys, value_set=wanted)
                first = int(groups.ends[start - 1]) if start else 0
                found = np.flatnonzero(mask.to_numpy()) + first
                rows.append(found.astype(index.narrow))
                chosen += keys.filter(mask).chunks
        return np.concatenate(rows), pa.chunked_array(chosen, wanted.type)

    found, chosen = _read(index.index_path, search)
    # Every stored row was searched; only those that this index still has may be chosen.
    if isinstance(index.stored, range):
        is_here = (found >= index.stored.start) & (found < index.stored.stop)
        rows = found[is_here] - index.stored.start
    else:
        rows = np.flatnonzero(np.isin(index.stored, found))
    if not len(rows):
        (example,) = sample_keys(index, [0])
        raise UserError(
            f"none of the {index.num_samples:,} samples has one of the keys of {path}",
            where="data.only_keys",
            allowed=f"keys of {index.split!r} of {index.folder}, such as {example!r}",
        )

    counts = chosen.value_counts()
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        # An index that an earlier version made of tars that begin anew with the same keys.
        raise UserError(
            f"samples of {index.folder} share keys, such as {repeated[0].as_py()!r}: the list "
            "would choose others than it means",
            where="data.only_keys",
            next_step="make the index again with vitscale prepare index, which makes keys unique",
        )

    lost = wanted.filter(pc.invert(pc.is_in(wanted, value_set=chosen)))
    note = ""
    if len(lost):
        note = (
            f"{len(lost):,} lines of data.only_keys name no sample of {index.split!r}, such as "
            f"{lost[-1].as_py()!r}"
        )

    # A resumed run compares this hash: the file of keys may have changed in the meantime.
    digest = hashlib.sha256(index.rows_of(rows).astype("<i8").tobytes()).hexdigest()
    subset = index.subset(rows, name=f"keys {digest}")
    return replace(subset, key_hash=digest, note=note)


def sample_keys(index: SplitIndex, samples: Sequence[int]) -> list[str]:
    """Keys of some samples of a split, in the order given. Raises UserError if they are not there.

    Reads only the row groups that hold them, one after the other.
    """
    rows = index.rows_of(np.asarray(samples, np.int64))
    keys: list[str] = _read(
        index.index_path, lambda: _keys_of_rows(index, rows.astype(np.int64))
    )
    return keys


def _keys_of_rows(index: SplitIndex, rows: np.ndarray) -> list[str]:
    """rows: of the stored split. Raises UserError if it has fewer, OSError, ArrowException."""
    keys = np.empty(len(rows), object)
    with _SplitGroups(index.index_path, index.split) as groups:
        group_of = np.searchsorted(groups.ends, rows, side="right")
        if np.any(group_of == len(groups.ends)):
            raise UserError(
                f"has fewer samples of {index.split!r} than before",
                where=index.index_path,
                next_step="make the shards again",
            )

        # A group is read once, however many of its rows are wanted and wherever they stand.
        for group in np.unique(group_of).tolist():
            here = np.flatnonzero(group_of == group)
            first = groups.ends[group - 1] if group else 0
            stored = groups.read(["key"], group, group + 1).column("key")
            keys[here] = stored.take(rows[here] - first).to_pylist()
    return list(keys)


class _SplitGroups(ExitStack):
    """The row groups of a split in an index, in which each group has samples of one split.

    A whole column of keys may be larger than memory, and than the 2 GiB of one Arrow array.
    `pyarrow.parquet.read_table` would filter too, but imports pandas: 0.4 s and 45 MiB a process.

    As a context manager it closes the file. Raises OSError or ArrowException.
    """

    def __init__(self, path: Path, split: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        super().__init__()
        self._file = self.enter_context(pq.ParquetFile(path))
        groups = [
            self._file.metadata.row_group(n) for n in range(self._file.num_row_groups)
        ]

        # An index of another writer may have no such column, no statistics, or mixed groups.
        column = self._file.schema_arrow.get_field_index("split")
        splits = [column >= 0 and group.column(column).statistics for group in groups]
        if not all(known and known.min == known.max for known in splits):
            raise pa.ArrowInvalid("its row groups do not say which split they have")
        self._numbers = [n for n, known in enumerate(splits) if known.min == split]
        lengths = [groups[number].num_rows for number in self._numbers]
        self.ends = np.cumsum([0, *lengths])[1:]
        """int64: rows of the split up to the end of each of its row groups."""

    def read(
        self, columns: list[str], start: int = 0, stop: int | None = None
    ) -> pa.Table:
        """Some columns of some of the split's row groups."""
        return self._file.read_row_groups(self._numbers[start:stop], columns=columns)


def sample_names(
    parts: Sequence[SplitIndex], samples: Sequence[tuple[int, int]]
) -> list[str]:
    """Quoted keys; or numbers if the keys cannot be read, which must not end a run.

    samples: (position in `parts`, sample).
    """
    names = sample_numbers(parts, samples)
    with suppress(Exception):  # whatever has become of the index
        for row, (part, number) in enumerate(samples):
            (key,) = sample_keys(parts[part], [number])
            names[row] = repr(key)
    return names


def sample_numbers(
    parts: Sequence[SplitIndex], samples: Sequence[tuple[int, int]]
) -> list[str]:
    """Names of samples without their keys, and so without reading anything."""
    return [f"number {number} of {parts[part].split!r}" for part, number in samples]


def held_out_split(data: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What `implied` yields of a group `data` that leaves open which split is evaluated."""
    if "val_split" in data.model_fields_set or data.dev_percent:
        return

    split = only_held_out(
        data.path, default=data.val_split, train_split=data.train_split
    )
    if split is not None:
        origin = f"{data.path} has one split beside {data.train_split!r}"
        yield origin, {"data": {"val_split": split}}


def only_held_out(path: str, *, default: str, train_split: str = "train") -> str | None:
    """The one split beside the training's, of shards that have no split `default`.

    None where there are several or none, and where the shards cannot be seen from here.
    """
    try:
        splits = read_manifest(path).splits
    except UserError:
        return None
    # One other split can only be the held-out one; of several, the user must choose.
    others = [name for name in splits if name != train_split]
    if default in splits or len(others) != 1:
        return None
    return others[0]
