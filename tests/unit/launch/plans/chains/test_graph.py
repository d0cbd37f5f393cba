"""Stages of a chain: order, names, inputs, and errors before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.run import FinetuneRun
from launch.plans.stages import Plan
from tests.support.study_runs import CHAIN, chain_of, write_chain
from vitscale.config.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folders(chain: Plan, stage: str) -> list[str]:
    return [str(step.folder) for each in chain.stages if each.name == stage for step in each.steps]


def test_stages_come_after_those_they_need(folder: Path) -> None:
    names = [stage.name for stage in chain_of(write_chain(folder)).stages]
    for before, after in [
        ("shards", "pretrain"),
        ("finetune", "evaluate"),
        ("pretrain", "finetune"),
    ]:
        assert names.index(before) < names.index(after)


def test_inputs_are_the_folders_of_stages(folder: Path) -> None:
    chain = chain_of(write_chain(folder))
    runs = [step.run for stage in chain.stages for step in stage.steps if stage.name == "finetune"]
    for run in runs:
        assert isinstance(run, FinetuneRun)
        assert (run.init, run.data.path) == ("runs/small/pretrain", "shards")


def test_a_sweep_is_a_run_for_each_combination(folder: Path) -> None:
    chain = chain_of(write_chain(folder))
    assert sorted(folders(chain, "finetune")) == [
        f"runs/small/finetune/finetune_lr-{lr}_seed{seed}"
        for lr in (0.001, 0.01)
        for seed in (3, 4)
    ]


def test_a_stage_runs_once_for_each_run_of_its_input(folder: Path) -> None:
    chain = chain_of(write_chain(folder))
    evaluations = [Path(path).name for path in folders(chain, "evaluate")]
    assert evaluations == [Path(path).name for path in folders(chain, "finetune")]


def test_a_transfer_runs_once_for_each_pretraining(folder: Path) -> None:
    text = CHAIN.replace(
        "inputs: {data.path: shards}}", "inputs: {data.path: shards}, sweep: {seed: [0, 1]}}"
    )
    chain = chain_of(write_chain(folder, text))
    assert len(folders(chain, "pretrain")) == 2
    assert len(folders(chain, "finetune")) == 8


def test_overrides_of_the_chain_reach_runs_that_have_the_key(folder: Path) -> None:
    path = write_chain(folder)
    chain = chain_of(path, "overrides=[launch.partition=fast,tracking.uri=null]")
    runs = {stage.name: stage.steps[0].run for stage in chain.stages}
    assert {run.launch.partition for run in runs.values()} == {"fast"}
    with pytest.raises(UserError, match="trakcing.uri=null: no stage has this key"):
        chain_of(path, "overrides=[trakcing.uri=null]")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("data.path: shards}}\n  - {name", "init: evaluate}}\n  - {name", "circle: .*evaluate"),
        ("init: finetune}", "init: finetuning}", "no stage 'finetuning'; did you mean"),
        ("name: evaluate,", "name: finetune,", "two stages have the name 'finetune'"),
        ("config: data.yaml", "config: date.yaml", "(?s)no file date.yaml.*did you mean.*shards"),
        ("[0.01, 0.001]", "[0.01, fast]", "(?s)optim.lr.*fast.*in: .*lr-fast"),
        ("overrides: [launch", "overrides: [name=x, launch", "name: the chain sets it itself"),
        ("data.path: shards, init: finetune", "init: shards", "init: stage shards is data_prep"),
        ("data.path: shards, init: pretrain", "data.path: pretrain", "stage pretrain is"),
        ("{optim.lr: [0.01, 0.001]", "{init: [a]", "init is given twice"),
    ],
)  # fmt: skip
def test_wrong_chains_are_refused(folder: Path, old: str, new: str, message: str) -> None:
    assert CHAIN.count(old) == 1
    path = write_chain(folder, CHAIN.replace(old, new))
    with pytest.raises(UserError, match=message):
        chain_of(path)
    assert not (folder / "runs").exists()


def test_a_step_on_several_nodes_has_the_tasks_of_all(folder: Path) -> None:
    path = write_chain(folder)
    overrides = "launch: {nodes: 2, tasks_per_node: 5}\n"
    (folder / "pretrain.yaml").write_text((folder / "pretrain.yaml").read_text() + overrides)
    chain = chain_of(path, cluster="slurm")
    assert {s.name: s.steps[0].num_tasks for s in chain.stages}["pretrain"] == 10
