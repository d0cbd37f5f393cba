"""Weights to start from are read once per node, and are the same bits on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.ranks.thread_ranks import run_ranks
from vitscale.config.errors import UserError
from vitscale.distributed import node_share
from vitscale.models.vit.settings import ViTSettings
from vitscale.models.weights.once_per_node import load_once_per_node

Gather = Callable[[Any], list[Any]]
ARCH = ViTSettings(preset="Ti/16").architecture(num_classes=2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(40, 30)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the machine's shared memory."""
    monkeypatch.setattr(node_share, "SHARED_MEMORY", str(tmp_path / "memory"))
    monkeypatch.setattr(node_share.tempfile, "gettempdir", lambda: str(tmp_path / "memory"))
    monkeypatch.setattr(node_share, "SPARE_BYTES", 0)
    (tmp_path / "memory").mkdir()
    return tmp_path


def test_one_rank_of_a_node_reads_the_weights(folder: Path) -> None:
    save_file(wanted := {**Model().state_dict(), "count": torch.tensor(7)}, folder / "weights")
    read: Counter[int] = Counter()

    def one(rank: int, gather: Gather) -> tuple[Model, list[str]]:
        def load(model: torch.nn.Module, _: object) -> list[str]:
            read[rank] += (folder / "weights").stat().st_size
            model.load_state_dict(load_file(folder / "weights"))
            return ["said"]

        model = Model()
        return model, load_once_per_node(model, ARCH, load, rank=rank, gather=gather)

    for model, messages in run_ranks(4, one):
        assert messages == ["said"]
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert read == {0: (folder / "weights").stat().st_size}
    assert not list((folder / "memory").iterdir())


def test_weights_that_do_not_fit_are_an_error_of_all_ranks() -> None:
    def one(rank: int, gather: Gather) -> str:
        def load(model: torch.nn.Module, _: object) -> list[str]:
            raise UserError("does not fit", where="init")

        with pytest.raises(UserError) as error:
            load_once_per_node(Model(), ARCH, load, rank=rank, gather=gather)
        return error.value.what

    assert all("does not fit" in what for what in run_ranks(2, one))
