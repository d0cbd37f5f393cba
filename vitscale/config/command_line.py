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
from typing import Generic, NamedTuple, NoReturn

from vitscale.config.errors import UserError, UserErrors, did_you_mean, print_note
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

    # A single positional value or list has a name of its own; other words are the configuration.
    usage = f"{program} CONFIG [key=value ...]"
    if words_key is not None:
        usage = f"{program} [--config FILE] [key=value ...] {words_key.upper()}"
    parser = _Parser(
        usage=usage,
        description=description,
        epilog="\n".join([EPILOG, "", *(f"  {example}" for example in examples)]),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(overrides=[], switches=[])
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file, or a name of `vitscale configs`"
    )
    for name, key in options.items():
        parser.add_argument(
            name,
            dest="overrides",
            action="append",
            type=f"{key}={{}}".format,
            metavar="VALUE",
            help=f"the same as {key}=VALUE",
        )
    for name, text in switches.items():
        parser.add_argument(
            name, dest="switches", action="append_const", const=name, help=text
        )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the resolved configuration with the source of every value, and end",
    )
    parser.add_argument(
        "--help",
        "-h",
        nargs="*",
        metavar="NAME",
        help="print this text, or the settings of these groups and keys, and end",
    )
    # Launchers add it; the environment (LOCAL_RANK) is what counts.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args(argv)

    if arguments.help is not None:
        reference = settings_reference(by_stage)
        if arguments.help:
            print(as_markdown(reference, arguments.help))
        else:
            print(f"{parser.format_help()}\n{_as_overview(reference)}")
        raise SystemExit(0)

    # The parser returns words and unknown switches in one list.
    known = ["--config", *options, *switches, "--print-config", "--help"]
    errors = []
    overrides = []
    plain = []
    remaining = iter(rest)
    for word in remaining:
        if word.startswith("-"):
            name, _, given = word.partition("=")
            step = did_you_mean(name, known)
            # Most others are settings in the form of a switch, with the next word as their value.
            if step is None:
                step = f"write {name.lstrip('-')}={given or next(remaining, 'VALUE')}"
            error = UserError(
                f"unknown switch {name}",
                where=COMMAND_LINE,
                allowed=", ".join(known),
                next_step=step,
            )
            errors.append(error)
        elif words_key is None or "=" in word:
            overrides.append(word)
        else:
            plain.append(word)
    overrides += arguments.overrides

    if plain:
        # Several words are a list in any case, so that a key for one of them refuses them.
        trees = map(tree_of, by_stage.values())
        takes_list = any(is_list(tree["properties"][words_key]) for tree in trees)
        value = plain if takes_list or len(plain) > 1 else plain[0]
        # Words are no YAML, so they are quoted.
        overrides.append(f"{words_key}={json.dumps(value, ensure_ascii=False)}")

    if arguments.config is None and needs_config:
        shown = examples or [f"{program} CONFIG  # vitscale configs lists them"]
        step = "\n    ".join(["one of", *shown, f"{program} --help"])
        error = UserError("no configuration given", where=COMMAND_LINE, next_step=step)
        raise UserErrors([*errors, error])

    loaded = load_run(run_types, arguments.config, overrides=overrides, errors=errors)
    if arguments.print_config:
        print(run_to_yaml(loaded.run, places=loaded.places), end="")
        raise SystemExit(0)
    for line in loaded.settled:
        print_note(line)
    return Command(loaded.run, frozenset(arguments.switches), arguments.config)


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
    # (group, entry) -> stages and names of groups, as dicts because these keep the order.
    users: dict[tuple[str, Entry], tuple[dict[str, None], dict[str, None]]] = {}
    for stage, run_type in run_types.items():
        for setting in list(settings_of(run_type).values())[1:]:
            key = setting.key
            node = setting.node
            text = _text(node)
            if key == "stage":
                text = f"{_text(tree_of(run_type))} {text}"
            group = ""
            if "." in key or groups_of(node):
                group = key.partition(".")[0]
            stages, names = users.setdefault(
                (group, Entry(key, _facts(node), text)), ({}, {})
            )
            stages[stage] = None
            if setting.name:
                names[setting.name] = None

    sections: Reference = {"Outside groups": []}
    entries = users.items()
    for (group, entry), (stages, names) in entries:
        title = "Outside groups"
        usual = tuple(run_types)
        if group:
            # An entry does not repeat the stages that most settings of its group have.
            usual = mode(tuple(s) for (name, _), (s, _) in entries if name == group)
            title = group
            if len(run_types) > 1:
                title += f" ({', '.join(usual)})"

        facts = []
        if usual != tuple(stages):
            facts.append(f"stage: {', '.join(stages)}")
        if names:
            facts.append(f"{NAME}: {', '.join(names)}")
        if entry.facts:
            facts.append(entry.facts)
        sections.setdefault(title, []).append(entry._replace(facts="; ".join(facts)))
    sections["Outside groups"].sort(key=lambda entry: entry.key)
    return sections


def _facts(node: Node) -> str:
    if "const" in node:
        return ""
    if "properties" in node:
        return describe(node)
    default = default_name(node)
    if default is None and "default" in node:
        default = yaml_flow(node["default"])
    status = "required"
    if default is not None:
        status = f"default {default}"
    return f"{describe(node)}; {status}"


def _text(node: Node) -> str:
    group = groups_of(node).get("", {})
    text = node.get("description") or group.get("description", "")
    return " ".join(text.split())


def _as_overview(reference: Reference) -> str:
    """A line for the settings outside groups, and for each group."""
    outside, *groups = reference.values()
    texts = {"": ", ".join(dict.fromkeys(entry.key for entry in outside))}
    texts |= {entries[0].key: entries[0].facts for entries in groups}
    lines = ["Settings, listed by --help NAME:"]
    for key, text in texts.items():
        short = textwrap.shorten(text, WIDTH - 17, placeholder=" ...")
        lines.append(f"  {key:<14} {short}")
    return "\n".join(lines)


def as_markdown(reference: Reference, names: Sequence[str] = ()) -> str:
    """A line per setting: all, or those of these names and in groups of these names.

    Raises UserError for an unknown name.
    """

    def is_in(key: str, *names: str) -> bool:
        return any(f"{key}.".startswith(f"{name}.") for name in names)

    keys = [entry.key for entries in reference.values() for entry in entries]
    for name in names:
        if not any(is_in(key, name) for key in keys):
            known = list(dict.fromkeys(key.partition(".")[0] for key in keys))
            raise UserError(
                f"there is no group or key {name!r}",
                where="--help",
                allowed=f"{', '.join(known)}, and their keys, such as optim.lr",
                next_step=did_you_mean(name, [*known, *keys]),
            )

    lines = []
    for title, entries in reference.items():
        shown = [entry for entry in entries if not names or is_in(entry.key, *names)]
        if shown:
            # A group without any of the names has no title either.
            lines += ["", f"## {title}", ""]
        lines += [f"- **`{key}`** ({facts}). {text}" for key, facts, text in shown]
    return "\n".join(lines) + "\n"
