"""Which runs of a plan are done, by their folders alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from finetune.inference.settings import EvaluateRun
from launch.jobs.preparation import prepare_job
from launch.plans.record import read_record, recorded_jobs, write_record
from launch.plans.stages import Plan, Step
from launch.plans.states import check_unchanged, plan_states
from tests.support.corpora.small_shards import make_shard_folder
from tests.support.study_runs import chain_of, write_chain, write_training
from vitscale.config.errors import UserError


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    make_shard_folder(tmp_path / "shards", classes=("a", "b", "c", "d", "e"))
    return chain_of(write_chain(tmp_path))


def steps_of(chain: Plan, stage: str) -> tuple[Step, ...]:
    return next(each.steps for each in chain.stages if each.name == stage)


def train(chain: Plan, *stages: str) -> None:
    for stage in stages:
        for step in steps_of(chain, stage):
            assert step.training is not None and step.training.steps is not None
            write_training(step.training, step=step.training.steps)


def write_evaluation(step: Step) -> Path:
    assert isinstance(step.run, EvaluateRun)
    prepare_job(step.run, cluster="local")
    results = step.folder / "results.json"
    results.write_text("{}")
    return results


def texts(chain: Plan, stage: str) -> set[str]:
    states = plan_states(chain)
    return {states[step.name].text for step in steps_of(chain, stage)}


def test_a_run_is_done_when_its_folder_says_so(chain: Plan) -> None:
    assert texts(chain, "pretrain") == {"missing"}
    train(chain, "pretrain", "finetune")
    assert (
        texts(chain, "shards") == texts(chain, "pretrain") == texts(chain, "finetune") == {"done"}
    )
    assert texts(chain, "evaluate") == {"missing"}
    for step in steps_of(chain, "evaluate"):
        write_evaluation(step)
    assert texts(chain, "evaluate") == {"done"}


def test_an_evaluation_older_than_its_model_is_repeated(chain: Plan) -> None:
    train(chain, "pretrain", "finetune")
    step = steps_of(chain, "evaluate")[0]
    os.utime(write_evaluation(step), (1, 1))
    assert plan_states(chain)[step.name].text == "old"


def test_an_evaluation_with_other_settings_is_repeated(chain: Plan, tmp_path: Path) -> None:
    train(chain, "pretrain", "finetune")
    for step in steps_of(chain, "evaluate"):
        write_evaluation(step)
    path = tmp_path / "evaluate.yaml"
    path.write_text(path.read_text() + "init_weights: model\nlaunch: {nodes: 2}\n")
    changed = chain_of(tmp_path / "chain.yaml")
    assert texts(changed, "evaluate") == {"old"}


def test_a_training_with_other_settings_is_refused(chain: Plan, tmp_path: Path) -> None:
    train(chain, "pretrain")
    path = tmp_path / "pretrain.yaml"
    path.write_text(path.read_text().replace("0.001", "0.002"))
    with pytest.raises(UserError, match="optim.lr: trained with 0.001, now 0.002"):
        check_unchanged(plan_states(chain_of(tmp_path / "chain.yaml")))


def test_a_training_without_its_input_is_refused(chain: Plan) -> None:
    train(chain, "finetune")
    with pytest.raises(UserError, match="its input pretrain is missing or incomplete"):
        check_unchanged(plan_states(chain))


def test_shards_with_other_settings_are_refused(chain: Plan, tmp_path: Path) -> None:
    manifest = tmp_path / "shards/manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"config": {"seed": 9, "launch": {"nodes": 7}}}))
    with pytest.raises(UserError, match="(?s)shards: exists already.*seed: made with 9, now 0"):
        check_unchanged(plan_states(chain))


def test_the_record_is_read_back(chain: Plan) -> None:
    assert recorded_jobs(chain.folder) == {}
    write_record(chain, {"pretrain": "4711", "finetune/finetune_lr-0.01_seed3": "12_0"})
    stages = read_record(chain.folder).stages
    assert [stage.name for stage in stages] == [stage.name for stage in chain.stages]
    assert recorded_jobs(chain.folder)["pretrain"] == "4711"
    (chain.folder / "plan.json").write_text("{")
    with pytest.raises(UserError, match="plan.json: cannot be read"):
        read_record(chain.folder)
