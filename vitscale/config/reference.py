"""List every setting with its default and description, for `--help` and as Markdown.

The descriptions are the docstrings of the sections and their fields. Stages, and groups of a
choice, that share a setting share its entry.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from statistics import mode
from typing import NamedTuple

from vitscale.config.errors import UserError, did_you_mean
from vitscale.config.section import (
    NAME,
    Node,
    Run,
    default_name,
    describe,
    groups_of,
    settings_of,
    tree_of,
)
from vitscale.config.source import yaml_flow

WIDTH = 98


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
            text = _text(setting.node)
            if setting.key == "stage":
                text = f"{_text(tree_of(run_type))} {text}"
            is_outside = "." not in setting.key and not groups_of(setting.node)
            group = "" if is_outside else setting.key.partition(".")[0]
            content = (group, Entry(setting.key, _facts(setting.node), text))
            stages, names = found.setdefault(content, ({}, {}))
            stages[stage] = None
            names |= {setting.name: None} if setting.name else {}
    sections: Reference = {"Outside groups": []}
    for (group, entry), (stages, names) in found.items():
        # Not said again: the stages that most settings of the group have.
        usual = mode(tuple(each) for (other, _), (each, _) in found.items() if other == group)
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
    default = default_name(node) or (yaml_flow(node["default"]) if "default" in node else None)
    return f"{describe(node)}; default {default}" if default else f"{describe(node)}; required"


def _text(node: Node) -> str:
    text = node.get("description") or groups_of(node).get("", {}).get("description") or ""
    return " ".join(text.split())


def as_overview(reference: Reference) -> str:
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

    def inside(key: str, *names: str) -> bool:
        return any(f"{key}.".startswith(f"{name}.") for name in names)

    keys = [entry.key for entries in reference.values() for entry in entries]
    for name in names:
        if not any(inside(key, name) for key in keys):
            known = list(dict.fromkeys(key.partition(".")[0] for key in keys))
            what, step = f"there is no group or key {name!r}", did_you_mean(name, [*known, *keys])
            allowed = f"{', '.join(known)}, and their keys, such as optim.lr"
            raise UserError(what, where="--help", allowed=allowed, next_step=step)
    lines = []
    for title, entries in reference.items():
        shown = [entry for entry in entries if not names or inside(entry.key, *names)]
        lines += ["", f"## {title}", ""] if shown else []
        lines += [f"- **`{key}`** ({facts}). {text}" for key, facts, text in shown]
    return "\n".join(lines) + "\n"
