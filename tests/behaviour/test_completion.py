"""Completion of commands, configurations, keys, values, runs and paths in three shells."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.settings_page import completed_keys
from tests.contract.tree import ROOT
from tests.support.tables import rows
from vitscale.config.packaged import COMPLETED_KEYS

# Each gets the words of a line, the last of which is not complete. Bash divides them at `=`.
SCRIPTS = {
    "bash": """
        eval "$(vitscale completion bash)"
        COMP_WORDS=(vitscale "$@"); COMP_CWORD=$#
        _vitscale; printf "%s\\n" "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { : }
        compadd() { while [[ $1 != -- ]] { shift }; shift; print -rl -- $@ }
        eval "$(vitscale completion zsh)"
        words=(vitscale "$@"); CURRENT=$#words; _vitscale
    """,
    "fish": """
        vitscale completion fish | source
        complete -C "vitscale $(string join ' ' -- $argv)"
    """,
}


def completed(shell: str, words: list[str], folder: Path) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    (folder / "vitscale").write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m vitscale.command "$@"'
    )
    (folder / "vitscale").chmod(0o755)
    # `fish -c` takes its arguments without a name of the script.
    command = [shell, "-c", SCRIPTS[shell], *([] if shell == "fish" else ["x"]), *words]
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("shell", SCRIPTS)
@rows("""
- [typed, follows]
- [pretr, pretrain]
- [prepare sh, shards]
- [finetune finetune/p, finetune/pets_384]
- [pretrain x data.pa, data.path=]
- [pretrain x data.rem, data.remote.]
- [prepare shards x source.ki, source.kind=]
- [finetune x optim.name=l, optim.name=lamb]
- [export to=hug, to=huggingface]
- [evaluate init=x evaluate=kn, evaluate=knn]
- [pretrain x data.antialias=f, data.antialias=false]
- [predict init=runs/d, init=runs/digits/]
- [status di, digits]
- [compare di, digits]
""")
def test_the_last_word_is_completed(shell, typed, follows, tmp_path):
    (tmp_path / "runs/digits").mkdir(parents=True)
    (tmp_path / "runs/digits/config.yaml").touch()
    words = typed.split()
    if shell == "bash":
        # The part before `=` stays as it is typed.
        words = typed.replace("=", " = ").split()
        follows = follows.partition("=")[2] if "=" in typed else follows
    assert completed(shell, words, tmp_path) == [follows]


def test_keys_are_those_of_the_settings():
    """After a change: python docs/settings_page.py"""
    assert COMPLETED_KEYS.read_text() == completed_keys()


def test_completion_imports_nothing_slow():
    """Not even pydantic: a word is complete before its writer is impatient."""
    shown = "import sys; from vitscale import command; "
    shown += (
        "command.complete(['words', 'pretrain', 'x', 'data.pa']); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", shown], capture_output=True, text=True, cwd=ROOT
    )
    found, modules = done.stdout.splitlines()
    assert found == "data.path="
    assert not {"torch", "pydantic", "yaml", "numpy", "argparse"} & {*modules.split()}
