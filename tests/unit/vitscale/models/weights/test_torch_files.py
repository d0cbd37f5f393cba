"""Files of torch.save: those of MAE, DeiT and DINOv2 load; others are refused."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.models.weights.files import Weights, read_torch_file
from vitscale.models.weights.reading import read_weights

STATE = {
    "cls_token": torch.full((1, 1, 8), 2.0),
    "pos_embed": torch.arange(80.0).view(1, 10, 8),
    "patch_embed.proj.weight": torch.ones(8, 3, 4, 4, dtype=torch.float16),
    "blocks.0.norm1.weight": torch.ones(8),
}


def saved(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def read(path: Path) -> Weights:
    return read_weights(path, grid=None)


def under(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in STATE.items()}


ARGS = argparse.Namespace(lr=0.1, output_dir=Path("/somewhere"))
HEADS = {"backbone.mask_token": torch.ones(1, 8), "dino_head.mlp.0.weight": torch.ones(2, 2)}


@pytest.mark.parametrize(
    "content",
    [
        STATE,
        {"model": STATE, "optimizer": {"state": {0: {"step": 1}}}, "epoch": 3, "args": ARGS},
        {"state_dict": under("module.")},
        {"student": {}, "teacher": under("module.backbone."), "epoch": 1},
        {"teacher": under("backbone.") | HEADS},
        {"model": {name: torch.nn.Parameter(value) for name, value in STATE.items()}},
    ],
    ids=["bare", "mae", "timm", "dino", "dinov2", "parameters"],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_trainers_load_as_their_weights(
    tmp_path: Path, content: Any, zipped: bool
) -> None:
    path = saved(tmp_path / "model.pth", content, _use_new_zipfile_serialization=zipped)
    found = read(path)
    assert found.grid == (3, 3)
    assert {k for k in found.tensors if k != "mask_token"} == STATE.keys()
    assert all(torch.equal(found.tensors[name], STATE[name].float()) for name in STATE)
    assert all(value.dtype == torch.float32 for value in found.tensors.values())


def test_a_file_that_was_zipped_again_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pth", STATE)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert torch.equal(read_torch_file(path)["pos_embed"], STATE["pos_embed"])


def test_weights_do_not_change_with_their_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pth", STATE)
    found = read_torch_file(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(found["pos_embed"], STATE["pos_embed"])


def test_chunks_of_dinov2_are_one_row_of_blocks(tmp_path: Path) -> None:
    chunked = STATE | {
        "blocks.1.5.ls1.gamma": torch.ones(8),
        "register_tokens": torch.ones(1, 2, 8),
    }
    del chunked["blocks.0.norm1.weight"]
    chunked["blocks.0.0.norm1.weight"] = torch.ones(8)
    names = read(saved(tmp_path / "model.pth", chunked)).tensors.keys()
    assert {"blocks.0.norm1.weight", "blocks.5.ls1.gamma", "reg_token"} <= names


class Trap:
    """Unpickled, it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("bare", [True, False])
def test_pickles_that_run_code_are_refused_unread(tmp_path: Path, zipped: bool, bare: bool) -> None:
    sprung = tmp_path / "sprung"
    content: Any = Trap(sprung) if bare else {"model": STATE, "extra": Trap(sprung)}
    path = saved(tmp_path / "trap.pth", content, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="may run code; nothing of it was loaded") as caught:
        read(path)
    assert "touch" in str(caught.value) or "getattr" in str(caught.value)
    assert not sprung.exists()
    torch.load(path, weights_only=False)  # the trap is a real one
    assert sprung.exists()


def cut(path: Path) -> None:
    saved(path, STATE)
    path.write_bytes(path.read_bytes()[:-300])


def text(path: Path) -> None:
    path.write_text("<html>Not found</html>")


@pytest.mark.parametrize(
    "write, message",
    [
        (cut, "is damaged or no file of weights"),
        (text, "is damaged or no file of weights"),
        (lambda path: saved(path, {"model": {"x": 1}}), "'x' is no tensor"),
        (lambda path: saved(path, [torch.ones(1)]), "holds no tensors by name"),
        (lambda path: path.write_bytes(b""), "is damaged or no file of weights"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_files_are_refused_in_one_sentence(
    tmp_path: Path, write: Callable[[Path], Any], message: str
) -> None:
    path = tmp_path / "model.pth"
    write(path)
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) <= 3
