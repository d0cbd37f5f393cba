"""The `vitscale` command: start the script of a stage, list configurations, complete words.

Owns: which script a command starts, and the configuration as its first word. The scripts parse
everything else, as `python SCRIPT` would.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from glob import escape, glob
from pathlib import Path
from typing import NoReturn

from vitscale.config import packaged
from vitscale.config.errors import (
    UserError,
    did_you_mean,
    interrupts_deferred,
    not_written,
    run_script,
)
from vitscale.config.packaged import CONFIGS, config_names


def _table(text: str) -> dict[str, tuple[str, str]]:
    """Command -> its script, and what it does."""
    rows = [line.split(maxsplit=2) for line in text.strip().splitlines()]
    return {name: (script, purpose) for name, script, purpose in rows}


PREPARE = _table("""
shards      data_prep/make_shards.py     images -> shuffled shards, an index and a ledger
index       data_prep/index_shards.py    index the WebDataset tars of others, unchanged
verify      data_prep/verify_shards.py   read shards completely; draw samples
duplicates  data_prep/find_duplicates.py find copies among images and of other sets
corpus      data_prep/make_corpus.py     write a small corpus: digits or characters
targets     pretrain/prepare_targets.py  what teachers say of training images, computed once
""")
# Those without a script are in this file.
COMMANDS = _table("""
prepare     -                            shards, index, verify, duplicates, corpus, targets
pretrain    pretrain/main.py             shards -> checkpoint
finetune    finetune/main.py             checkpoint -> model for other labels
evaluate    finetune/evaluate_model.py   model and shards -> one table of results
embed       finetune/embed.py            model and shards -> features of each image
predict     finetune/predict.py          model and images -> classes
export      finetune/export.py           model -> timm, Hugging Face, npz, ONNX, safetensors
visualize   finetune/visualize.py        model -> pictures: components, similarity, attention
launch      launch/slurm.py              submit a run or a chain to SLURM; --local: run it here
compare     launch/compare.py            runs -> tables and an HTML report; sync: to MLflow
status      launch/status.py             what runs do, and why they ended
demo        launch/demo.py               the whole chain on a small corpus in minutes, without a GPU
configs     -                            list the packaged configurations; copy NAME: for editing
completion  -                            print the completion of bash, zsh or fish, to be sourced
""")
# They run as many processes as there are GPUs, or --num-procs.
PARALLEL = ("pretrain", "finetune", "evaluate", "embed")
LOCAL = "launch/local.py"
HELP = ("--help", "-h")
WITH_CONFIG = (*PARALLEL, "launch", "shards", "index", "targets")
COMPLETION = {
    # Bash divides words at = and replaces what is behind the last one. A name that may go on, of a
    # folder, a group or a key, gets no blank.
    "bash": r"""\
_vitscale() {
    local -a words=()
    local word after=
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        if [[ $word == = || $after == = ]]; then words[-1]+=$word; else words+=("$word"); fi
        after=$word
    done
    mapfile -t COMPREPLY < <(vitscale completion words "${words[@]}")
    word=${words[-1]}
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    COMPREPLY=("${COMPREPLY[@]// /\\ }")
    [[ ${COMPREPLY[*]} == *[=./] ]] && compopt -o nospace 2> /dev/null
    return 0
}
complete -o default -F _vitscale vitscale""",
    "zsh": r"""\
