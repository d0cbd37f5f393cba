"""List every setting with its default and description, as text for `--help` and as Markdown.

Owns: the grouping: a run's own keys, then each group, and each member of a choice, once.
Leaves out: the descriptions, which are the docstrings of the sections and their fields.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.loader import yaml_flow
from vitscale.config.schema import NAME, Groups, groups_in
from vitscale.config.section import Run
from vitscale.config.wording import describe_field

WIDTH = 98


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    allowed: str
    default: str | None
    """YAML; None: the key is required."""
    text: str


@dataclass(frozen=True, slots=True)
class SettingsGroup:
    title: str
    text: str
    settings: tuple[Setting, ...]


def settings_reference(run_types: Mapping[str, type[Run]]) -> list[SettingsGroup]:
    """The groups of all run types; a group that stages share comes once and names them."""
    found: dict[SettingsGroup, list[str]] = {}
    for stage, run_type in run_types.items():
        for group in _groups(run_type, f"stage: {stage}", _docstring(run_type), prefix=""):
            # A group may occur several times in one stage.
            if stage not in found.setdefault(group, []):
                found[group].append(stage)
    return [
        group
        if len(run_types) == len(stages) or group.title.startswith("stage: ")
        else SettingsGroup(f"{group.title} ({', '.join(stages)})", group.text, group.settings)
        for group, stages in sorted(found.items(), key=lambda item: item[0].title[:6] != "stage:")
    ]


def _groups(
    group: type[BaseModel],
    title: str,
    text: str,
    *,
    prefix: str,
    parents: str = "",
    leave_out: Collection[str] = (),
) -> Iterator[SettingsGroup]:
    """The group, and then the groups inside it.

    prefix: of its keys; parents: of the titles of those inside it.
    """
    fields = {key: info for key, info in group.model_fields.items() if key not in leave_out}
    inner = {key: groups for key, info in fields.items() if (groups := groups_in(info))}
    settings = tuple(
        _setting(f"{prefix}{key}", info, inner.get(key))
        for key, info in fields.items()
        if key not in inner or _is_setting(info, inner[key])
    )
    yield SettingsGroup(title, text, settings)
    for key, groups in inner.items():
        listed: dict[str, type[BaseModel]] = {}
        for name, member in (groups.by_name or {"": groups.members[0]}).items():
            where = f"{parents}{key}" + (", each item" if groups.is_list else "")
            chosen = f" with {NAME}: {name}" if groups.is_choice else ""
            text = _member_text(member, groups) or _one_line(fields[key].description)
            shared = _shared_with(member, listed)
            yield from _groups(
                member,
                f"{where}{chosen}",
                " ".join([text, *(f"As with {NAME}: {n}: {', '.join(k)}." for n, k in shared)]),
                prefix="" if groups.is_list else f"{prefix}{key}.",
                parents=f"{parents}{key}.",
                leave_out=[NAME, *(k for _, keys in shared for k in keys)] if chosen else (),
            )
            listed[name] = member


def _shared_with(
    member: type[BaseModel], listed: Mapping[str, type[BaseModel]]
) -> list[tuple[str, list[str]]]:
    """(name, keys) of the members listed before that have keys with the same meaning."""
    found: dict[str, list[str]] = {}
    for key, info in member.model_fields.items():
        for name, other in listed.items():
            same = other.model_fields.get(key)
            if same is not None and _same_setting(info, same):
                found.setdefault(name, []).append(key)
                break
    return list(found.items())


def _same_setting(one: FieldInfo, other: FieldInfo) -> bool:
    return groups_in(one) is None and _setting("", one, None) == _setting("", other, None)


def _is_setting(info: FieldInfo, groups: Groups) -> bool:
    """Whether the group as a whole is a setting: null, a list, or a choice."""
    return groups.is_choice or groups.is_list or type(None) in get_args(info.annotation)


def _setting(key: str, info: FieldInfo, groups: Groups | None) -> Setting:
    text, allowed, default = _one_line(info.description), describe_field(info), _default(info)
    if groups is not None and groups.is_choice:
        text = text or f"`{NAME}` chooses the group."
        default = groups.default_name or default
    elif groups is not None:
        text = text or _docstring(groups.members[0])
        allowed = "a list of groups, see below" if groups.is_list else "a group, see below; or null"
    return Setting(key, allowed, default, text)


def _default(info: FieldInfo) -> str | None:
    if info.is_required():
        return None
    return yaml_flow(_plain(info.get_default(call_default_factory=True)))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.model_dump() if isinstance(value, BaseModel) else value


def _docstring(group: type[BaseModel]) -> str:
    """The group's own docstring, not one that it inherits."""
    return _one_line(group.__dict__.get("__doc__"))


