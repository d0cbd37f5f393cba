"""The `vitscale` command: the script and the words of each command, names of configurations.

What the scripts do with the words is tested with them; the wheel in test_demo.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.tree import ROOT
from tests.support.tables import lines, refused
from vitscale import command
from vitscale.command import COMMANDS, PREPARE
from vitscale.config.loader import read_values
from vitscale.config.packaged import CONFIGS, config_names


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """The script and the words of what was started last."""
    found = []

    def note(script, words):
        found[:] = [script, *words]

    monkeypatch.setattr(command, "execute", note)
    return found


# What is typed, and what is started. No script may take a run without a configuration for one of
# another stage.
STARTED = """
words | expected
pretrain vit_b16 seed=1 | launch/local.py --config vit_b16 seed=1
pretrain --num-procs 2 vit_b16 | launch/local.py --config vit_b16 --num-procs 2
finetune --config=pets_384 | launch/local.py --config pets_384
pretrain vit_b16 --print-config | launch/local.py --config vit_b16 --print-config
pretrain --help optim | pretrain/main.py --help optim
finetune init=runs/a | finetune/main.py init=runs/a
evaluate init=runs/a | launch/local.py init=runs/a
embed init=runs/a --num-procs 2 | launch/local.py stage=embed init=runs/a --num-procs 2
embed init=runs/a --dry-run --num-procs 2 | finetune/embed.py init=runs/a --dry-run
predict init=runs/a cat.jpg | finetune/predict.py init=runs/a cat.jpg
prepare shards data/digits | data_prep/make_shards.py --config data/digits
prepare verify runs/a | data_prep/verify_shards.py runs/a
prepare targets x output=t | launch/local.py --config x stage=targets output=t
prepare targets x --dry-run | pretrain/prepare_targets.py --config x stage=targets --dry-run
launch chains/demo --dry-run | launch/slurm.py --config chains/demo --dry-run
launch --local chains/demo | launch/local.py --config chains/demo
compare sync runs/a | launch/compare.py sync runs/a
"""


@lines(STARTED)
def test_each_command_starts_its_script(words, expected, started):
    command.start(words.split())
    assert started == expected.split()


def test_the_script_itself_runs_as_a_rank(started, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # torchrun --no-python vitscale pretrain ...
    command.start(["pretrain", "vit_b16"])
    assert started == ["pretrain/main.py", "--config", "vit_b16"]


def test_all_commands_have_scripts():
    found = [*COMMANDS.values(), *PREPARE.values()]
    scripts = [ROOT / script for script, _ in found if script != "-"]
    assert len(scripts) == 17
    assert all(script.is_file() for script in scripts)


# Words, and a pattern in the error.
WRONG = r"""
words | message
pretrian | did you mean pretrain\?
prepare shard | did you mean shards\?
pretrain vit_b61 | no configuration vit_b61\n.*did you mean vit_b16,
finetune b16 | did you mean .*deit/b16
pretrain pets_384 | stage finetune\n  next: vitscale finetune pets_384
pretrain chains/demo | next: vitscale launch --local chains/demo
configs copy nothing | no packaged configuration
configs dei3 | no name contains dei3\n.*`vitscale configs` lists all
completion tcsh | no 'tcsh'\n.*bash, zsh, fish
completion | a word is missing\n.*bash, zsh, fish
"""


@lines(WRONG)
def test_wrong_words_get_a_next_step(words, message, started):
    with refused(message):
        command.start(words.split())
    assert not started


def test_a_copied_configuration_has_its_bases(capsys):
    command.start(["configs", "copy", "deit3_i1k_b16"])
    copies = ["configs/finetune/deit3_i1k_b16.yaml", "configs/deit3_i1k/b16.yaml"]
    assert capsys.readouterr().out.split() == copies
    assert read_values(copies[0]) == read_values(
        CONFIGS / "finetune/deit3_i1k_b16.yaml"
    )

    # The copy comes first: an edit counts.
    Path(copies[0]).write_text("stage: evaluate\n")
    assert read_values("deit3_i1k_b16") == {"stage": "evaluate"}
    with refused("exists already"):
        command.start(["configs", "copy", "deit3_i1k_b16"])
    Path("configs/mae").touch()
    with refused("configs/mae/b16.yaml: cannot be written"):
        command.start(["configs", "copy", "mae/b16"])


def test_every_configuration_is_listed(capsys):
    command.start(["configs"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(config_names())
    assert len(lines) > 40
    assert all(len(line) > 50 and line[-1] == "." for line in lines)


def test_help_imports_nothing_slow():
    """Not even pydantic: `vitscale --help` has 0.3 s."""
    shown = "import sys; from vitscale import command; command.start([]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, cwd=ROOT
    )
    assert "visualize" in done.stdout, done.stderr
    slow = {"torch", "mlflow", "pydantic", "yaml", "numpy", "argparse"}
    assert not slow & set(done.stdout.splitlines()[-1].split())
