"""Tars of shards, the README of a folder, and the training command printed for it."""

from __future__ import annotations

import shlex
import tarfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from data_prep.formats.index_files import CARD_NAME, next_step, write_card
from data_prep.steps.list_inputs import hashed_key, make_key
from pretrain.run import PretrainRun
from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.tables import rows
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


def suited(
    folder: Path,
    *,
    side: int,
    num: int = 2000,
    num_classes: int = 4,
    gpus: int = 0,
    held_out: str | None = "test",
    root: str = ".",
) -> tuple[list[str], str]:
    """The words of the command for images of this short side, and what is said of it."""
    made = make_shard_folder(folder / "made")
    sizes = {"width": [900, side, side], "height": [900, 2 * side, side + 1]}
    (folder / "my shards").mkdir()
    pq.write_table(pa.table(sizes), folder / "my shards/index.parquet")
    splits = {"train": replace(made.splits["train"], num_samples=num)}
    splits |= {held_out: made.splits["test"]} if held_out else {}
    classes = tuple(map(str, range(num_classes)))
    facts = replace(made, splits=splits, classes=classes, shards_root=root)
    command, _, note = next_step(folder / "my shards", facts, gpus=gpus).partition("\n")
    program, *words = shlex.split(command)
    assert program == "vitscale"
    return words, note


@rows("""
- [num, num_classes, config, least]
- [40, 10, digits/pretrain, 2]
- [1281167, 365, deit/s16, 8]
- [12400000, 21841, vit_b16, 64]
- [400000, 0, mae/b16, 64]
""")
@pytest.mark.parametrize(
    "gpus, split", [(0, None), (1, "test"), (3, "val"), (8, "val")]
)
def test_the_recipe_fits_the_corpus_and_the_machine(
    num: int,
    num_classes: int,
    config: str,
    least: int,
    gpus: int,
    split: str | None,
    tmp_path: Path,
) -> None:
    sizes = {"num": num, "num_classes": num_classes, "side": 32, "held_out": split}
    words, _ = suited(tmp_path, gpus=gpus, **sizes)
    is_small = config == "digits/pretrain"
    ranks = {0: 2, 1: 1, 3: 2, 8: 8}[gpus]
    start = ["pretrain", config, "--num-procs", str(ranks)]
    if not gpus and not is_small:
        start = ["launch", config, "--dry-run"]
    assert words[: len(start)] == start
    run = load_run(PretrainRun, config, overrides=words[len(start) :]).run
    assert run.data.path == str(tmp_path / "my shards")
    assert run.data.val_split == split
    if not gpus and not is_small:
        ranks = run.launch.num_ranks
    assert training_plan(run, world_size=ranks, num_samples=num).total_steps >= 1000
    assert run.model.num_classes in (None, num_classes)


@rows("""
- [side, num, gpus, start]
- [95, 2000, 1, pretrain digits/pretrain --num-procs 1]
- [96, 2000, 1, finetune own --num-procs 1]
- [300, 2000, 3, finetune own --num-procs 2]
- [300, 2000, 0, evaluate own_features]
- [300, 50100, 8, pretrain deit/s16 --num-procs 8]
""")
def test_few_photographs_get_published_weights(
    side: int, num: int, gpus: int, start: str, tmp_path: Path
) -> None:
    words, note = suited(tmp_path, side=side, num=num - 24, gpus=gpus)
    assert " ".join(words).startswith(f"{start} data.path=")
    published = "init=timm/vit_small_patch16_224.augreg_in21k"
    assert (published in words) == ("own" in start) == ("fetched once" in note)
    assert ("docs/own_images.md" in note) == (num <= 50_000)


@rows("""
- [side, given]
- [8, []]
- [32, []]
- [33, [model.image_size=32, data.horizontal_flip=true]]
""")
def test_small_images_get_a_small_model(
    side: int, given: list[str], tmp_path: Path
) -> None:
    words, note = suited(tmp_path, side=side)
    sizes = [w for w in words if w.startswith(("model.image", "data.horizontal"))]
    assert sizes == given and "random weights" in note


def test_shards_at_a_url_need_a_cache(tmp_path: Path) -> None:
    words, _ = suited(tmp_path, side=32, root="s3://bucket")
    assert words[-1] == "data.remote.cache_path=FOLDER"