def _member_text(member: type[BaseModel], groups: Groups) -> str:
    """The docstring of a member, or of its key `name`, which is not listed itself."""
    text = _docstring(member)
    if groups.is_choice and not text:
        text = _one_line(member.model_fields[NAME].description)
    return text


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _facts(setting: Setting) -> str:
    """`allowed; default x`, or `allowed; required`."""
    default = "required" if setting.default is None else f"default {setting.default}"
    return f"{setting.allowed}; {default}"


def _by_name(groups: Sequence[SettingsGroup]) -> dict[str, list[SettingsGroup]]:
    """Top-level key -> its group with those inside it; stage -> its own keys."""
    found: dict[str, list[SettingsGroup]] = {}
    for group in groups:
        name = re.split(r"[ .,]", group.title.removeprefix("stage: "), maxsplit=1)[0]
        found.setdefault(name, []).append(group)
    return found


def groups_named(groups: Sequence[SettingsGroup], names: Sequence[str]) -> list[SettingsGroup]:
    """The groups of these top-level keys, or those that hold a key, with it alone.

    Raises UserErrors for unknown names.
    """
    known, errors = _by_name(groups), []
    keys: dict[str, list[SettingsGroup]] = {}
    for group in groups:
        for setting in group.settings:
            keys.setdefault(setting.key, []).append(replace(group, settings=(setting,)))
    known = {name: keys[name] for name in names if name in keys} | known
    for name in names:
        if name not in known:
            best = nearest(name, [*known, *keys])
            step = f"did you mean {best}?" if best else None
            what = f"there is no group or key {name!r}"
            allowed = f"{', '.join(known)}, and their keys, such as optim.lr"
            errors.append(UserError(what, where="--help", allowed=allowed, next_step=step))
    if errors:
        raise UserErrors(errors)
    return [group for name in dict.fromkeys(names) for group in known[name]]


def as_overview(groups: Sequence[SettingsGroup]) -> str:
    """A line for each top-level key."""
    lines = ["Settings, listed by --help NAME:"]
    for name, members in _by_name(groups).items():
        keys = [setting.key.removeprefix(f"{name}.") for setting in members[0].settings]
        choices = [
            chosen[1]
            for each in members
            if (chosen := re.match(rf"{name}\b[^.]* with {NAME}: (\w+)", each.title))
        ]
        text = ", ".join(keys) or members[0].text
        if choices and not members[0].title.startswith("stage: "):
            text = f"{NAME}: {', '.join(choices)}"
        shown = textwrap.shorten(text, WIDTH - 17, placeholder=" ...")
        lines.append(f"  {name:<14} {shown}")
    return "\n".join(lines)


def as_text(groups: Sequence[SettingsGroup]) -> str:
    """For a terminal."""
    lines = []
    for group in groups:
        lines += ["", *_wrapped(f"[{group.title}] {group.text}", "", "")]
        for setting in group.settings:
            lines += _wrapped(f"{setting.key}: {_facts(setting)}", "  ", "      ")
            lines += _wrapped(setting.text, "      ", "      ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def as_markdown(groups: list[SettingsGroup]) -> str:
    """For the documentation: a line per setting."""
    lines = []
    for group in groups:
        lines += ["", f"## {group.title}", *([group.text] if group.text else []), ""]
        lines += [f"- **`{each.key}`** ({_facts(each)}). {each.text}" for each in group.settings]
    return "\n".join(lines) + "\n"
