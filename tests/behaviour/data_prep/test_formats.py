"""Tars of shards, the README of a folder, and the training command printed for it."""

import shlex
import tarfile
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
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

NAMES = st.text("ABCxyz019_-.", min_size=1, max_size=100)
SIZES = st.integers(0, MAX_MEMBER_BYTES - 1)


@given(NAMES, SIZES)
def test_headers_are_those_of_the_standard_library(name, num_bytes):
    member = tarfile.TarInfo(name)
    member.size = num_bytes

    # Neither depends on the machine or the day: equal inputs give equal tars.
    member.mtime = 0
    member.mode = 0o644
    assert ustar_header(name, num_bytes) == member.tobuf(tarfile.USTAR_FORMAT)


@given(
    st.text("aB9_", min_size=1, max_size=30),
    st.text("aB9_-", max_size=90),
    st.text(),
)
def test_every_allowed_split_name_fits_the_longest_key(split, class_name, name):
    source = {"path": "x", "holdout_split": split}
    run = DataPrepRun.model_validate({"source": source, "output": "y"})
    problems = [key for key, _ in run.problems()]
    is_too_long = len(split) > 24
    assert (problems == ["source.holdout_split"]) == is_too_long

    # A name of a tar member has at most 100 bytes, with split, key and suffix.
    longest = hashed_key(100 * "x", "path")
    assert len(longest) == 70
    if problems:
        return
    for key in (make_key(class_name, name, path="path"), longest):
        full_key = f"{split}-{key}"
        assert ustar_header(f"{full_key}.webp", 1)
        assert len(full_key) <= 95


# Line separators of Unicode, what YAML takes for another value, and quotes.
AWKWARD = ["a\u2028b", "a\x85b", "no", "1", "", " x ", "\u00e9\U0001f600", "'\"", "- #"]


def test_class_names_of_a_card_are_read_back(tmp_path):
    write_card(tmp_path, splits={}, classes=AWKWARD, formats=["png"])
    text = (tmp_path / CARD_NAME).read_text()

    # YAML between two lines of dashes, before the text of the card.
    front = yaml.safe_load(text.split("---\n")[1])
    image, label, *_ = front["dataset_info"]["features"]
    assert image == {"name": "png", "dtype": "image"}
    names = label["dtype"]["class_label"]["names"]
    assert list(names.values()) == AWKWARD


def suited(folder, *, side, num=2000, num_classes=4, gpus=0, held_out="test", root="."):
    """The words of the command for images of this short side, and what is said of it."""
    made = make_shard_folder(folder / "made")
    shards = folder / "my shards"
    shards.mkdir()

    # Widths and heights are all that is read of an index; the median short side is `side`.
    sizes = {"width": [900, side, side], "height": [900, 2 * side, side + 1]}
    pq.write_table(pa.table(sizes), shards / "index.parquet")
    splits = {"train": replace(made.splits["train"], num_samples=num)}
    if held_out:
        splits[held_out] = made.splits["test"]
    classes = tuple(map(str, range(num_classes)))
    facts = replace(
        made,
        splits=splits,
        classes=classes,
        shards_root=root,
    )

    # The space in the folder's name must survive a shell.
    command, _, note = next_step(shards, facts, gpus=gpus).partition("\n")
    program, *words = shlex.split(command)
    assert program == "vitscale"
    return words, note


# Corpora of the sizes of scikit-learn's digits, ImageNet and ImageNet-21k, and one without labels.
@rows("""
- [num, num_classes, config, least]
- [40, 10, digits/pretrain, 2]
- [1281167, 365, deit/s16, 8]
- [12400000, 21841, vit_b16, 64]
- [400000, 0, mae/b16, 64]
""")
@rows("""
- [gpus, split]
- [0, null]
- [1, test]
- [3, val]
- [8, val]
""")
def test_the_recipe_fits_the_corpus_and_the_machine(
    num, num_classes, config, least, gpus, split, tmp_path
):
    sizes = {
        "num": num,
        "num_classes": num_classes,
        "side": 32,
        "held_out": split,
    }
    words, _ = suited(tmp_path, gpus=gpus, **sizes)

    # Two processes share a CPU; three GPUs would not divide the batch.
    ranks = {0: 2, 1: 1, 3: 2, 8: 8}[gpus]
    start = ["pretrain", config, "--num-procs", str(ranks)]
    is_only_planned = not gpus and config != "digits/pretrain"
    if is_only_planned:
        start = ["launch", config, "--dry-run"]
    assert words[: len(start)] == start

    # The command as its script reads it.
    run = load_run(PretrainRun, config, overrides=words[len(start) :]).run
    assert run.data.path == str(tmp_path / "my shards")
    assert run.data.val_split == split
    if is_only_planned:
        ranks = run.launch.num_ranks
    plan = training_plan(run, world_size=ranks, num_samples=num)
    assert plan.total_steps >= 1000
    assert run.model.num_classes in (None, num_classes)


# Below and above 96 px; without a GPU only the features; and too many to be few.
@rows("""
- [side, num, gpus, start]
- [95, 2000, 1, pretrain digits/pretrain --num-procs 1]
- [96, 2000, 1, finetune own --num-procs 1]
- [300, 2000, 3, finetune own --num-procs 2]
- [300, 2000, 0, evaluate own_features]
- [300, 50100, 8, pretrain deit/s16 --num-procs 8]
""")
def test_few_photographs_get_published_weights(side, num, gpus, start, tmp_path):
    words, note = suited(
        tmp_path,
        side=side,
        num=num - 24,
        gpus=gpus,
    )
    assert " ".join(words).startswith(f"{start} data.path=")
    published = "init=timm/vit_small_patch16_224.augreg_in21k"
    uses_published = "own" in start
    assert (published in words) == uses_published
    assert ("fetched once" in note) == uses_published
    is_small = num <= 50_000
    assert ("docs/own_images.md" in note) == is_small


# Up to 32 px the recipe of the digits fits as it is.
@rows("""
- [side, given]
- [8, []]
- [32, []]
- [33, [model.image_size=32, data.horizontal_flip=true]]
""")
def test_small_images_get_a_small_model(side, given, tmp_path):
    words, note = suited(tmp_path, side=side)
    changed = ("model.image", "data.horizontal")
    sizes = [word for word in words if word.startswith(changed)]
    assert sizes == given
    assert "random weights" in note


def test_shards_at_a_url_need_a_cache(tmp_path):
    words, _ = suited(tmp_path, side=32, root="s3://bucket")
    assert words[-1] == "data.remote.cache_path=FOLDER"
