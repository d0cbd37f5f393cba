"""The plan that a dry run shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.settings import EvaluateRun
from launch.planning.dry_run import batch_script, check_data, data_facts, describe, plan_rows
from pretrain.run import PretrainRun
from tests.contract.tree import ROOT
from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run
from vitscale.data.index import read_split
from vitscale.data.index_keys import sample_keys
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.evaluation.knn import KnnSettings


def plan(**changes: object) -> dict[str, str]:
    sections: dict[str, object] = {
        "data": {"path": "shards", "global_batch": 64, "planned_num_samples": 1000},
        "model": {"preset": "Ti/16", "num_classes": 10},
        "optim": {"lr": 1e-3},
        "schedule": {"steps": 100, "warmup_steps": 10},
    }
    return dict(plan_rows(PretrainRun.model_validate({"name": "x", **sections, **changes})))


def check(run: PretrainRun) -> None:
    check_data(run, data_facts(run))


def test_objective_and_evaluations_are_named() -> None:
    evaluate = [{"name": "knn", "every_steps": 2000}, {"name": "classification"}]
    rows = plan(evaluate=evaluate)
    assert rows["objective"] == "supervised"
    assert rows["evaluation"] == (
        "knn every 2,000 steps, classification; all after the last step, on 'test'"
    )
    assert plan(evaluate=[])["evaluation"] == "none"
    data = {"path": "shards", "global_batch": 64, "val_split": None}
    assert plan(data=data)["evaluation"] == "none, because data.val_split is null"


def test_unknown_values_name_the_missing_setting() -> None:
    rows = plan(
        data={"path": "shards", "global_batch": 64},
        model={"preset": "Ti/16"},
        schedule={"epochs": 10, "warmup_steps": 5},
    )
    assert "data.planned_num_samples" in rows["schedule"]
    assert "model.num_classes" in rows["model"]


def test_a_large_run_has_a_plan() -> None:
    run = load_run({"pretrain": PretrainRun}, ROOT / "configs/vit_b16.yaml").run
    rows = dict(plan_rows(run))
    assert rows["model"].startswith("103,186,515")
    assert rows["steps"].startswith("272,460 steps")


def test_shards_without_labels_are_named_and_checked(tmp_path: Path) -> None:
    shards = write_shard_folder(tmp_path / "s", num_per_class=8, num_shards=1, classes=())
    sections = {
        "name": "x",
        "data": {"path": str(shards), "global_batch": 4},
        "model": {"preset": "Ti/16"},
        "optim": {"lr": 1e-3},
        "schedule": {"steps": 100, "warmup_steps": 10},
    }
    masked = {"name": "masked_patch_prediction"}
    run = PretrainRun.model_validate({**sections, "objective": masked})
    rows = dict(plan_rows(run))
    assert rows["data"].startswith("8 training images without labels, from ")
    assert rows["model"].endswith(", no classes")
    check(run)
    with pytest.raises(UserError, match="supervised needs labels"):
        check(PretrainRun.model_validate(sections))
    with pytest.raises(UserError, match="knn needs labels"):
        check(run.model_copy(update={"evaluate": (KnnSettings(),)}))


def test_the_cut_for_choosing_is_counted_exactly(tmp_path: Path) -> None:
    """1 % of ImageNet as in the ViT paper's code; with classes left out, by the index."""
    data = {"path": "shards", "global_batch": 64, "planned_num_samples": 1_281_167}
    rows = plan(data=data | {"dev_percent": 1.0, "val_split": None})
    assert rows["data"].startswith("1,268,355 training images without 12,812 held out, from ")
    assert rows["evaluation"].endswith("on the last 1 % of 'train' (12,812 images)")
    shards = write_shard_folder(tmp_path / "s", num_per_class=8, num_shards=1)
    data = {"path": str(shards), "global_batch": 2, "dev_percent": 25.0, "only_classes": ["dog"]}
    assert plan(data=data)["data"].startswith("6 training images without 2 held out, from ")
    data["dev_percent"] = 1.0
    with pytest.raises(UserError, match=r"data.dev_percent: 1 % of 8 training samples is 0"):
        plan(data=data)


def test_samples_chosen_by_key_are_counted(tmp_path: Path) -> None:
    shards = write_shard_folder(tmp_path / "s", num_per_class=8, num_shards=1)
    names = sample_keys(read_split(shards, split="train"), range(3))
    (tmp_path / "keys.txt").write_text("\n".join([*names, "unknown"]))
    data = {"path": str(shards), "global_batch": 2, "only_keys": f"{tmp_path}/keys.txt"}
    rows = plan(data=data)
    assert rows["data"].startswith("3 training images, from ")
    expected = "3 of 16 samples by 4 keys; 1 keys are not in 'train', "
    assert rows["keys"] == expected + f"{tmp_path}/keys.txt"


def test_every_source_of_a_mixture_is_counted(tmp_path: Path) -> None:
    """As many as the loader opens, with what `first_percent` and a cut leave of the first."""
    shards = write_shard_folder(tmp_path / "s", num_per_class=8, num_shards=1)
    other = write_shard_folder(tmp_path / "o", num_per_class=10, num_shards=1)
    mixture = [{"path": str(other), "share": 0.25}, {"path": str(other), "share": 0.25}]
    data = {"path": str(shards), "global_batch": 2, "dev_percent": 25.0, "mixture": mixture}
    data["first_percent"] = 75.0
    text = f"from data.first_percent=75 of {shards}/manifest.json and data.mixture"
    assert plan(data=data)["data"] == f"49 training images without 3 held out, {text}"
    opened = open_training_set(DataSettings.model_validate(data), seed=0)
    assert opened.num_samples == 9 + 20 + 20
    mixture[0]["path"] = f"{tmp_path}/elsewhere"
    assert plan(data=data)["data"].startswith("unknown number of training images")
    sections = {"model": {"preset": "Ti/16"}, "optim": {"lr": 1e-3}, "schedule": {"steps": 9}}
    run = PretrainRun.model_validate({"name": "x", "data": data} | sections)
    with pytest.raises(UserError, match=r"data.mixture\[0\].path: no shards in .*elsewhere"):
        check_data(run, data_facts(run))


def test_an_evaluation_can_be_submitted() -> None:
    overrides = ["launch.tasks_per_node=2"]
    run = load_run(EvaluateRun, ROOT / "configs/eval/demo.yaml", overrides=overrides).run
    assert "evaluation  classification, knn" in describe(run)
    script = batch_script(run)
    assert "#SBATCH --ntasks-per-node=2" in script
    assert "#SBATCH --job-name=demo-evaluation" in script
