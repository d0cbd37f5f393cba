"""Runs of a chain: order, names, inputs, tags, and errors before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.run import FinetuneRun
from launch.chains.load import Chain
from tests.contract.tree import ROOT
from tests.support.chain_runs import CHAIN, chain_of, steps_of, write_chain
from vitscale.config.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folders(chain: Chain, stage: str) -> list[str]:
    return [str(step.folder) for step in steps_of(chain, stage)]


def test_runs_come_after_those_they_need(folder: Path) -> None:
    before: set[str] = set()
    for step in chain_of(write_chain(folder)).steps:
        assert set(step.needs) <= before
        before.add(step.name)
    assert len(before) == 10


def test_inputs_are_the_folders_of_stages(folder: Path) -> None:
    for step in steps_of(chain_of(write_chain(folder)), "finetune"):
        assert isinstance(step.run, FinetuneRun)
        assert (step.run.init, step.run.data.path) == ("runs/small/pretrain", "shards")
        assert step.needs == ("shards", "pretrain")


def test_a_sweep_is_a_run_for_each_combination(folder: Path) -> None:
    chain = chain_of(write_chain(folder))
    assert folders(chain, "finetune") == [
        f"runs/small/finetune/lr-{lr}_seed-{seed}" for lr in (0.01, 0.001) for seed in (3, 4)
    ]
    last = steps_of(chain, "finetune")[-1].run
    assert isinstance(last, FinetuneRun) and (last.optim.lr, last.seed) == (0.001, 4)
    assert last.tracking.tags == {
        "chain": "small", "chain.stage": "finetune",
        "chain.finetune.optim.lr": "0.001", "chain.finetune.seed": "4",
    }  # fmt: skip


def test_a_stage_runs_once_for_each_run_of_its_input(folder: Path) -> None:
    chain = chain_of(write_chain(folder))
    evaluations, tuned = steps_of(chain, "evaluate"), steps_of(chain, "finetune")
    assert [Path(e.folder).name for e in evaluations] == [Path(t.folder).name for t in tuned]
    assert [e.needs for e in evaluations] == [("shards", t.name) for t in tuned]


def test_a_transfer_has_the_seed_and_the_tags_of_its_pretraining(folder: Path) -> None:
    text = CHAIN.replace(
        "inputs: {data.path: shards}}",
        "inputs: {data.path: shards}, sweep: {data.first_percent: [1, 10], seed: [7]}}",
    )
    text = text.replace("    sweep: {optim.lr: [0.01, 0.001], seed: [3, 4]}\n", "")
    steps = steps_of(chain_of(write_chain(folder, text)), "finetune")
    assert [step.name for step in steps] == [
        f"finetune/first-percent-{share}_seed-7" for share in (1, 10)
    ]
    for step, share in zip(steps, ("1", "10"), strict=True):
        assert isinstance(step.run, FinetuneRun) and step.run.seed == 7
        assert step.run.data.first_percent == 100
        assert step.run.tracking.tags["chain.pretrain.data.first_percent"] == share


def test_variants_change_several_settings_together(folder: Path) -> None:
    text = CHAIN.replace(
        "    sweep: {optim.lr: [0.01, 0.001], seed: [3, 4]}\n",
        "    variants: {plain: [], wide: [model.width=32, model.mlp_width=64]}\n"
        "    sweep: {seed: [3, 4]}\n",
    )
    chain = chain_of(write_chain(folder, text))
    widths = {s.name: s.run.model.width for s in steps_of(chain, "finetune")}  # type: ignore[union-attr]
    assert widths == {
        f"finetune/{name}_seed-{seed}": width
        for name, width in (("plain", 16), ("wide", 32))
        for seed in (3, 4)
    }


def test_overrides_of_the_chain_reach_runs_that_have_the_key(folder: Path) -> None:
    path = write_chain(folder)
    chain = chain_of(path, "overrides=[launch.partition=fast,tracking.uri=null]")
    assert {step.run.launch.partition for step in chain.steps} == {"fast"}
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
        ("[0.01, 0.001]", "[0.01, 0.01]", "(?s)another run both write.*rename one value"),
        ("seed: [3, 4]}", "name: [a]}", "name: the chain sets it itself"),
        ("overrides: [launch", "overrides: [name=x, launch", "name: the chain sets it itself"),
        ("data.path: shards, init: finetune", "init: shards", "init: stage shards is data_prep"),
        ("data.path: shards, init: pretrain", "data.path: pretrain", "stage pretrain is"),
        ("{optim.lr: [0.01, 0.001]", "{init: [a]", "init is given twice"),
        ("[launch.num_tasks=2]", "[], sweep: {seed: [1]}", "data_prep has no sweep"),
    ],
)  # fmt: skip
def test_wrong_chains_are_refused(folder: Path, old: str, new: str, message: str) -> None:
    assert CHAIN.count(old) == 1
    path = write_chain(folder, CHAIN.replace(old, new))
    with pytest.raises(UserError, match=message):
        chain_of(path)
    assert not (folder / "runs").exists()


def test_equal_errors_of_many_runs_are_one(folder: Path) -> None:
    text = CHAIN.replace("    sweep: {optim", "    overrides: [optim.lrr=1]\n    sweep: {optim")
    with pytest.raises(UserError) as caught:
        chain_of(write_chain(folder, text))
    assert caught.value.text().count("unknown key optim.lrr") == 1
    assert "in: finetune/lr-0.01_seed-3 and 3 more" in caught.value.text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/chains").glob("*.yaml")), ids=lambda path: path.stem
)
def test_chains_of_the_repository_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert len(chain_of(path, cluster="slurm").steps) > 4
