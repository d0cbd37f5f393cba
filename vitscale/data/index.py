"""Read shard folders: index, manifest, bytes and keys of samples. See docs/data_format.md.

Pyarrow is imported only to read an index, so that `read_manifest` stays light.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from vitscale.config.errors import UserError, not_read
from vitscale.config.redaction import redact
from vitscale.config.text_files import read_text
from vitscale.data.remote import (
    Location,
    RemoteFile,
    Url,
    is_url,
    location_of,
    open_cache,
    prefix_of_hash,
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
FORMAT_VERSION: Literal[2] = 2
INDEX_NAME = "index.parquet"
MANIFEST_NAME = "manifest.json"
NO_LABEL = -1
MAX_OPEN_SHARDS = 64
# Row groups whose keys are searched at once: a million keys.
GROUPS_AT_ONCE = 128
# Bytes are damaged: a checksum or structure that the file system finds broken. Other errors come
# from the storage or the machine: those of PASSING are retried, and for none another sample is
# taken.
DATA_LOSS_ERRNOS = (errno.EBADMSG, errno.EUCLEAN, errno.ENODATA)
# Arrays of `SplitIndex` with one entry per sample.
ARRAYS = ("shard_of", "offset", "length", "label", "hash_prefix")


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """One tar file."""

    name: str
    samples: int
    bytes: int
    blake3: str


@dataclass(frozen=True, kw_only=True)
class SplitEntry:
    """One split: its tars in order, and a hash of its samples in order."""

    num_samples: int
    num_bytes: int
    fingerprint: str
    shards: tuple[ShardEntry, ...]

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        return tuple(shard.samples for shard in self.shards)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json."""

    format_version: Literal[2]
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


@dataclass(frozen=True, kw_only=True)
class SplitIndex:
    """Position of each sample of one split. Arrays have one entry per sample, in stored order."""

    folder: Location
    split: str
    shard_of: np.ndarray
    """Position in `shards`."""
    offset: np.ndarray
    """First byte of the image inside its tar."""
    length: np.ndarray
    """Bytes of the image."""
    label: np.ndarray
    """Position in `classes`; NO_LABEL everywhere if there are none."""
    shards: tuple[Path | RemoteFile, ...]
    shard_lengths: tuple[int, ...]
    """Samples per tar; the samples of a tar are stored one after the other."""
    classes: tuple[str, ...]
    fingerprint: str
    """Hash of this split's samples, labels, order and division into tars."""
    label_map_sha256: str
    hash_prefix: np.ndarray
    """uint64: first 8 bytes of each image's BLAKE3, little-endian."""
    index_path: Path
    """The local index.parquet, which has the keys."""
    stored: np.ndarray | None = None
    """Rows of the samples in the stored split; None: all rows, in order."""
    key_hash: str | None = None
    """Hash of the rows that `choose_by_key` left of the stored split."""
    note: str = ""
    """What to say about that choice."""
    is_shuffled: bool = True
    """In random order, as `vitscale prepare shards` writes; other tars may be sorted by class."""
    entry_points: tuple[Path, ...] = ()
    """Files of the entry points of the images of each tar, which may be missing; empty: none."""

    @property
    def num_samples(self) -> int:
        return len(self.label)

    @property
    def title(self) -> str:
        """Name, size and fingerprint, by which runs say what they read."""
        name = "/".join(redact(str(self.folder)).rstrip("/").split("/")[-2:])
        return (
            f"{name}/{self.split}, {self.num_samples:,} images, {self.fingerprint[:12]}"
        )

    def subset(self, rows: np.ndarray, *, name: str) -> SplitIndex:
        """Select samples. rows: increasing. name: becomes part of the fingerprint."""
        rows = narrowed(rows)
        lengths = np.bincount(self.shard_of[rows], minlength=len(self.shard_lengths))
        digest = hashlib.sha256(f"{self.fingerprint}\0{name}".encode()).hexdigest()
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in ARRAYS},
            shard_lengths=tuple(lengths.tolist()),
            fingerprint=digest,
            stored=rows if self.stored is None else self.stored[rows],
        )

    def read(self, sample: int, *, verify: bool = False) -> bytes:
        """The image of a sample as stored.

        verify: compare it with its hash, which is always done for remote shards.
        Raises OSError if its bytes are lost or changed, UserError if the storage cannot be read.
        """
        shard = self.shards[self.shard_of[sample]]
        expected = int(self.hash_prefix[sample])
        place = {
            "offset": int(self.offset[sample]),
            "num_bytes": int(self.length[sample]),
        }
        if isinstance(shard, RemoteFile):
            return shard.read(**place, hash_prefix=expected)

        data = read_shard(shard, **place)
        if verify and prefix_of_hash(data) != expected:
            raise OSError("its bytes do not have the hash in the index")
        return data

    def entry_points_of(self, sample: int) -> bytes:
        """Where decoding of the image can start; empty: at its top."""
        if not self.entry_points:
            return b""
        file = self.entry_points[self.shard_of[sample]]
        return read_entry_points(file, key=int(self.hash_prefix[sample]))


