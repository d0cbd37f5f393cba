"""Features are extracted once, also across kills and damaged files of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine.array_subject import array_subject, split_of
from vitscale.config.errors import UserError
from vitscale.evaluation.features.cache import FeatureCache
from vitscale.evaluation.features.rows import owners
from vitscale.evaluation.features.store import FeatureStore

pytestmark = pytest.mark.usefixtures("group")
PER_FILE = 8


def train_split() -> Any:
    values = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    return split_of(values, [number % 3 for number in range(30)], name="train")


def cached(folder: Path, messages: list[str], *, weights: str = "a") -> FeatureStore:
    return FeatureStore(
        FeatureCache(
            folder,
            made_by={"weights": weights},
            images_per_file=PER_FILE,
            say=messages.append,
        )
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_samples_are_extracted_once_whoever_asks() -> None:
    split = train_split()
    subject = array_subject(split, split)
    some = subject.train_features(samples=np.array([3, 5, 17]))
    assert torch.equal(some.values_ND, split.features[[3, 5, 17]])
    assert some.labels_N.tolist() == [0, 2, 2]
    every = subject.train_features()
    assert torch.equal(every.values_ND, split.features)
    subject.train_features(samples=np.array([0, 29]))
    assert [len(each) for each in subject.extracted] == [3, 27]
    subject.features.forget()
    subject.train_features()
    assert len(subject.extracted[-1]) == 30


def test_parts_of_a_training_set_are_numbered_through() -> None:
    split, other = train_split(), split_of(torch.ones(4, 5), [2, 1, 0, 2], name="other")
    subject = array_subject((split, other), other)
    found = subject.train_features(samples=np.array([29, 30, 32]))
    assert found.samples.tolist() == [29, 30, 32]
    assert found.labels_N.tolist() == [2, 2, 0]
    assert torch.equal(found.values_ND[1:], torch.ones(2, 5))


def test_a_killed_extraction_resumes_with_missing_blocks(tmp_path: Path) -> None:
    split, messages = train_split(), list[str]()
    killed = array_subject(split, split, store=cached(tmp_path, messages), ends_after=5)
    with pytest.raises(InterruptedError):
        killed.train_features()
    assert len(files(tmp_path)) == 2  # of 20 samples, 16 in whole blocks
    again = array_subject(split, split, store=cached(tmp_path, messages))
    found = again.train_features()
    assert torch.equal(found.values_ND, split.features)
    assert [each.tolist() for each in again.extracted] == [list(range(16, 30))]
    assert messages[0].startswith("16 of 30 features")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_a_damaged_block_is_made_again(tmp_path: Path, damage: str) -> None:
    split, messages = train_split(), list[str]()
    array_subject(split, split, store=cached(tmp_path, messages)).train_features()
    path = files(tmp_path)[1]
    data = path.read_bytes()
    path.write_bytes(
        {
            "truncated": data[:-3],
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "empty": b"",
            "text": b"not tensors at all",
        }[damage]
    )
    again = array_subject(split, split, store=cached(tmp_path, messages))
    found = again.train_features()
    assert torch.equal(found.values_ND, split.features)
    assert [each.tolist() for each in again.extracted] == [list(range(8, 16))]
    assert any("damaged" in message for message in messages)
    assert path.read_bytes() == data


def test_a_later_request_completes_a_block(tmp_path: Path) -> None:
    split, messages = train_split(), list[str]()
    for samples in ([1, 9], [0, 1, 10], list(range(30))):
        subject = array_subject(split, split, store=cached(tmp_path, messages))
        subject.train_features(samples=np.array(samples))
    assert [each.tolist() for each in subject.extracted] == [[*range(2, 9), *range(11, 30)]]
    last = array_subject(split, split, store=cached(tmp_path, messages))
    last.train_features()
    assert last.extracted == []


def test_other_weights_do_not_share_features(tmp_path: Path) -> None:
    split, messages = train_split(), list[str]()
    for weights in "ab":
        subject = array_subject(split, split, store=cached(tmp_path, messages, weights=weights))
        subject.train_features()
        assert len(subject.extracted) == 1


def test_a_cache_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"features\.cache"):
        cached(tmp_path / "file", [])


def test_any_choice_of_samples_is_spread_over_ranks() -> None:
    for step in (1, 2, 7):
        counts = np.bincount(owners(np.arange(0, 6000 * step, step), world_size=4))
        assert len(counts) == 4 and counts.min() > 1350
