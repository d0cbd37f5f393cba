"""Tars of shards, the README of a folder, and the training command printed for it."""

from __future__ import annotations

import shlex
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data_prep.formats.index_files import CARD_NAME, training_command, write_card
from data_prep.steps.list_inputs import hashed_key, make_key
from pretrain.run import PretrainRun
from tests.support.corpora.shard_folders import make_shard_folder
from vitscale.config.loader import load_run
from vitscale.data.tar_writer import MAX_MEMBER_BYTES, ustar_header
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.training import training_plan


@given(
    st.text("ABCxyz019_-.", min_size=1, max_size=100),
    st.integers(0, MAX_MEMBER_BYTES - 1),
)
def test_headers_are_those_of_the_standard_library(name: str, num_bytes: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = num_bytes, 0, 0o644
    assert ustar_header(name, num_bytes) == member.tobuf(tarfile.USTAR_FORMAT)


@given(
    st.text("aB9_", min_size=1, max_size=30), st.text("aB9_-", max_size=90), st.text()
)
def test_every_allowed_split_name_fits_the_longest_key(
    split: str, class_name: str, name: str
) -> None:
    run = {"source": {"path": "x", "holdout_split": split}, "output": "y"}
    problems = [key for key, _ in DataPrepRun.model_validate(run).problems()]
    assert (problems == ["source.holdout_split"]) == (len(split) > 24)
    longest = hashed_key(100 * "x", "path")
    for key in (make_key(class_name, name, path="path"), longest):
        if not problems:
            assert ustar_header(f"{split}-{key}.webp", 1)
            assert len(f"{split}-{key}") <= 95
    assert len(longest) == 70


# Line separators of Unicode, what YAML takes for another value, and quotes.
AWKWARD = ["a\u2028b", "a\x85b", "no", "1", "", " x ", "\u00e9\U0001f600", "'\"", "- #"]


def test_class_names_of_a_card_are_read_back(tmp_path: Path) -> None:
    write_card(tmp_path, splits={}, classes=AWKWARD, formats=["png"])
    front = yaml.safe_load((tmp_path / CARD_NAME).read_text().split("---\n")[1])
    image, label, *_ = front["dataset_info"]["features"]
    assert image == {"name": "png", "dtype": "image"}
    assert list(label["dtype"]["class_label"]["names"].values()) == AWKWARD


@pytest.mark.parametrize(
    "gpus, split", [(0, None), (1, "test"), (3, "val"), (8, "val")]
)
def test_the_recipe_fits_the_corpus_and_the_machine(
    gpus: int, split: str | None, tmp_path: Path
) -> None:
    made = make_shard_folder(tmp_path / "shards")
    for num, classes, config in [
        (40, 10, "digits/pretrain"),
        (1_281_167, 365, "deit/s16"),
        (12_400_000, 21_841, "vit_b16"),
        (400_000, 0, "mae/b16"),
    ]:
        splits = {"train": replace(made.splits["train"], num_samples=num)}
        splits |= {split: made.splits["test"]} if split else {}
        facts = replace(made, splits=splits, classes=tuple(map(str, range(classes))))
        words = shlex.split(training_command(Path("my shards"), facts, gpus=gpus))
        assert words[2] == config
        remote = training_command(
            Path("my shards"), replace(facts, shards_root="s3://b"), gpus=1
        )
        assert remote.endswith(" data.remote.cache_path=FOLDER")
        overrides = words[5 if words[3] == "--num-procs" else 4 :]
        run = load_run({"pretrain": PretrainRun}, words[2], overrides=overrides).run
        assert isinstance(run, PretrainRun)
        assert run.data.path == "my shards" and run.data.val_split == split
        ranks = 2 if num == 40 else run.launch.tasks_per_node * run.launch.nodes
        ranks = {1: 1, 3: 2, 8: 8}.get(gpus, ranks)
        if gpus or num == 40:
            assert words[:5] == [
                "vitscale",
                "pretrain",
                config,
                "--num-procs",
                str(ranks),
            ]
        else:
            assert words[:4] == ["vitscale", "launch", config, "--dry-run"]
        assert training_plan(run, world_size=ranks, num_samples=num).total_steps >= 1000
        assert run.model.num_classes in (None, classes)
