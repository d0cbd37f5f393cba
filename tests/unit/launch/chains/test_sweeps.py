"""Lists on the command line: values of a sweep, or one value of a key that takes a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.chains.load import load_chain
from launch.chains.settings import ChainRun
from launch.chains.sweeps import _sweeps, sweep_command
from tests.support.chain_runs import FINETUNE, PRETRAIN
from vitscale.config.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain.yaml").write_text(PRETRAIN)
    (tmp_path / "finetune.yaml").write_text(FINETUNE)
    (tmp_path / "data.yaml").write_text("stage: data_prep\n")
    return tmp_path


def chain_of(*argv: str) -> ChainRun | None:
    command = sweep_command(["--config", *argv], script="launch/local.py", switches={})
    assert command is None or isinstance(command.run, ChainRun)
    return None if command is None else command.run


def runs_of(*words: str, stage: str = "pretrain") -> dict[str, Any]:
    chain = chain_of(f"{stage}.yaml", *words)
    assert chain is not None
    return {step.name: step.run for step in load_chain(chain, cluster="local").steps}


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optim.lr=[1e-3,0.01]", [1e-3, 0.01]),
        ("seed=[0, 1]", [0, 1]),
        ("optim.name=[adamw, sgd]", ["adamw", "sgd"]),
        ("engine.zero_stage=[0,1]", [0, 1]),
        ("data.val_split=[test,null]", ["test", None]),
        ("data.crop_area=[[0.2,1],[0.5,1]]", [[0.2, 1], [0.5, 1]]),
        ("data.crop_area=[0.2,1]", None),
        ("model.image_size=[8,16]", [8, 16]),
        ("evaluate=[{name: knn}]", None),
        ("launch.setup=[a,b]", None),
        ("optim.lr=0.1", None),
        ("optim.rate=[1,2]", None),
        ("optim=[1,2]", None),
        ("optim.lr=[1,", None),
    ],
)
def test_a_list_for_a_scalar_key_is_a_sweep(word: str, values: list[Any] | None) -> None:
    found = _sweeps(["--config", "pretrain.yaml", word])
    assert found == ({} if values is None else {word.partition("=")[0]: values})


def test_a_chosen_group_decides_its_keys() -> None:
    words = ["--config", "pretrain.yaml", "objective.mask_ratio=[0.5,0.75]"]
    assert not _sweeps(words)
    assert _sweeps([*words, "objective.name=mae"])


def test_other_stages_have_no_sweep() -> None:
    assert chain_of("data.yaml", "seed=[0,1]") is None
    assert chain_of("lost.yaml", "seed=[0,1]") is None


def test_names_say_what_differs() -> None:
    runs = runs_of("optim.lr=[1e-3,0.01]", "seed=[2,3]", "model.width=32", "name=x")
    assert list(runs) == [
        f"pretrain/lr-{lr}_seed-{seed}" for lr in (0.001, 0.01) for seed in (2, 3)
    ]
    run = runs["pretrain/lr-0.01_seed-3"]
    assert (run.optim.lr, run.seed, run.model.width) == (0.01, 3, 32)
    assert run.folder == "runs/x/pretrain/lr-0.01_seed-3"
    assert run.tracking.tags["chain.pretrain.optim.lr"] == "0.01"


def test_transfers_start_from_what_the_command_names() -> None:
    runs = runs_of("optim.lr=[1e-3,0.01]", "init=runs/a", stage="finetune")
    assert {run.init for run in runs.values()} == {"runs/a"}
    runs = runs_of("init=[runs/a,runs/b]", stage="finetune")
    assert [run.init for run in runs.values()] == ["runs/a", "runs/b"]


def test_wrong_values_name_their_runs() -> None:
    with pytest.raises(UserError, match="(?s)optim.lr.*in: pretrain/lr-fast"):
        runs_of("optim.lr=[0.1,fast]")
