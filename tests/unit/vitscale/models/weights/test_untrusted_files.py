"""Archives and indexes of weights that claim what they do not hold, or name other files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitscale.config.errors import UserError
from vitscale.models.weights.files import npz, torch_files
from vitscale.models.weights.files.npz import read_npz
from vitscale.models.weights.files.safetensors import read_sharded
from vitscale.models.weights.files.torch_files import read_torch_file

CENTRAL_ENTRY, FLAGS = b"PK\x01\x02", 8  # of a zip file's directory: signature, offset of the flags


def archive(folder: Path) -> Path:
    path = folder / "weights.npz"
    np.savez(path, a=np.ones(3, np.float32), b=np.zeros(2, np.float32))
    return path


def test_an_archive_of_a_few_arrays_is_read(tmp_path: Path) -> None:
    found = read_npz(archive(tmp_path), prefix_of=lambda _: "")
    assert {name: value.tolist() for name, value in found.items()} == {"a": [1] * 3, "b": [0] * 2}


def test_encrypted_members_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path)
    content = bytearray(path.read_bytes())
    at = content.index(CENTRAL_ENTRY) + FLAGS
    content[at : at + 2] = struct.pack("<H", 1)
    path.write_bytes(content)
    with pytest.raises(UserError, match="'a.npy' is encrypted"):
        read_npz(path, prefix_of=lambda _: "")


def test_archives_of_too_many_arrays_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "MAX_MEMBERS", 1)
    with pytest.raises(UserError, match="would unpack to 2 arrays"):
        read_npz(archive(tmp_path), prefix_of=lambda _: "")


def test_pickles_of_an_unusual_size_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "weights.pth")
    assert read_torch_file(tmp_path / "weights.pth")["a"].tolist() == [1.0]
    monkeypatch.setattr(torch_files, "MAX_PICKLE_BYTES", 8)
    with pytest.raises(UserError, match="not one data.pkl of a usual size"):
        read_torch_file(tmp_path / "weights.pth")


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"a": "part.safetensors", "b": "part.safetensors"}, "'b' and 0 more tensors are in none"),
        ({"a": "../part.safetensors"}, "'../part.safetensors' is no .safetensors file beside it"),
        ({"a": "part.bin"}, "'part.bin' is no .safetensors file beside it"),
        ({"a": "part.safetensors", "b": "gone.safetensors"}, "1 of its 2 files are missing"),
        ({}, "has no weight_map"),
    ],
)
def test_an_index_lists_files_beside_it(
    tmp_path: Path, listed: dict[str, str], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (folder, tmp_path):
        save_file({"a": torch.ones(1)}, place / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(UserError, match=message):
        read_sharded(index)
