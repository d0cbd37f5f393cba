"""Which runs of a chain are done, by their folders alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from finetune.settings import EvaluateRun
from launch.chains.load import Chain, ChainStep
from launch.chains.states import chain_states, check_unchanged
from launch.jobs.preparation import prepare_job
from tests.support.chain_runs import chain_of, steps_of, write_chain, write_training
from tests.support.corpora.small_shards import make_shard_folder
from vitscale.config.errors import UserError


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    monkeypatch.chdir(tmp_path)
    make_shard_folder(tmp_path / "shards", classes=("a", "b", "c", "d", "e"))
    return chain_of(write_chain(tmp_path))


def train(chain: Chain, *stages: str) -> None:
    for stage in stages:
        for step in steps_of(chain, stage):
            write_training(step, at=20)


def write_evaluation(step: ChainStep) -> Path:
    assert isinstance(step.run, EvaluateRun)
    prepare_job(step.run, cluster="local")
    results = step.folder / "results.json"
    results.write_text("{}")
    return results


def texts(chain: Chain, stage: str) -> set[str]:
    states = chain_states(chain)
    return {states[step.name].text for step in steps_of(chain, stage)}


def test_a_run_is_done_when_its_folder_says_so(chain: Chain) -> None:
    assert texts(chain, "shards") == {"done"} and texts(chain, "pretrain") == {"missing"}
    write_training(steps_of(chain, "pretrain")[0], at=7)
    assert texts(chain, "pretrain") == {"resumable (step 7)"}
    train(chain, "pretrain", "finetune")
    assert texts(chain, "pretrain") == texts(chain, "finetune") == {"done"}
    assert texts(chain, "evaluate") == {"missing"}
    for step in steps_of(chain, "evaluate"):
        write_evaluation(step)
    assert texts(chain, "evaluate") == {"done"}


def test_a_damaged_checkpoint_does_not_count(chain: Chain) -> None:
    train(chain, "pretrain")
    folder = steps_of(chain, "pretrain")[0].folder / "checkpoints/step-00000020"
    next(folder.glob("*.safetensors")).write_bytes(b"cut")
    assert texts(chain, "pretrain") == {"missing"}


def test_an_evaluation_older_than_its_model_is_repeated(chain: Chain) -> None:
    train(chain, "pretrain", "finetune")
    step = steps_of(chain, "evaluate")[0]
    os.utime(write_evaluation(step), (1, 1))
    assert chain_states(chain)[step.name].text == "old"


def test_an_evaluation_with_other_settings_is_repeated(chain: Chain, tmp_path: Path) -> None:
    train(chain, "pretrain", "finetune")
    for step in steps_of(chain, "evaluate"):
        write_evaluation(step)
    path = tmp_path / "evaluate.yaml"
    path.write_text(path.read_text() + "init_weights: model\nlaunch: {nodes: 2}\n")
    assert texts(chain_of(tmp_path / "chain.yaml"), "evaluate") == {"old"}


def test_a_training_with_other_settings_is_refused(chain: Chain, tmp_path: Path) -> None:
    train(chain, "pretrain")
    path = tmp_path / "pretrain.yaml"
    path.write_text(path.read_text().replace("0.001", "0.002"))
    with pytest.raises(
        UserError, match=r"(?s)trained to step 20.*lr: trained with 0.001, now 0.002"
    ):
        check_unchanged(chain_states(chain_of(tmp_path / "chain.yaml")))
    path.write_text("stage: pretrain\nnew_key: 1\n")
    config = steps_of(chain, "pretrain")[0].folder / "config.yaml"
    config.write_text("stage: pretrain\nnew_key: 1\n")
    assert texts(chain, "pretrain") == {"changed"}


def test_settings_without_effect_may_change(chain: Chain, tmp_path: Path) -> None:
    train(chain, "pretrain")
    changes = (
        "launch.timeout_min=7, checkpoint.every_steps=9, tracking.uri=null, data.num_workers=0, "
        "engine.num_threads=1"
    )
    path = tmp_path / "chain.yaml"
    assert texts(chain_of(path, f"overrides=[{changes}]"), "pretrain") == {"done"}


def test_a_training_without_its_input_is_refused(chain: Chain) -> None:
    """A pre-training that is repeated may end with other weights than the transfer had."""
    train(chain, "finetune")
    with pytest.raises(UserError, match="starts from is missing or incomplete: shards, pretrain"):
        check_unchanged(chain_states(chain))


def test_shards_with_other_settings_are_refused(chain: Chain, tmp_path: Path) -> None:
    manifest = tmp_path / "shards/manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"config": {"seed": 9, "launch": {"nodes": 7}}}))
    with pytest.raises(UserError, match="(?s)shards: exists already.*seed: made with 9, now 0"):
        check_unchanged(chain_states(chain))
