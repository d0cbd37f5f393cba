"""List every setting with its default and description, as text for `--help` and as Markdown.

Owns: the grouping: a run's own keys, then each group, and each member of a choice, once.
Leaves out: the descriptions, which are the docstrings of the sections and their fields.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitscale.config.errors import UserError, UserErrors, did_you_mean
from vitscale.config.fields import NAME, describe_field, groups_in
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
    """The groups of all run types; a group that stages share comes once and names them."""
    found: dict[SettingsGroup, list[str]] = {}
    listed: dict[Setting, str] = {}
    for stage, run_type in run_types.items():
        title = f"stage: {stage}"
        for group in _groups(run_type, title, _docstring(run_type), label=title, listed=listed):
            # A group may occur several times in one stage.
            if stage not in found.setdefault(group, []):
                found[group].append(stage)
    return [
        group
        if len(run_types) == len(stages) or group.title.startswith("stage: ")
        else replace(group, title=f"{group.title} ({', '.join(stages)})")
        for group, stages in sorted(found.items(), key=lambda item: item[0].title[:6] != "stage:")
    ]


def _groups(
    group: type[BaseModel],
    title: str,
    text: str,
    *,
    label: str = "",
    listed: dict[Setting, str],
    prefix: str = "",
    parents: str = "",
) -> Iterator[SettingsGroup]:
    """The group, and then the groups inside it.

    label: what chooses the group; listed: the settings of other choices, with their labels, which
    are not listed again. prefix: of the keys; parents: of the titles of the groups inside.
    """
    settings = []
    shared: dict[str, list[str]] = {}
    for key, info in group.model_fields.items():
        setting = _setting(f"{prefix}{key}", info)
        if setting is None or (key == NAME and label.startswith(NAME)):
            continue
        owner = listed.setdefault(setting, label)
        if owner == label:
            settings.append(setting)
        else:
            shared.setdefault(owner, []).append(key)
    also = [f"As with {owner}: {', '.join(keys)}." for owner, keys in shared.items()]
    yield SettingsGroup(title, " ".join([text, *also]).strip(), tuple(settings))
    for key, info in group.model_fields.items():
        groups = groups_in(info)
        if groups is None:
            continue
        where = f"{parents}{key}" + (", each item" if groups.is_list else "")
        inside: dict[Setting, str] = {}
        for name, member in (groups.by_name or {"": groups.members[0]}).items():
            chosen = f"{NAME}: {name}" if name else ""
            own = _docstring(member)
            if name and not own:
                own = _one_line(member.model_fields[NAME].description)
            yield from _groups(
                member,
                f"{where} with {chosen}" if name else where,
                own or _one_line(info.description),
                label=chosen,
                listed=inside,
                prefix="" if groups.is_list else f"{prefix}{key}.",
                parents=f"{parents}{key}.",
            )


def _setting(key: str, info: FieldInfo) -> Setting | None:
    """None for a group that as a whole is no setting: neither null, nor a list, nor a choice."""
    text, allowed, groups = _one_line(info.description), describe_field(info), groups_in(info)
    default = None
    if not info.is_required():
        default = yaml_flow(_plain(info.get_default(call_default_factory=True)))
    if groups is not None and groups.by_name:
        text = text or f"`{NAME}` chooses the group."
        default = groups.default_name or default
    elif groups is not None:
        if not groups.is_list and type(None) not in get_args(info.annotation):
            return None
        text = text or _docstring(groups.members[0])
        allowed = "a list of groups, see below" if groups.is_list else "a group, see below; or null"
    return Setting(key, f"{allowed}; {f'default {default}' if default else 'required'}", text)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.model_dump() if isinstance(value, BaseModel) else value


def _docstring(group: type[BaseModel]) -> str:
    """The group's own docstring, not one that it inherits."""
    return _one_line(group.__dict__.get("__doc__"))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _by_name(groups: Sequence[SettingsGroup]) -> dict[str, list[SettingsGroup]]:
    """Top-level key -> its group with those inside it; stage -> its own keys."""
    found: dict[str, list[SettingsGroup]] = {}
    for group in groups:
        name = re.split(r"[ .,]", group.title.removeprefix("stage: "), maxsplit=1)[0]
        found.setdefault(name, []).append(group)
    return found


def groups_named(groups: Sequence[SettingsGroup], names: Sequence[str]) -> list[SettingsGroup]:
    """The groups of these names, or those that hold a key, with it alone.

    Raises UserErrors for unknown names.
    """
    known, errors, found = _by_name(groups), [], []
    for name in dict.fromkeys(names):
        keys = [(group, each) for group in groups for each in group.settings if each.key == name]
        inside = [group for group in groups if re.split("[ ,]", group.title)[0] == name]
        if not keys and not inside and name not in known:
            what = f"there is no group or key {name!r}"
            allowed = f"{', '.join(known)}, and their keys, such as optim.lr"
            step = did_you_mean(name, [*known, *(s.key for g in groups for s in g.settings)])
            errors.append(UserError(what, where="--help", allowed=allowed, next_step=step))
        found += known.get(name) or inside
        found += [replace(group, settings=(each,)) for group, each in keys]
    if errors:
        raise UserErrors(errors)
    return found


def as_overview(groups: Sequence[SettingsGroup]) -> str:
    """A line for each top-level key."""
    lines = ["Settings, listed by --help NAME:"]
    for name, members in _by_name(groups).items():
        chosen = [re.match(rf"{name}\b[^.]* with {NAME}: (\w+)", each.title) for each in members]
        choices = ", ".join(match[1] for match in chosen if match)
        keys = ", ".join(each.key.removeprefix(f"{name}.") for each in members[0].settings)
        is_choice = choices and not members[0].title.startswith("stage: ")
        text = f"{NAME}: {choices}" if is_choice else keys or members[0].text
        lines.append(f"  {name:<14} {textwrap.shorten(text, WIDTH - 17, placeholder=' ...')}")
    return "\n".join(lines)


def as_text(groups: Sequence[SettingsGroup]) -> str:
    """For a terminal."""
    lines = []
    for group in groups:
        lines += ["", *_wrapped(f"[{group.title}] {group.text}", "", "")]
        for setting in group.settings:
            lines += _wrapped(f"{setting.key}: {setting.facts}", "  ", "      ")
            lines += _wrapped(setting.text, "      ", "      ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def as_markdown(groups: Sequence[SettingsGroup]) -> str:
    """For the documentation: a line per setting."""
    lines = []
    for group in groups:
        lines += ["", f"## {group.title}", *([group.text] if group.text else []), ""]
        lines += [f"- **`{each.key}`** ({each.facts}). {each.text}" for each in group.settings]
    return "\n".join(lines) + "\n"