_vitscale() {
    local -a found
    found=(${(f)"$(vitscale completion words "${(@Q)words[2,CURRENT]}")"})
    (( $#found )) || { _files; return }
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
compdef _vitscale vitscale""",
    "fish": """\
complete -c vitscale -a \\
    '(vitscale completion words (commandline -opc)[2..] "$(commandline -ct)")'""",
}


def main() -> None:
    run_script(lambda: start(sys.argv[1:]))


def start(words: Sequence[str]) -> None:
    """Run a command line without its first word, `vitscale`. Raises UserError."""
    name, *rest = words or ["--help"]
    if name in HELP:
        show("vitscale", COMMANDS)
    elif name == "--version":
        from importlib.metadata import version

        print(f"vitscale {version('vitscale')}")
    elif name in ("configs", "completion") and {*HELP} & {*rest}:
        print(f"usage: vitscale {name} [WORD ...]\n\n{COMMANDS[name][1]}")
    elif name == "configs":
        copy_config(rest[1:]) if rest[:1] == ["copy"] else list_configs(rest)
    elif name == "completion":
        complete(rest)
    elif name == "prepare":
        kind, *rest = rest or ["--help"]
        if kind in HELP:
            show("vitscale prepare", PREPARE)
        else:
            script, _ = _known(kind, PREPARE)
            is_local = "--dry-run" in rest and kind in WITH_CONFIG
            if kind == "targets":
                # By all ranks; its own dry run opens the teachers.
                is_local = (
                    not {"--dry-run", *HELP} & {*rest} and "RANK" not in os.environ
                )
                rest.insert(0, "stage=targets")
            if is_local:
                script = LOCAL
            execute(script, _with_config(kind, rest))
    else:
        script, _ = _known(name, COMMANDS)
        rest = _with_config(name, rest)
        starts_ranks = "RANK" not in os.environ and not {*HELP} & {*rest}
        if name == "embed" and "--dry-run" in rest:
            # Its plan needs the opened model, but no ranks.
            starts_ranks = False
            if "--num-procs" in rest:
                at = rest.index("--num-procs")
                rest = rest[:at] + rest[at + 2 :]
        if name in PARALLEL and starts_ranks:
            if "--config" in rest:
                _check_stage(name, rest[rest.index("--config") + 1 :])
                script = LOCAL
            elif name == "embed":
                script = LOCAL
                rest = ["stage=embed", *rest]
            elif name == "evaluate" and any(word.startswith("init=") for word in rest):
                script = LOCAL
        elif name == "launch" and "--local" in rest:
            rest.remove("--local")
            script = LOCAL
        execute(script, rest)


def show(program: str, commands: dict[str, tuple[str, str]]) -> None:
    """Print what may follow the program."""
    print(f"usage: {program} COMMAND ...\n")
    print(*(f"  {name:<12}{text}" for name, (_, text) in commands.items()), sep="\n")
    print(f"\n{program} COMMAND --help shows what it takes.")


def _known(name: str, commands: dict[str, tuple[str, str]]) -> tuple[str, str]:
    if name not in commands:
        what = f"there is no {name!r}" if name else "a word is missing"
        step = did_you_mean(name, [*commands], "vitscale --help")
        raise UserError(
            what, where="vitscale", allowed=", ".join(commands), next_step=step
        )
    return commands[name]


def _with_config(name: str, words: Sequence[str]) -> list[str]:
    """The words with `--config` before the first plain one, where a configuration is wanted."""
    split = (
        word.split("=", 1) if word.startswith("--config=") else [word] for word in words
    )
    words = [part for parts in split for part in parts]
    if name in WITH_CONFIG and not {*HELP, "--config"} & {*words}:
        for i, word in enumerate(words):
            if (
                "=" not in word
                and word[:1] != "-"
                and words[i - 1 : i] != ["--num-procs"]
            ):
                return ["--config", word, *words[:i], *words[i + 1 :]]
    return words


def _check_stage(name: str, words: Sequence[str]) -> None:
    """Raise UserError where a configuration is of another stage, which `LOCAL` would run, too."""
    from vitscale.config.loader import read_values

    config = words[0] if words else ""
    if config and (stage := read_values(config).get("stage", name)) != name:
        other = {"chain": "launch --local", "data_prep": "prepare shards"}.get(
            stage, stage
        )
        step = f"vitscale {other} {shlex.quote(config)}"
        raise UserError(
            f"is a configuration of stage {stage}", where=config, next_step=step
        )


def execute(script: str, words: Sequence[str]) -> NoReturn:
    """Become `python SCRIPT WORDS`."""
    if packaged.IS_WHEEL:  # its stages are on no path of their own
        paths = [str(packaged.INSIDE), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    program = [sys.executable, str(packaged.PROJECT_ROOT / script), *words]
    with interrupts_deferred():
        os.execv(sys.executable, program)


def list_configs(words: Sequence[str]) -> None:
    """Print names that contain a word, or all, with each card's first line. Raises UserError."""
    names = [
        each
        for each in config_names()
        if not words or any(word in each for word in words)
    ]
    if not names:
        what = f"no name contains {' or '.join(words)}"
        step = packaged.similar_configs(words[0])
        raise UserError(what, where="configs", next_step=step)
    for name in names:
        first = (CONFIGS / f"{name}.yaml").read_text().partition("\n")[0]
        print(f"{name:<29} {first.removeprefix('# What:').strip()}")


def copy_config(words: Sequence[str]) -> None:
    """Copy a packaged configuration and its bases into configs/ here. Raises UserError."""
    from vitscale.config.loader import read_yaml
    from vitscale.distributed.atomic_files import write_text

    name = words[0] if len(words) == 1 else ""
    found = CONFIGS.parent / packaged.find_config(name)
    if not (found.is_relative_to(CONFIGS) and found.exists()):
        what = f"{name!r} is no packaged configuration"
        step = packaged.similar_configs(name)
        raise UserError(what, where="copy", allowed="one name", next_step=step)
    path: Path | None = found
    while path is not None:
        target = Path("configs", path.relative_to(CONFIGS))
        if path == found and target.exists():
            raise UserError(
                "exists already", where=target, next_step="edit it, or remove it"
            )
        if not target.exists():
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_text(target, path.read_text())
            except OSError as error:
                raise not_written(error, f"copy={target}") from None
            print(target)
        base = read_yaml(path.read_text(), name=str(path)).values.get("base")
        path = None if base is None else (path.parent / base).resolve()


def complete(words: Sequence[str]) -> None:
    """Print a shell's completion; after the word `words`, what the last word may become."""
    if words[:1] == ["words"]:
        # A shell quotes blanks by a backslash.
        *before, start = [word.replace("\\", "") for word in words[1:]] or [""]
        for each in sorted({*_followers(before, start)}):
            if each.startswith(start):
                print(each)
    else:
        shells = {name: (text, "") for name, text in COMPLETION.items()}
        print(_known(words[0] if words else "", shells)[0])


def _followers(before: Sequence[str], start: str) -> Iterator[str]:
    """Yield words that may follow those before; one that goes on ends in =, a dot or a slash."""
    first = before[0] if before else ""
    last = before[-1] if before else ""
    lists: dict[str, Iterable[str]] = {
        "": COMMANDS,
        "prepare": PREPARE,
        "completion": COMPLETION,
        "configs": ["copy"],
    }
    if last in lists:
        yield from lists[last]
        return
    if last in (*WITH_CONFIG, "--local", "copy"):
        yield from config_names()
    if first in ("compare", "status"):
        yield from (path.parent.name for path in Path("runs").glob("*/config.yaml"))

    key, is_setting, path = start.partition("=")
    for line in packaged.COMPLETED_KEYS.read_text().splitlines():
        command, name, held = line.split(" ")
        if first not in (command, "launch"):
            continue
        if not is_setting:
            # To its next dot.
            num_parts = key.count(".") + 1
            parts = re.findall(r"[^.]+\.?", f"{name}=")
            yield "".join(parts[:num_parts])
        elif name == key and held == "PATH":
            for found in glob(f"{escape(path)}*"):
                end = "/" if os.path.isdir(found) else ""
                yield f"{key}={found}{end}"
        elif name == key:
            yield from (f"{key}={each}" for each in held.split(",") if each)


if __name__ == "__main__":
    main()
