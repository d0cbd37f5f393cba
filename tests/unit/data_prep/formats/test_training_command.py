"""The command that is printed for new shards fits them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from data_prep.formats.index_files import training_command
from pretrain.run import PretrainRun
from tests.contract.tree import ROOT
from vitscale.config.loader import load_run
from vitscale.data.index import FORMAT_VERSION, Manifest, SplitEntry
from vitscale.runs.training import training_plan


def manifest(num: int, *, classes: int, split: str | None = "val") -> Manifest:
    sizes = {"train": num} | ({split: max(1, num // 25)} if split else {})
    entry = {"num_bytes": 1, "fingerprint": "0", "shards": ()}
    return Manifest(
        format_version=FORMAT_VERSION,
        tool_version="",
        fingerprint="0",
        source_fingerprint="0",
        label_map_sha256="0",
        classes=tuple(map(str, range(classes))),
        index_bytes=1,
        index_blake3="0",
        splits={name: SplitEntry(num_samples=size, **entry) for name, size in sizes.items()},
        inputs={},
        config={},
    )


@pytest.mark.parametrize("gpus", [0, 1, 3, 8])
@pytest.mark.parametrize(
    "num, classes, config",
    [
        (40, 10, "digits/pretrain"),
        (4_000, 10, "digits/pretrain"),
        (1_281_167, 1000, "deit/s16"),
        (1_281_167, 365, "deit/s16"),
        (12_400_000, 21_841, "vit_b16"),
        (400_000, 0, "mae/b16"),
    ],
)
def test_the_recipe_fits_the_corpus_and_the_machine(
    num: int, classes: int, config: str, gpus: int
) -> None:
    split = {0: None, 1: "test"}.get(gpus, "val")
    facts = manifest(num, classes=classes, split=split)
    words = shlex.split(training_command(Path("my shards"), facts, gpus=gpus))
    at = words.index("--config") + 1
    assert words[at] == f"configs/{config}.yaml"
    run = load_run({"pretrain": PretrainRun}, ROOT / words[at], overrides=words[at + 1 :]).run
    assert isinstance(run, PretrainRun)
    assert run.data.path == "my shards" and run.data.val_split == split
    ranks = 2 if config == "digits/pretrain" else run.launch.tasks_per_node * run.launch.nodes
    if gpus:
        ranks = {1: 1, 3: 2, 8: 8}[gpus]
    if gpus or config == "digits/pretrain":
        assert words[:4] == ["deepspeed", "--num_gpus", str(ranks), "pretrain/main.py"]
    else:
        assert words[:3] == ["python", "launch/slurm.py", "--dry-run"]
    assert training_plan(run, world_size=ranks, num_samples=num).total_steps >= 1000
    assert run.model.num_classes in (None, classes)
