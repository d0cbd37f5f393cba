"""Switches, overrides and printed output."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.settings import PredictRun
from pretrain.run import PretrainRun
from vitscale.config.command_line import Command, load_command
from vitscale.config.errors import UserErrors

pytestmark = pytest.mark.usefixtures("here")


def command(*argv: str, **more: Any) -> Command[PretrainRun]:
    switches = {"--dry-run": "show, do not start"}
    return load_command(
        PretrainRun, script="x.py", description="Does x.", argv=argv, switches=switches, **more
    )


def errors(*argv: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        command(*argv)
    return [error.text() for error in caught.value.errors]


@pytest.mark.parametrize("config", [["--config", "a.yaml"], ["--config=a.yaml"]])
@pytest.mark.parametrize(
    "rank", [[], ["--local_rank=1"], ["--local_rank", "1"], ["--local-rank=0"]]
)
def test_arguments_may_stand_in_any_order(config: list[str], rank: list[str]) -> None:
    found = command(*rank, "seed=3", *config, "--dry-run", "optim.lr=1e-4")
    assert (found.run.seed, found.run.optim.lr, found.config_path) == (3, 1e-4, "a.yaml")
    assert found.switches == {"--dry-run"}


def test_no_configuration_is_answered_with_commands() -> None:
    assert "no configuration given" in errors()[0]
    with pytest.raises(UserErrors, match=r"one of\n    first\n    second\n    python .* --help"):
        command(examples=("first", "second"))


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command(*argv, examples=("x.py data.path=SHARDS",))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_groups_a_group_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    short = shown(capsys, "--help")
    assert "  x.py data.path=SHARDS" in short and "optim.lr: a number" not in short
    optim = shown(capsys, "--help", "optim", "schedule")
    assert "optim.lr: a number above 0; required" in optim and "optim.ema.decay: " in optim
    assert "schedule.epochs: " in optim and "data.path: " not in optim
    everything = shown(capsys, "--help-all")
    for part in ("data.crop_area: a list of 2", "engine.zero_stage: 0, 1, 2, 3; default 1"):
        assert part in everything
    for words in (("--help", "optim.lr"), ("--help=optim.lr",)):
        key = shown(capsys, *words)
        assert "optim.lr: a number above 0; required" in key and "optim.ema" not in key
    inner = shown(capsys, "--help", "optim.ema")
    assert (
        inner.startswith("[optim.ema]") and "optim.ema.decay" in inner and "optim.lr" not in inner
    )
    [error] = errors("--help", "optm")
    assert "there is no group or key 'optm'" in error and "did you mean optim?" in error


def test_options_are_keys() -> None:
    found = command("--config", "a.yaml", "--lr", "2e-3", options={"--lr": "optim.lr"})
    assert found.run.optim.lr == 2e-3
    with pytest.raises(UserErrors, match="--lr needs a value"):
        command("--config", "a.yaml", "--lr", options={"--lr": "optim.lr"})


def test_words_are_the_value_of_their_key() -> None:
    """Also words that would be no text in YAML."""
    assert command("--config", "a.yaml", "1e5", words_key="output").run.output == "1e5"
    with pytest.raises(UserErrors, match="takes one output, but got 2: b, c"):
        command("--config", "a.yaml", "b", "c", words_key="output")


def test_words_of_a_list_are_all_taken() -> None:
    found = load_command(
        PredictRun,
        script="x.py",
        description="",
        argv=["init=runs/a", "[b].jpg", "c d.png"],
        needs_config=False,
        words_key="images",
    )
    assert found.run.images == ("[b].jpg", "c d.png")
    assert (found.config_path, found.sources["init"]) == (None, "command line")


def test_command_line_and_file_errors_share_one_report() -> None:
    found = errors("--config", "a.yaml", "--dryrun", "seed=x", "--dry-run=1", "lr", "--dry")
    assert [text.splitlines()[0] for text in found] == [
        "command line: unknown switch --dryrun",
        "command line: --dry-run takes no value",
        "command line: unknown switch --dry",
        "command line: 'lr' is not key=value",
        "command line: seed: 'x' was read as text",
    ]
    assert "did you mean --dry-run?" in found[0]
