"""What ranks share when a session opens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.data.settings import DataSettings
from vitscale.training import session


@pytest.mark.parametrize("reader", ["index", "webdataset"])
def test_each_reader_opens_what_is_evaluated(tmp_path: Path, reader: str) -> None:
    shards = write_shard_folder(tmp_path / "a", num_per_class=10, num_shards=2)
    whole = {"path": str(shards), "global_batch": 8, "reader": reader, "val_split": None}
    classes = ("cat", "dog")
    if reader == "webdataset":
        classes = ("0", "1")
        whole["webdataset"] = {"num_samples": 20, "num_classes": 2}

    def num_evaluated(**data: Any) -> int | None:
        run: Any = SimpleNamespace(data=DataSettings.model_validate(whole | data), seed=0)
        training_set, evaluated = session._read_index(run, check_files=True)
        assert training_set.num_samples == (18 if "dev_percent" in data else 20)
        assert training_set.classes == classes
        return None if evaluated is None else evaluated.num_samples

    assert num_evaluated() is None
    if reader == "index":
        assert num_evaluated(val_split="train") == 20
        assert num_evaluated(dev_percent=10.0) == 2
