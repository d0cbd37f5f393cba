"""The README of a shard folder, and the training command that is printed for it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from data_prep.formats.index_files import CARD_NAME, training_command, write_card
from pretrain.run import PretrainRun
from tests.contract.tree import ROOT
from tests.support.corpora.shard_folders import make_shard_folder
from vitscale.config.loader import load_run
from vitscale.runs.training import training_plan

# Line separators of Unicode, what YAML takes for another value, and quotes.
AWKWARD = ["a\u2028b", "a\x85b", "no", "1", "", " x ", "\u00e9\U0001f600", "'\"", "- #"]


def test_class_names_of_a_card_are_read_back(tmp_path: Path) -> None:
    write_card(tmp_path, splits={}, classes=AWKWARD, formats=["png"])
    front = yaml.safe_load((tmp_path / CARD_NAME).read_text().split("---\n")[1])
    image, label, *_ = front["dataset_info"]["features"]
    assert image == {"name": "png", "dtype": "image"}
    assert list(label["dtype"]["class_label"]["names"].values()) == AWKWARD


@pytest.mark.parametrize("gpus, split", [(0, None), (1, "test"), (3, "val"), (8, "val")])
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
        at = words.index("--config") + 1
        assert words[at] == f"configs/{config}.yaml"
        run = load_run({"pretrain": PretrainRun}, ROOT / words[at], overrides=words[at + 1 :]).run
        assert isinstance(run, PretrainRun)
        assert run.data.path == "my shards" and run.data.val_split == split
        ranks = 2 if num == 40 else run.launch.tasks_per_node * run.launch.nodes
        ranks = {1: 1, 3: 2, 8: 8}.get(gpus, ranks)
        if gpus or num == 40:
            assert words[:4] == ["deepspeed", "--num_gpus", str(ranks), "pretrain/main.py"]
        else:
            assert words[:3] == ["python", "launch/slurm.py", "--dry-run"]
        assert training_plan(run, world_size=ranks, num_samples=num).total_steps >= 1000
        assert run.model.num_classes in (None, classes)