def read_shard(path: Path, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range. Raises what `read_range` does, and OSError if the file ends before."""
    # A file that became shorter since the sizes were checked gives fewer bytes without an error.
    data = read_range(path, offset=offset, num_bytes=num_bytes)
    if len(data) < num_bytes:
        raise OSError(f"ends after {offset + len(data)} bytes")
    return data


def read_range(path: Path, *, offset: int, num_bytes: int) -> bytes:
    """Bytes of one range; fewer at the end of the file. Repeated while storage fails.

    Raises OSError if they are lost, StorageError if storage fails for longer, and UserError if the
    file cannot be read for another reason.
    """
    try:
        return retried_read(lambda: _read_once(path, offset, num_bytes), name=path)
    except OSError as error:
        if error.errno in DATA_LOSS_ERRNOS:
            raise
        raise not_read(
            error,
            path,
            next_step="check the storage and the limits of this machine (ulimit -n, memory), then "
            "run the same command again; if this file alone fails, copy it again",
        ) from None


def _read_once(path: Path, offset: int, num_bytes: int) -> bytes:
    try:
        # Kept by this name, so that no other thread closes it during the read.
        file = _opened(path)
        data = os.pread(file.fileno(), num_bytes, offset)
        # A read that fails half-way returns its first half; the next one tells the error.
        while len(data) < num_bytes:
            more = os.pread(file.fileno(), num_bytes - len(data), offset + len(data))
            if not more:
                break  # the file ends
            data += more
    except OSError:
        # A stale handle stays stale: the next attempt opens the file again.
        _opened.cache_clear()
        raise
    return data


@lru_cache(maxsize=MAX_OPEN_SHARDS)
def _opened(path: Path) -> FileIO:
    """A file is closed when the cache forgets it."""
    return open(path, "rb", buffering=0)


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

    # Tars are opened by these names: a manifest from elsewhere must not lead out of its folder.
    for entry in manifest.splits.values():
        for shard in entry.shards:
            if not stays_inside(shard.name):
                raise UserError(
                    f"names the tar {shard.name!r}, which may lie outside its folder",
                    where=path,
                    allowed="relative names without '..'",
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
    """Read the index of one split; check that local files exist with the right sizes.

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
    shard_names = [shard.name for shard in entry.shards]

    # The index is checked and fetched like the tars that it describes.
    root = location_of_tars(folder, manifest)
    files = [(folder / INDEX_NAME, manifest.index_bytes, manifest.index_blake3)]
    files += [(root / shard.name, shard.bytes, shard.blake3) for shard in entry.shards]
    if check_files:
        check_sizes(
            [file[:2] for file in files],
            what=f"files of split {split!r}",
            where=folder,
            again="make the shards again",
        )
    settings = remote_settings or RemoteSettings()
    limit = int(settings.cache_gib * 2**30)
    index_path, *shards = (
        RemoteFile(place, num_bytes, digest, open_cache(settings.cache_path), limit)
        if isinstance(place, Url)
        else place
        for place, num_bytes, digest in files
    )
    if isinstance(index_path, RemoteFile):
        index_path = index_path.verified()

    names = ["shard", "offset", "length", "label", "blake3"]
    # A name of its own: the type that was narrowed above is not known inside the closure.
    path = index_path

    def read() -> pa.Table:
        with _SplitGroups(path, split) as groups:
            return groups.read(names)

    table = _read(path, read)
    columns = {name: table.column(name).combine_chunks() for name in names}
    offset, length, label = (_numpy(columns[name]) for name in names[1:4])
    # Arrow stores each name once; a tar that the manifest does not name gets -1.
    numbers = {name: number for number, name in enumerate(shard_names)}
    stored_names = columns["shard"].dictionary.to_pylist()
    number_of_name = np.array([numbers.get(name, -1) for name in stored_names])
    shard_of = narrowed(number_of_name)[_numpy(columns["shard"].indices)]

    # Training trusts these numbers, so they must agree with each other and with the manifest.
    shard_bytes: np.ndarray = np.array([shard.bytes for shard in entry.shards])
    counts = np.bincount(shard_of[shard_of >= 0], minlength=len(shards))
    least = 0 if manifest.classes else NO_LABEL
    agrees = (
        len(label) == entry.num_samples
        and tuple(counts) == entry.shard_lengths
        and np.all(np.diff(shard_of) >= 0)
        and np.all((label >= least) & (label < len(manifest.classes)))
        and np.all((offset >= 0) & (length > 0))
        and np.all(offset + length <= shard_bytes[shard_of])
    )
    if not agrees:
        raise UserError(
            f"disagrees with {MANIFEST_NAME} (samples, tars, labels or offsets of {split!r})",
            where=folder / INDEX_NAME,
            next_step="make the shards again",
        )

    # A hash is four words, of which the index keeps the first.
    hashes = columns["blake3"]
    words = np.frombuffer(hashes.buffers()[1], "<u8")[4 * hashes.offset :]

    points: tuple[Path, ...] = ()
    if isinstance(folder, Path):
        points_folder = folder / FOLDER_NAME
        if _read(points_folder, points_folder.is_dir):
            points = tuple(entry_points_file(folder, name) for name in shard_names)

    return SplitIndex(
        folder=folder,
        split=split,
        shard_of=shard_of,
        offset=narrowed(offset),
        length=narrowed(length),
        label=narrowed(label),
        shards=tuple(shards),
        shard_lengths=entry.shard_lengths,
        classes=manifest.classes,
        fingerprint=entry.fingerprint,
        label_map_sha256=manifest.label_map_sha256,
        hash_prefix=words[: 4 * len(hashes) : 4].copy(),
        index_path=index_path,
        is_shuffled=manifest.shards_root == ".",
        entry_points=points,
    )


def _numpy(numbers: pa.Array) -> np.ndarray:
    """The same memory as a NumPy array. Arrow's own way imports pandas."""
    return np.from_dlpack(numbers)


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


def narrowed(values: np.ndarray) -> np.ndarray:
    """The same signed integers in fewer bytes: 20 instead of 32 per sample of ImageNet-21k."""
    # The type of a negative number is signed, so that NO_LABEL fits.
    return values.astype(np.min_scalar_type(-1 - int(values.max(initial=0))))


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
    except (OSError, pa.ArrowException) as error:
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
    stored = np.arange(index.num_samples) if index.stored is None else index.stored

    def search() -> tuple[np.ndarray, Any]:
        """Which rows of the stored split are wanted, and their keys."""
        is_wanted: list[pa.Array] = []
        chosen: list[pa.Array] = []
        with _SplitGroups(index.index_path, index.split) as groups:
            # Many at once: each search hashes all keys of the file first.
            for start in range(0, len(groups.ends), GROUPS_AT_ONCE):
                table = groups.read(["key"], start, start + GROUPS_AT_ONCE)
                keys = table.column("key").cast(wanted.type)
                mask = pc.is_in(keys, value_set=wanted)
                is_wanted += mask.chunks
                chosen += keys.filter(mask).chunks
        masks = pa.chunked_array(is_wanted, pa.bool_())
        return masks.to_numpy(), pa.chunked_array(chosen, wanted.type)

    is_wanted, chosen = _read(index.index_path, search)
    # Every stored row was searched; only those that this index still has may be chosen.
    rows = np.flatnonzero(is_wanted[stored])
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
    digest = hashlib.sha256(stored[rows].astype("<i8").tobytes()).hexdigest()
    subset = index.subset(rows, name=f"keys {digest}")
    return replace(subset, key_hash=digest, note=note)


def sample_keys(index: SplitIndex, samples: Sequence[int]) -> list[str]:
    """Keys of some samples of a split, in the order given. Raises UserError if they are not there.

    Reads only the row groups that hold them, one after the other.
    """
    rows = np.asarray(samples, np.int64)
    if index.stored is not None:
        rows = index.stored[rows]
    keys: list[str] = _read(index.index_path, lambda: _keys_of_rows(index, rows))
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
