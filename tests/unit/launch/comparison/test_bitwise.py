"""Which tensor, rank, element and value of two checkpoints differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launch.comparison import bitwise
from launch.comparison.bitwise import different_tensors, different_values, journal_metrics
from vitscale.checkpoint.catalogue import slice_name
from vitscale.checkpoint.folders import Checkpoint
from vitscale.tracking.journal import Journal

WEIGHT = torch.arange(12.0).view(3, 4) + 0.5
MOMENT = torch.arange(5.0) - 7


def saved(folder: Path, ranks: Sequence[Mapping[str, torch.Tensor]]) -> Checkpoint:
    folder.mkdir(parents=True)
    files = [f"rank-{rank:05d}.safetensors" for rank in range(len(ranks))]
    for name, tensors in zip(files, ranks, strict=True):
        save_file({key: value.clone() for key, value in tensors.items()}, folder / name)
    return Checkpoint(folder=folder, step=3, files=tuple(files), progress={}, description={})


def sliced(weight: torch.Tensor, *, at: int) -> list[dict[str, torch.Tensor]]:
    """Rank 0 has the elements before `at`, rank 1 those from it on."""
    name, flat = "model.w", weight.flatten()
    return [
        {slice_name(name, start=0, shape=weight.shape): flat[:at], "exp_avg.b": MOMENT},
        {slice_name(name, start=at, shape=weight.shape): flat[at:]},
    ]


@pytest.mark.parametrize("chunk", [8, 1 << 24])
@pytest.mark.parametrize(("element", "rank"), [(0, 0), (4, 0), (5, 1), (11, 1)])
def test_one_bit_is_named_by_rank_tensor_and_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, element: int, rank: int
) -> None:
    monkeypatch.setattr(bitwise, "CHUNK_BYTES", chunk)
    other = WEIGHT.clone()
    other.view(-1).view(torch.int32)[element] ^= 1 << 22
    ours = saved(tmp_path / "a", sliced(WEIGHT, at=5))
    [found] = different_tensors(ours, saved(tmp_path / "b", sliced(other, at=5)))
    assert (found.rank, found.name, found.element) == (rank, "model.w", element)
    assert (found.num_unequal, found.num_elements) == (1, 5 if rank == 0 else 7)
    value = float(other.view(-1)[element])
    assert found.first[0].startswith(f"{element + 0.5} (0x")
    assert found.first[1].startswith(f"{value} (0x")


def test_equal_tensors_in_other_slices_are_equal(tmp_path: Path) -> None:
    ours = saved(tmp_path / "a", sliced(WEIGHT, at=5))
    assert different_tensors(ours, saved(tmp_path / "b", sliced(WEIGHT, at=7))) == []


def test_all_unequal_elements_are_counted_per_rank(tmp_path: Path) -> None:
    other = WEIGHT.clone()
    other.view(-1)[3:9] *= -1
    ours = saved(tmp_path / "a", sliced(WEIGHT, at=5))
    found = different_tensors(ours, saved(tmp_path / "b", sliced(other, at=2)))
    assert [(each.rank, each.element, each.num_unequal) for each in found] == [(0, 3, 2), (1, 5, 4)]


def test_bits_are_compared_and_not_values(tmp_path: Path) -> None:
    """NaN equals itself; 0 and -0 differ; bf16 is shown by its value."""
    ours = {
        "a": torch.tensor([torch.nan, 0.0]),
        "b": torch.tensor([1.0, 2.0]).to(torch.bfloat16),
        "c": torch.tensor([torch.nan]),
    }
    theirs = {
        "a": torch.tensor([torch.nan, -0.0]),
        "b": torch.tensor([1.0, 3.0]).to(torch.bfloat16),
        "c": torch.tensor([torch.nan]),
    }
    found = different_tensors(saved(tmp_path / "x", [ours]), saved(tmp_path / "y", [theirs]))
    assert {each.name: each.first for each in found} == {
        "a": ("0.0 (0x00000000)", "-0.0 (0x80000000)"),
        "b": ("2.0 (0x4000)", "3.0 (0x4040)"),
    }


def test_other_tensors_cannot_be_compared(tmp_path: Path) -> None:
    ours = saved(tmp_path / "a", [{"w": WEIGHT}])
    for number, other in enumerate(({"w": WEIGHT.T.contiguous()}, {"w": WEIGHT, "v": WEIGHT}, {})):
        with pytest.raises(ValueError, match="same tensors"):
            different_tensors(ours, saved(tmp_path / f"b{number}", [other]))


def test_every_leaf_of_counters_is_compared() -> None:
    ours = {"steps": 4, "interval": [[1.5, 2], [2.5, 2]], "scale": None}
    theirs = {"steps": 4, "interval": [[1.5, 2], [2.25, 2]], "spikes": []}
    assert different_values(ours, theirs) == [
        "interval.1.0: 2.5, replay 2.25",
        "scale: None, replay absent",
        "spikes: absent, replay []",
    ]


def test_metrics_of_the_stretch_are_read_without_times(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", resume_step=0)
    for step in (2, 4, 6, 8):
        journal.append({"train/loss": step / 3, "vitals/images_per_s": 5.0}, step=step)
    journal.append({"val/top1": 0.75}, step=8)
    journal.append({"vitals/unreadable": 1.0}, step=9)
    journal.close()
    found = journal_metrics(journal.path, after=4, until=9)
    assert found == {6: {"train/loss": 2.0}, 8: {"train/loss": 8 / 3, "val/top1": 0.75}}
