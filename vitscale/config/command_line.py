"""Parse the command line that all scripts share, and list the settings for its --help.

Each setting has an entry with its default and its description: the docstrings of sections and their
fields. Stages, and groups of a choice, that share a setting share its entry.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mode
from typing import Any, Generic, NamedTuple, NoReturn

from vitscale.config.errors import UserError, UserErrors, did_you_mean
from vitscale.config.loader import (
    COMMAND_LINE,
    RunT,
    RunTypes,
    load_run,
    run_to_yaml,
    types_by_stage,
    yaml_flow,
)
from vitscale.config.section import (
    NAME,
    Node,
    Run,
    default_name,
    describe,
    groups_of,
    is_list,
    settings_of,
    tree_of,
)

WIDTH = 98
EPILOG = """\
Any setting can be given as key=value, for example optim.lr=1e-3 data.val_split=null
data.crop_area=[0.2,1]. Command line > file > base > site file > default; --print-config
shows all. The site file is $VITSCALE_SITE, or ~/.config/vitscale/site.yaml."""


class Command(NamedTuple, Generic[RunT]):
    """The parsed command line and its run."""

    run: RunT
    switches: frozenset[str]
    config_path: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(
            message, where=COMMAND_LINE, next_step="--help shows all switches"
        )


def load_command(
    run_types: RunTypes[RunT],
    *,
    program: str,
    description: str,
    argv: Sequence[str] | None = None,
    needs_config: bool = True,
    examples: Sequence[str] = (),
    switches: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    words_key: str | None = None,
) -> Command[RunT]:
    """Read the command line into a validated run.

    `program`: how it is started, for example vitscale pretrain.
    `run_types`: one run type, or {stage: run type} chosen by the file's `stage:`.
    `needs_config`: false where the command line alone can make a run.
    `examples`: commands to show when no configuration is given.
    `switches`: further switches without a value, {"--dry-run": "help text"}.
    `options`: further switches with a value, {"--to": "to"}; the same as the key to=VALUE.
    `words_key`: the key that words without `=` are the value of; several of them where it is a
    list. None: such words are errors.
    Raises UserErrors with all errors; SystemExit(0) after --help and --print-config.
    """
    options = options or {}
    switches = switches or {}
    by_stage = types_by_stage(run_types)
    takes = (
        f"[--config FILE] [key=value ...] {words_key.upper()}" if words_key else None
    )
    parser = _Parser(
        usage=f"{program} {takes or 'CONFIG [key=value ...]'}",
        description=description,
        epilog="\n\n".join([EPILOG, "\n".join(f"  {each}" for each in examples)]),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(overrides=[], switches=[])
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file, or a name of `vitscale configs`"
    )
    for name, key in options.items():
        repeated: Any = {"action": "append", "dest": "overrides", "metavar": "VALUE"}
        text, override = f"the same as {key}=VALUE", f"{key}={{}}".format
        parser.add_argument(name, type=override, help=text, **repeated)
    for name, text in switches.items():
        parser.add_argument(
            name, dest="switches", action="append_const", const=name, help=text
        )
    text = "print the resolved configuration with the source of every value, and end"
    parser.add_argument("--print-config", action="store_true", help=text)
    text = "print this text, or the settings of these groups and keys, and end"
    parser.add_argument("--help", "-h", nargs="*", metavar="NAME", help=text)
    # Launchers add it; the environment (LOCAL_RANK) is what counts.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    found, rest = parser.parse_known_args(argv)
    if found.help is not None:
        reference = settings_reference(by_stage)
        overview = f"{parser.format_help()}\n{_as_overview(reference)}"
        print(as_markdown(reference, found.help) if found.help else overview)
        raise SystemExit(0)
    errors = []
    known = ["--config", *options, *switches, "--print-config", "--help"]
    for name in (word.partition("=")[0] for word in rest if word.startswith("-")):
        what, step = f"unknown switch {name}", did_you_mean(name, known)
        allowed = ", ".join(known)
        errors.append(
            UserError(what, where=COMMAND_LINE, allowed=allowed, next_step=step)
        )
    words = [word for word in rest if not word.startswith("-")]
    overrides = [
        word for word in words if words_key is None or "=" in word
    ] + found.overrides
    if plain := [word for word in words if words_key is not None and "=" not in word]:
        takes_list = any(
            is_list(tree_of(t)["properties"][words_key]) for t in by_stage.values()
        )
        # Quoted, because they are no YAML.
        value = plain if takes_list or len(plain) > 1 else plain[0]
        overrides.append(f"{words_key}={json.dumps(value, ensure_ascii=False)}")
    if found.config is None and needs_config:
        shown = examples or [f"{program} CONFIG  # vitscale configs lists them"]
        step = "\n    ".join(["one of", *shown, f"{program} --help"])
        error = UserError("no configuration given", where=COMMAND_LINE, next_step=step)
        raise UserErrors([*errors, error])
    loaded = load_run(run_types, found.config, overrides=overrides, errors=errors)
    if found.print_config:
        print(run_to_yaml(loaded.run, places=loaded.places), end="")
        raise SystemExit(0)
    switched = frozenset(found.switches)
    return Command(run=loaded.run, switches=switched, config_path=found.config)


# ---- the list of settings ---------------------------------------------------------------------


class Entry(NamedTuple):
    key: str
    facts: str
    """The stages and groups of a choice that have it, what it may hold, its default in YAML."""
    text: str


Reference = dict[str, list[Entry]]
"""Title -> settings of a group; of those outside groups first."""


def settings_reference(run_types: Mapping[str, type[Run]]) -> Reference:
    """All settings of these stages. One whose text differs between stages has several entries."""
    found: dict[tuple[str, Entry], tuple[dict[str, None], dict[str, None]]] = {}
    for stage, run_type in run_types.items():
        for setting in list(settings_of(run_type).values())[1:]:
            key, node = setting.key, setting.node
            text = (
                f"{_text(tree_of(run_type))} {_text(node)}"
                if key == "stage"
                else _text(node)
            )
            group = key.partition(".")[0] if "." in key or groups_of(node) else ""
            stages, names = found.setdefault(
                (group, Entry(key, _facts(node), text)), ({}, {})
            )
            stages[stage] = None
            names |= {setting.name: None} if setting.name else {}
    sections: Reference = {"Outside groups": []}
    for (group, entry), (stages, names) in found.items():
        # Not said again: the stages that most settings of the group have.
        usual = mode(
            tuple(each) for (other, _), (each, _) in found.items() if other == group
        )
        own = usual if group else tuple(run_types)
        title = group or "Outside groups"
        title += f" ({', '.join(own)})" if group and len(run_types) > 1 else ""
        facts = [f"stage: {', '.join(stages)}"] if own != tuple(stages) else []
        facts += [f"{NAME}: {', '.join(names)}"] if names else []
        facts += [entry.facts] if entry.facts else []
        sections.setdefault(title, []).append(entry._replace(facts="; ".join(facts)))
    sections["Outside groups"].sort(key=lambda entry: entry.key)
    return sections


def _facts(node: Node) -> str:
    if "const" in node or "properties" in node:
        return "" if "const" in node else describe(node)
    default = default_name(node) or (
        yaml_flow(node["default"]) if "default" in node else None
    )
    return (
        f"{describe(node)}; default {default}"
        if default
        else f"{describe(node)}; required"
    )


def _text(node: Node) -> str:
    text = (
        node.get("description") or groups_of(node).get("", {}).get("description") or ""
    )
    return " ".join(text.split())


def _as_overview(reference: Reference) -> str:
    """A line for the settings outside groups, and for each group."""
    outside, *groups = reference.values()
    found = {"": ", ".join(dict.fromkeys(entry.key for entry in outside))}
    found |= {entries[0].key: entries[0].facts for entries in groups}
    lines = [
        f"  {key:<14} {textwrap.shorten(text, WIDTH - 17, placeholder=' ...')}"
        for key, text in found.items()
    ]
    return "\n".join(["Settings, listed by --help NAME:", *lines])


def as_markdown(reference: Reference, names: Sequence[str] = ()) -> str:
    """A line per setting: all, or those of these names and in groups of these names.

    Raises UserError for a name that there is not.
    """

    def is_in(key: str, *names: str) -> bool:
        return any(f"{key}.".startswith(f"{name}.") for name in names)

    keys = [entry.key for entries in reference.values() for entry in entries]
    for name in names:
        if not any(is_in(key, name) for key in keys):
            known = list(dict.fromkeys(key.partition(".")[0] for key in keys))
            what = f"there is no group or key {name!r}"
            step = did_you_mean(name, [*known, *keys])
            allowed = f"{', '.join(known)}, and their keys, such as optim.lr"
            raise UserError(what, where="--help", allowed=allowed, next_step=step)
    lines = []
    for title, entries in reference.items():
        shown = [entry for entry in entries if not names or is_in(entry.key, *names)]
        lines += ["", f"## {title}", ""] if shown else []
        lines += [f"- **`{key}`** ({facts}). {text}" for key, facts, text in shown]
    return "\n".join(lines) + "\n"
