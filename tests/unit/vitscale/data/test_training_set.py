"""Subsets and mixtures over real shard folders."""

from __future__ import annotations

import pickle
import shutil
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


@pytest.mark.parametrize(
    ("settings", "num_dev"),
    [
        ({}, 2),
        ({"first_percent": 50.0}, 1),
        ({"only_classes": ["dog"]}, 1),
        ({"first_percent": 50.0, "only_classes": ["dog"], "dev_percent": 40.0}, 2),
    ],
)
def test_dev_and_training_are_disjoint_and_complete(
    shards: Path, settings: dict[str, object], num_dev: int
) -> None:
    cut = opened(shards, **{"dev_percent": 10.0, **settings})
    uncut = opened(shards, **{**settings, "dev_percent": 0.0})
    assert cut.dev is not None and uncut.dev is None and cut.dev.num_samples == num_dev
    assert [*keys(cut.parts[0]), *keys(cut.dev)] == keys(uncut.parts[0])
    assert sum(cut.dev.shard_lengths) == num_dev
    assert cut.num_samples == uncut.num_samples - num_dev
    assert len({cut.fingerprint, uncut.fingerprint, cut.dev.fingerprint}) == 3


def test_a_cut_that_leaves_a_side_empty_is_refused(shards: Path) -> None:
    with pytest.raises(UserError, match="1 % of 20 training samples is 0, .* none to evaluate"):
        opened(shards, dev_percent=1.0)
    with pytest.raises(UserError, match=r"(?s)none to train on.*a share of 1 to 19 samples"):
        opened(shards, dev_percent=99.0)


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


def listed(path: Path, names: list[str]) -> str:
    path.write_text("".join(f"{name}\r\n" for name in names))
    return str(path)


def test_keys_choose_samples_and_leave_the_shards(shards: Path, tmp_path: Path) -> None:
    whole = opened(shards)
    names = keys(whole.parts[0])
    wanted = [names[12], names[3], names[3], names[7], "not there"]
    found = opened(shards, only_keys=listed(tmp_path / "keys.txt", wanted))
    assert keys(found.parts[0]) == [names[i] for i in (3, 7, 12)]
    index = found.parts[0]
    np.testing.assert_array_equal(index.label, whole.parts[0].label[[3, 7, 12]])
    # The same choice from another file is the same training set.
    again = opened(shards, only_keys=listed(tmp_path / "again.txt", wanted[:-1][::-1]))
    assert again.fingerprint == found.fingerprint != whole.fingerprint
    assert again.key_hash == found.key_hash is not None
    fewer = opened(shards, only_keys=listed(tmp_path / "fewer.txt", wanted[1:3]))
    assert keys(fewer.parts[0]) == [names[3]] and fewer.key_hash != found.key_hash
    half = opened(shards, only_keys=str(tmp_path / "keys.txt"), first_percent=50)
    assert keys(half.parts[0]) == [names[3], names[7]]


def test_a_file_without_a_known_key_is_one_error(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for path, match in (
        (listed(tmp_path / "x.txt", ["x"]), "none of the 20 samples .* such as 'x'"),
        (str(tmp_path / "missing.txt"), "data.only_keys: .*cannot be read"),
        (str(tmp_path / "binary.txt"), "cannot be read"),
    ):
        with pytest.raises(UserError, match=match):
            opened(shards, only_keys=path)


def test_one_rank_stats_the_shards(shards: Path, tmp_path: Path) -> None:
    """The others read the index alone, and pass it on."""
    folder = shutil.copytree(shards, tmp_path / "copy")
    for tar in folder.glob("*.tar"):
        tar.unlink()
    settings = DataSettings.model_validate({"path": str(folder), "global_batch": 2})
    with pytest.raises(UserError, match="missing"):
        open_training_set(settings, seed=0)
    unchecked = open_training_set(settings, seed=0, check_files=False)
    passed_on = pickle.loads(pickle.dumps(unchecked))
    assert passed_on.fingerprint == opened(shards).fingerprint
    assert [passed_on.order.at(i) for i in range(40)] == [unchecked.order.at(i) for i in range(40)]
