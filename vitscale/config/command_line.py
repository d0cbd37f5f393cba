"""Parse the command line that all scripts share.

Owns: --config, key=value overrides, --print-config, --help, --help-all, and a script's
own switches, options and words.
Leaves out: reading and validating the configuration (`loader`), the list of keys (`reference`).
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, get_origin

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.loader import RunT, RunTypes, load_run, run_to_yaml, types_by_stage
from vitscale.config.reference import (
    WIDTH,
    SettingsGroup,
    as_overview,
    as_text,
    groups_named,
    settings_reference,
)

WITH_VALUE = {"--config": ("FILE", "the run's YAML file")}
COMMON_SWITCHES = {
    "--print-config": "print the resolved configuration with the source of every value, and end",
    "--help": "print this text, or with names of groups their settings, and end",
    "--help-all": "print all settings, and end",
}
# Launchers add it; the environment (LOCAL_RANK) is what counts.
IGNORED = ("--local_rank", "--local-rank")
EPILOG = """\
Any setting can be given as key=value, for example optim.lr=1e-3 data.val_split=null
data.crop_area=[0.2,1]. Command line > file > base > site file > default; --print-config
shows all. The site file is $VITSCALE_SITE, or ~/.config/vitscale/site.yaml.
"""


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
    known = dict(switches or {}) | COMMON_SWITCHES
    options = options or {}
    usage = _usage(script, needs_config, known, options, words_key)
    parser = _parser(usage, description, known, options)
    words = _with_help_names(sys.argv[1:] if argv is None else argv)
    with_value = [word for word in words if word.partition("=")[0] in known and "=" in word]
    found, others = parser.parse_known_args([word for word in words if word not in with_value])
    given = vars(found)
    asked = frozenset(switch for switch in known if given[switch])
    if asked & {"--help", "--help-all"}:
        groups = settings_reference(types_by_stage(run_types))
        names = [word for word in others if "=" not in word and not word.startswith("-")]
        intro = parser.format_help()
        if examples:
            intro += "\n" + "".join(f"  {each}\n" for each in examples)
        _print_help(intro, groups, names, everything="--help-all" in asked)
        raise SystemExit(0)
    overrides = [word for word in others if not word.startswith("-")]
    unknown = [word for word in others if word.startswith("-")]
    errors = [_unknown_switch(word, [*WITH_VALUE, *options, *known]) for word in unknown]
    wrong = [f"{word.partition('=')[0]} takes no value" for word in with_value]
    wrong += [f"{name} needs a value" for name in (*WITH_VALUE, *options) if given[name] == ""]
    errors += [UserError(text, where="command line") for text in wrong]
    overrides += [f"{key}={given[option]}" for option, key in options.items() if given[option]]
    if words_key is not None:
        overrides, found_errors = _with_words(overrides, words_key, run_types)
        errors += found_errors
    config = given["--config"]
    if config is None and needs_config:
        raise UserErrors([*errors, _no_configuration(script, examples)])
    loaded = load_run(run_types, config, overrides=overrides, errors=errors)
    if "--print-config" in asked:
        print(run_to_yaml(loaded.run, sources=loaded.sources), end="")
        raise SystemExit(0)
    return Command(run=loaded.run, sources=loaded.sources, switches=asked, config_path=config)


def _with_help_names(argv: Sequence[str]) -> list[str]:
    """--help=NAME as two words; -h as --help."""
    words = ["--help" if word == "-h" else word for word in argv]
    split = [word.split("=", 1) if word.startswith("--help=") else [word] for word in words]
    return [word for parts in split for word in parts]


def _print_help(
    intro: str, groups: Sequence[SettingsGroup], names: Sequence[str], *, everything: bool
) -> None:
    """names: of groups, whose settings are shown alone."""
    if everything:
        print(intro + as_text(groups))
    elif names:
        print(as_text(groups_named(groups, names)).lstrip("\n"))
    else:
        print(f"{intro}\n{as_overview(groups)}")


def _with_words(
    overrides: list[str], key: str, run_types: RunTypes[RunT]
) -> tuple[list[str], list[UserError]]:
    """Words without `=` as one override of `key`, quoted, because they are no YAML."""
    words = [word for word in overrides if "=" not in word]
    if not words:
        return overrides, []
    others = [word for word in overrides if "=" in word]
    fields = [run_type.model_fields[key] for run_type in types_by_stage(run_types).values()]
    if all(get_origin(field.annotation) is tuple for field in fields):
        return [*others, f"{key}={json.dumps(words, ensure_ascii=False)}"], []
    if len(words) > 1:
        what = f"takes one {key}, but got {len(words)}: {', '.join(words)}"
        return others, [UserError(what, where="command line")]
    return [*others, f"{key}={json.dumps(words[0], ensure_ascii=False)}"], []


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
    return "\n         ".join(textwrap.wrap(text, WIDTH - 9, break_on_hyphens=False))


def _parser(
    usage: str,
    description: str,
    switches: Mapping[str, str],
    options: Mapping[str, str],
) -> argparse.ArgumentParser:
    """A parser that never exits; `load_command` reports unknown words with the other errors."""
    parser = argparse.ArgumentParser(
        usage=usage,
        description=description,
        epilog=EPILOG,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
        add_help=False,
        allow_abbrev=False,
    )
    # A missing value becomes an empty one, so that parsing continues and finds further errors.
    for option, (value, text) in WITH_VALUE.items():
        parser.add_argument(option, dest=option, nargs="?", const="", metavar=value, help=text)
    for option, key in options.items():
        text = f"the same as {key}=VALUE"
        parser.add_argument(option, dest=option, nargs="?", const="", metavar="VALUE", help=text)
    for switch, text in switches.items():
        parser.add_argument(switch, dest=switch, action="store_true", help=text)
    parser.add_argument(*IGNORED, nargs="?", help=argparse.SUPPRESS)
    return parser


def _no_configuration(script: str, examples: Sequence[str]) -> UserError:
    shown = examples or [f"python {script} --config FILE  # see configs/"]
    next_step = "\n    ".join(["one of", *shown, f"python {script} --help"])
    return UserError("no configuration given", where="command line", next_step=next_step)


def _unknown_switch(word: str, known: Sequence[str]) -> UserError:
    name = word.partition("=")[0]
    best = nearest(name, known)
    return UserError(
        f"unknown switch {name}",
        where="command line",
        allowed=", ".join(known),
        next_step=f"did you mean {best}?" if best else None,
    )
