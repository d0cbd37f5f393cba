"""Subsets and mixtures over real shard folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.config.errors import UserError
from vitscale.data.index import SplitIndex
from vitscale.data.index_keys import sample_keys
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import TrainingSet, open_training_set


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shard_folder(tmp_path_factory.mktemp("set") / "a", num_per_class=10, num_shards=3)


def opened(path: Path, **settings: object) -> TrainingSet:
    return open_training_set(
        DataSettings.model_validate({"path": str(path), "global_batch": 2, **settings}), seed=0
    )


def keys(index: SplitIndex) -> list[str]:
    return sample_keys(index, range(index.num_samples))


def test_a_part_is_the_first_stored_samples(shards: Path) -> None:
    whole, part = opened(shards), opened(shards, first_percent=33)
    assert part.num_samples == 7 and whole.num_samples == 20
    assert keys(part.parts[0]) == keys(whole.parts[0])[:7]
    assert sum(part.parts[0].shard_lengths) == 7
    assert part.fingerprint != whole.fingerprint


def test_a_class_filter_keeps_labels_and_places(shards: Path) -> None:
    whole, dogs = opened(shards), opened(shards, only_classes=["dog"])
    index, stored = dogs.parts[0], whole.parts[0]
    rows = np.flatnonzero(stored.label == 1)
    assert set(index.label.tolist()) == {1} and dogs.num_samples == 10
    assert dogs.classes == ("cat", "dog")
    assert keys(index) == [keys(stored)[i] for i in rows]
    np.testing.assert_array_equal(index.offset, stored.offset[rows])
    both = opened(shards, only_classes=["dog"], first_percent=50).parts[0]
    assert keys(both) == [keys(stored)[i] for i in rows if i < 10]


def test_a_mixture_names_all_its_parts(shards: Path, tmp_path: Path) -> None:
    other = write_shard_folder(tmp_path / "b", num_per_class=4, num_shards=1, seed=5)
    mixture = [{"path": str(other), "share": 0.25}]
    mixed = opened(shards, mixture=mixture)
    assert mixed.num_samples == 28 and mixed.order.shares == (750_000, 250_000)
    others = [
        opened(shards),
        opened(shards, mixture=[{"path": str(other), "share": 0.5}]),
        opened(shards, views=2),
        opened(shards, views=3),
        opened(other, mixture=[{"path": str(shards), "share": 0.25}]),
    ]
    assert len({mixed.fingerprint, *(each.fingerprint for each in others)}) == 6


def test_what_does_not_fit_is_refused(shards: Path, tmp_path: Path) -> None:
    other = write_shard_folder(
        tmp_path / "c", num_per_class=4, num_shards=1, classes=("cat", "owl")
    )
    with pytest.raises(UserError, match=r"(?s)mixture\[0\].*label map has 2 classes.*labels.space"):
        opened(shards, mixture=[{"path": str(other), "share": 0.5}])
    unlabelled = write_shard_folder(tmp_path / "d", num_per_class=4, num_shards=1, classes=())
    with pytest.raises(UserError, match="label map has no classes and differs .* has 2 classes"):
        opened(shards, mixture=[{"path": str(unlabelled), "share": 0.5}])
    with pytest.raises(UserError, match="data.only_classes: the shards of .* have no labels"):
        opened(unlabelled, only_classes=["dog"])
    with pytest.raises(UserError, match="no class 'dgo'; did you mean 'dog'"):
        opened(shards, only_classes=["dgo"])
