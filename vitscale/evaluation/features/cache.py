"""Keep extracted features on disk, so that a killed extraction resumes.

Needs no torch when imported.

FOLDER/KEY/model.json            what the features are of; KEY is its hash
FOLDER/KEY/SPLIT-OUTPUT-HASH/    one split in one of the model's outputs
    block-000000012.safetensors  rows of a block of consecutive samples, all or some of them

A block is written whole, by one rename, with a hash over its content; a damaged one counts as
missing. A later request for more samples of a block rewrites it with all its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import blake3
import numpy as np

from vitscale.config.errors import RankStorageError, UserError
from vitscale.distributed.atomic_files import json_text, make_folders, write_bytes, write_text

if TYPE_CHECKING:
    import torch

    from vitscale.data.index import SplitIndex

FORMAT_VERSION = 1


class Rows(NamedTuple):
    samples: np.ndarray
    """int64 [N], increasing."""
    values: torch.Tensor
    """fp32 [N, D]"""


class FeatureCache:
    """A folder of features. Any number of models, splits and processes may use it at once."""

    def __init__(
        self,
        folder: Path,
        *,
        made_by: Mapping[str, Any],
        images_per_file: int,
        say: Callable[[str], None],
    ) -> None:
        """made_by: what decides the features besides the split and the output, as JSON values.

        say: reports what was found and what is damaged, in one line.
        Raises UserError when the folder cannot be written.
        """
        text = json_text({"format": FORMAT_VERSION, "images_per_file": images_per_file, **made_by})
        self._folder = folder / blake3.blake3(text.encode()).hexdigest()[:16]
        self._images_per_file, self._say = images_per_file, say
        try:
            make_folders(self._folder)
            write_text(self._folder / "model.json", text)
        except OSError as error:
            raise UserError(
                f"cannot be written ({error.strerror})",
                where=str(folder),
                next_step="set features.cache to a folder that you may write, or to null",
            ) from None

    def of(self, index: SplitIndex, *, output: str) -> SplitCache:
        """The features of one split."""
        folder = self._folder / f"{index.split}-{output}-{index.fingerprint[:16]}"
        return SplitCache(folder, images_per_file=self._images_per_file, say=self._say)


class SplitCache:
    """The blocks of one split in one output. Rank 0 writes, all ranks read."""

    def __init__(self, folder: Path, *, images_per_file: int, say: Callable[[str], None]) -> None:
        self._folder, self._images_per_file, self._say = folder, images_per_file, say
        self._pending: list[Rows] = []

    def read(self, samples: np.ndarray) -> Iterator[Rows]:
        """Those of `samples` that are there."""
        num_found = 0
        for block in np.unique(samples // self._images_per_file):
            rows = self._read_block(int(block))
            chosen = np.isin(rows.samples, samples) if rows is not None else np.empty(0, bool)
            if rows is not None and chosen.any():
                import torch

                num_found += int(chosen.sum())
                yield Rows(rows.samples[chosen], rows.values[torch.from_numpy(chosen)])
        if num_found:
            self._say(f"{num_found} of {len(samples)} features of this rank from {self._folder}")

    def add(self, samples: np.ndarray, values: torch.Tensor) -> None:
        """Take further rows, in the order of their samples; write the blocks that are complete."""
        blocks = samples // self._images_per_file
        for block in np.unique(blocks):
            if self._pending and self._block_of(self._pending[0]) != block:
                self.finish()
            first, last = np.searchsorted(blocks, [block, block + 1])
            self._pending.append(Rows(samples[first:last], values[first:last]))

    def finish(self) -> None:
        """Write the rows taken since the last block. Raises RankStorageError when that fails."""
        import torch

        if not self._pending:
            return
        block = self._block_of(self._pending[0])
        samples = np.concatenate([rows.samples for rows in self._pending])
        values = torch.cat([rows.values for rows in self._pending])
        self._pending = []
        stored = self._read_block(block)
        if stored is not None:
            kept = ~np.isin(stored.samples, samples)
            samples = np.concatenate([samples, stored.samples[kept]])
            values = torch.cat([values, stored.values[torch.from_numpy(kept)]])
        order = np.argsort(samples)
        rows = Rows(samples[order], values[torch.from_numpy(order)])
        path = self._path(block)
        try:
            make_folders(self._folder)
            write_bytes(path, _encoded(rows))
        except OSError as error:
            raise RankStorageError(
                f"cannot be written ({error.strerror})",
                where=str(path),
                next_step="free the disk and run again; finished blocks are kept",
            ) from None

    def _block_of(self, rows: Rows) -> int:
        return int(rows.samples[0]) // self._images_per_file

    def _path(self, block: int) -> Path:
        return self._folder / f"block-{block:09d}.safetensors"

    def _read_block(self, block: int) -> Rows | None:
        """None: missing, or damaged, which is reported."""
        from safetensors import SafetensorError, safe_open

        path = self._path(block)
        try:
            with safe_open(path, framework="pt") as file:
                digest = (file.metadata() or {}).get("blake3")
                rows = Rows(file.get_tensor("samples").numpy(), file.get_tensor("values"))
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            self._say(f"{path}: damaged ({type(error).__name__}); its features are extracted again")
            return None
        if digest != _digest(rows):
            self._say(f"{path}: damaged (wrong hash); its features are extracted again")
            return None
        return rows


def _encoded(rows: Rows) -> bytes:
    import torch
    from safetensors.torch import save

    tensors = {"samples": torch.from_numpy(rows.samples), "values": rows.values.contiguous()}
    data: bytes = save(tensors, metadata={"blake3": _digest(rows)})
    return data


def _digest(rows: Rows) -> str:
    digest = blake3.blake3(rows.samples.tobytes())
    digest.update(rows.values.contiguous().numpy().tobytes())
    return digest.hexdigest()
