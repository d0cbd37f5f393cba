"""Parse the command line that all scripts share.

Owns: --config, key=value overrides, --print-config, --help, --help-all, and a script's
own switches, options and words.
Leaves out: reading and validating the configuration (`loader`), the list of keys (`reference`).
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, get_origin

from vitscale.config.errors import UserError, UserErrors, did_you_mean
from vitscale.config.loader import RunT, RunTypes, load_run, run_to_yaml, types_by_stage
from vitscale.config.reference import (
    WIDTH,
    as_overview,
    as_text,
    groups_named,
    settings_reference,
)
from vitscale.config.source import COMMAND_LINE

CONFIG = {"--config FILE": "the run's YAML file"}
COMMON_SWITCHES = {
    "--print-config": "print the resolved configuration with the source of every value, and end",
    "--help": "print this text, or with names of groups or keys their settings, and end",
    "--help-all": "print all settings, and end",
}
# Launchers add it; the environment (LOCAL_RANK) is what counts.
IGNORED = ("--local_rank", "--local-rank")
EPILOG = """\
Any setting can be given as key=value, for example optim.lr=1e-3 data.val_split=null
data.crop_area=[0.2,1]. Command line > file > base > site file > default; --print-config
shows all. The site file is $VITSCALE_SITE, or ~/.config/vitscale/site.yaml."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Generic[RunT]):
    """The parsed command line and its run."""

    run: RunT
    sources: dict[str, str]
    """Dotted key -> "configs/x.yaml:12", "command line" or "default"."""
    switches: frozenset[str]
    config_path: str | None


def load_command(
    run_types: RunTypes[RunT],
    *,
    script: str,
    description: str,
    argv: Sequence[str] | None = None,
    needs_config: bool = True,
    examples: Sequence[str] = (),
    switches: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    words_key: str | None = None,
) -> Command[RunT]:
    """Read the command line into a validated run.

    `run_types`: one run type, or {stage: run type} chosen by the file's `stage:`.
    `needs_config`: false where the command line alone can make a run.
    `examples`: commands to show when no configuration is given.
    `switches`: further switches without a value, {"--dry-run": "help text"}.
    `options`: further switches with a value, {"--to": "to"}; the same as the key to=VALUE.
    `words_key`: the key that words without `=` are the value of; several of them where it is a
    list. None: such words are errors.
    Raises UserErrors with all errors; SystemExit(0) after --help, --help-all and --print-config.
    """
    known, options = dict(switches or {}) | COMMON_SWITCHES, options or {}
    words, given, errors = _parse(sys.argv[1:] if argv is None else argv, known, options)
    asked = frozenset(given.keys() & known.keys())
    if asked & {"--help", "--help-all"}:
        groups = settings_reference(types_by_stage(run_types))
        names = [word for word in words if "=" not in word]
        if names and "--help-all" not in asked:
            print(as_text(groups_named(groups, names)).lstrip("\n"))
        else:
            usage = _usage(script, needs_config, known, options, words_key)
            lines = [usage, "", description, "", "options:", *_options(known, options), "", EPILOG]
            lines += ["", *(f"  {each}" for each in examples)] if examples else []
            everything = "--help-all" in asked
            print(*lines, as_text(groups) if everything else f"\n{as_overview(groups)}", sep="\n")
        raise SystemExit(0)
    overrides = [word for word in words if words_key is None or "=" in word]
    overrides += [f"{key}={given[name]}" for name, key in options.items() if name in given]
    plain = [word for word in words if "=" not in word]
    if words_key is not None and plain:
        types = types_by_stage(run_types).values()
        fields = [run_type.model_fields[words_key] for run_type in types]
        is_list = all(get_origin(field.annotation) is tuple for field in fields)
        if len(plain) > 1 and not is_list:
            what = f"takes one {words_key}, but got {len(plain)}: {', '.join(plain)}"
            errors.append(UserError(what, where=COMMAND_LINE))
        # Quoted, because they are no YAML.
        quoted = json.dumps(plain if is_list else plain[0], ensure_ascii=False)
        overrides.append(f"{words_key}={quoted}")
    config = given.get("--config")
    if "--config" not in given and needs_config:
        shown = examples or [f"python {script} --config FILE  # see configs/"]
        step = "\n    ".join(["one of", *shown, f"python {script} --help"])
        error = UserError("no configuration given", where=COMMAND_LINE, next_step=step)
        raise UserErrors([*errors, error])
    loaded = load_run(run_types, config, overrides=overrides, errors=errors)
    if "--print-config" in asked:
        print(run_to_yaml(loaded.run, sources=loaded.sources), end="")
        raise SystemExit(0)
    return Command(run=loaded.run, sources=loaded.sources, switches=asked, config_path=config)


def _parse(
    argv: Sequence[str], switches: Mapping[str, str], options: Mapping[str, str]
) -> tuple[list[str], dict[str, str], list[UserError]]:
    """(words without a dash, {switch: its value, empty if it has none}, errors)."""
    words, given, errors = [], {}, []
    with_value = ("--config", *options, *IGNORED)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if not word.startswith("-"):
            words.append(word)
        elif name == "--help" and value:
            given[name] = ""
            words.append(value)
        elif name in switches and not equals:
            given[name] = ""
        elif name in switches:
            errors.append(UserError(f"{name} takes no value", where=COMMAND_LINE))
        elif name in with_value:
            if not equals and rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            if value:
                given[name] = value
            else:
                errors.append(UserError(f"{name} needs a value", where=COMMAND_LINE))
        else:
            known = ["--config", *options, *switches]
            what, step = f"unknown switch {name}", did_you_mean(name, known)
            allowed = ", ".join(known)
            errors.append(UserError(what, where=COMMAND_LINE, allowed=allowed, next_step=step))
    return words, given, errors


def _usage(
    script: str,
    needs_config: bool,
    switches: Mapping[str, str],
    options: Mapping[str, str],
    words_key: str | None,
) -> str:
    parts = [f"python {script}", "--config FILE" if needs_config else "[--config FILE]"]
    parts.append("[key=value ...]")
    parts += [f"[{name}]" for name in switches if name not in COMMON_SWITCHES]
    parts += [f"{name} VALUE" for name in options]
    text = " ".join([*parts, *([words_key.upper()] if words_key else [])])
    lines = textwrap.wrap(text, WIDTH - 9, break_on_hyphens=False)
    return "usage: " + "\n         ".join(lines)


def _options(switches: Mapping[str, str], options: Mapping[str, str]) -> list[str]:
    same = {f"{name} VALUE": f"the same as {key}=VALUE" for name, key in options.items()}
    table = CONFIG | same | dict(switches)
    width = max(map(len, table))
    return [f"  {name:<{width}}  {text}" for name, text in table.items()]
