"""List every setting with its default and description, for `--help` and as Markdown.

Owns: the grouping: a run's own keys, then each group, and each group of a choice, once.
Leaves out: the descriptions, which are the docstrings of the sections and their fields.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vitscale.config.errors import UserError, did_you_mean
from vitscale.config.schema import NAME, Node, default_name, describe, groups_of, is_list, tree_of
from vitscale.config.section import Run
from vitscale.config.source import yaml_flow

WIDTH = 98


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    facts: str
    """What it may hold, and its default in YAML."""
    text: str


@dataclass(frozen=True, slots=True)
class SettingsGroup:
    title: str
    text: str
    settings: tuple[Setting, ...]


def settings_reference(run_types: Mapping[str, type[Run]]) -> list[SettingsGroup]:
    """The groups of all run types; a group that stages share comes once and names them.

    Groups of one name, such as those of a choice, list what they share once.
    """
    stages: dict[SettingsGroup, list[str]] = {}
    for stage, run_type in run_types.items():
        for group in _groups(tree_of(run_type), f"stage: {stage}", ""):
            if stage not in stages.setdefault(group, []):
                stages[group].append(stage)
    listed: dict[Setting, str] = {}
    found = []
    for group in sorted(stages, key=lambda group: not group.title.startswith("stage: ")):
        shared: dict[str, list[str]] = {}
        for each in group.settings:
            owner = listed.setdefault(each, group.title)
            if owner != group.title:
                shared.setdefault(owner, []).append(each.key.rpartition(".")[2])
        also = [f"As with {owner}: {', '.join(keys)}." for owner, keys in shared.items()]
        own = tuple(each for each in group.settings if listed[each] == group.title)
        title = group.title
        if len(stages[group]) < len(run_types) and not title.startswith("stage: "):
            title += f" ({', '.join(stages[group])})"
        found.append(SettingsGroup(title, " ".join([group.text, *also]).strip(), own))
    return found


def _groups(group: Node, title: str, prefix: str) -> Iterator[SettingsGroup]:
    """The group, and then the groups inside it."""
    settings = []
    for key, node in group["properties"].items():
        inner, facts = groups_of(node), describe(node)
        if "" in inner and "anyOf" not in node and not is_list(node):
            continue  # a group that is always there is no setting
        if key == NAME and "const" in node:
            continue  # in the title
        if "" in inner:
            facts = "a list of groups" if is_list(node) else "a group, or null"
        default = default_name(node) or (yaml_flow(node["default"]) if "default" in node else None)
        facts += f"; default {default}" if default else "; required"
        text = node.get("description") or inner.get("", {}).get("description")
        settings.append(Setting(f"{prefix}{key}", facts, _line(text)))
    yield SettingsGroup(title, _line(group.get("description")), tuple(settings))
    for key, node in group["properties"].items():
        path = f"{prefix}{key}" + (".N" if is_list(node) else "")
        for name, inner in groups_of(node).items():
            named = f"{path} with {NAME}: {name}" if name else path
            about = inner.get("description") or inner["properties"].get(NAME, {}).get("description")
            text = about or node.get("description")
            yield from _groups(inner | {"description": text}, named, f"{path}.")


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def groups_named(groups: Sequence[SettingsGroup], names: Sequence[str]) -> list[SettingsGroup]:
    """The settings of these names, and in groups of these names. Raises UserError for others."""
    keys = [each.key for group in groups for each in group.settings]
    inside = {name: {key for key in keys if f"{key}.".startswith(f"{name}.")} for name in names}
    for name in (name for name in names if not inside[name]):
        known = list(dict.fromkeys(key.partition(".")[0] for key in keys))
        what, step = f"there is no group or key {name!r}", did_you_mean(name, [*known, *keys])
        allowed = f"{', '.join(known)}, and their keys, such as optim.lr"
        raise UserError(what, where="--help", allowed=allowed, next_step=step)
    asked = set().union(*inside.values())
    found = [(group, tuple(s for s in group.settings if s.key in asked)) for group in groups]
    return [replace(group, settings=settings) for group, settings in found if settings]


def as_overview(run_types: Mapping[str, type[Run]]) -> str:
    """A line for the plain keys of each stage, and for each group."""
    found: dict[str, str] = {}
    for stage, run_type in run_types.items():
        nodes = tree_of(run_type)["properties"]
        found[f"({stage})"] = ", ".join(key for key in nodes if not groups_of(nodes[key]))
        for key, node in nodes.items():
            for name, group in groups_of(node).items():
                names = f"{NAME}: {', '.join(groups_of(node))}"
                found.setdefault(key, names if name else ", ".join(group["properties"]))
    lines = [
        f"  {name:<14} {textwrap.shorten(text, WIDTH - 17, placeholder=' ...')}"
        for name, text in found.items()
    ]
    return "\n".join(["Settings, listed by --help NAME:", *lines])


def as_text(groups: Sequence[SettingsGroup]) -> str:
    """For a terminal."""

    def wrapped(text: str, first: str = "", rest: str = "      ") -> str:
        return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest)

    lines = []
    for group in groups:
        lines += ["", wrapped(f"[{group.title}] {group.text}", rest="")]
        for each in group.settings:
            lines += [wrapped(f"{each.key}: {each.facts}", "  "), wrapped(each.text, "      ")]
    return "\n".join(lines).lstrip("\n")


def as_markdown(groups: Sequence[SettingsGroup]) -> str:
    """For the documentation: a line per setting."""
    lines = []
    for group in groups:
        lines += ["", f"## {group.title}", *([group.text] if group.text else []), ""]
        lines += [f"- **`{each.key}`** ({each.facts}). {each.text}" for each in group.settings]
    return "\n".join(lines) + "\n"
