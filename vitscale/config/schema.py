"""Walk the settings of a run type: groups, choices of groups by name, lists of groups.

Leaves out: values (`loader`), errors (`validation_errors`), words (`wording`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitscale.config.yaml_source import Path

NAME = "name"
"""The key that chooses one of several groups."""


@dataclass(frozen=True, slots=True)
class DefaultName:
    """Marks a choice that is required, but whose name may be left out."""

    name: str


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of settings that a field, or each item of its list, can hold."""

    members: tuple[type[BaseModel], ...]
    is_choice: bool
    """Whether the key `name` chooses the member, of which there may be one alone."""
    is_list: bool
    default_name: str | None
    """The member of a choice that needs no name."""

    @property
    def by_name(self) -> dict[str, type[BaseModel]]:
        if not self.is_choice:
            return {}
        return {str(member.model_fields[NAME].default): member for member in self.members}

    def chosen_by(self, value: Any) -> type[BaseModel] | None:
        """The member that a value names; None when its name is unknown or missing."""
        if not self.is_choice:
            return self.members[0]
        name = value.get(NAME, self.default_name) if isinstance(value, dict) else self.default_name
        return self.by_name.get(name) if isinstance(name, str) else None


def groups_in(info: FieldInfo) -> Groups | None:
    """The groups that a field holds; None for a plain value."""
    members, is_list, is_choice = _members(info.annotation)
    if not members:
        return None
    is_choice = is_choice or info.discriminator == NAME
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    default_name = getattr(default, NAME, None) if is_choice else None
    for mark in (*info.metadata, *_marks(info.annotation)):
        if isinstance(mark, DefaultName):
            default_name = mark.name
    return Groups(members, is_choice=is_choice, is_list=is_list, default_name=default_name)


def _marks(annotation: Any) -> Iterator[Any]:
    """Metadata of a type that may be null, which the field does not show."""
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _marks(member)


def _members(annotation: Any) -> tuple[tuple[type[BaseModel], ...], bool, bool]:
    """(group types, whether in a list, whether chosen by name)."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,), False, False
    if origin is Annotated:
        members, is_list, is_choice = _members(args[0])
        named = any(isinstance(m, FieldInfo) and m.discriminator == NAME for m in args[1:])
        return members, is_list, is_choice or named
    if origin in (Union, types.UnionType):
        found = [_members(arg) for arg in args]
        members = tuple(member for inner in found for member in inner[0])
        return members, any(inner[1] for inner in found), any(inner[2] for inner in found)
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        members, _, is_choice = _members(args[0])
        return members, True, is_choice
    return (), False, False


@dataclass(frozen=True, slots=True)
class Location:
    """What a run type has at a path."""

    group: type[BaseModel] | None
    """The group whose keys are allowed here; None inside a plain value and in an unknown member."""
    info: FieldInfo | None
    """The field at the path, or the innermost one around it."""
    replaceable: Path
    """The path, or the part of it without which the default takes the place of a bad value."""


def locate(run_type: type[BaseModel], path: Path, values: Any) -> Location:
    """Follow `path`; where a name chooses the group, `values` has it."""
    group: type[BaseModel] | None = run_type
    info: FieldInfo | None = None
    replaceable: Path | None = None
    depth = 0
    while depth < len(path) and group is not None and path[depth] in group.model_fields:
        info = group.model_fields[path[depth]]
        values = _child(values, path[depth])
        depth += 1
        groups = groups_in(info)
        if groups is not None and groups.is_list:
            replaceable = replaceable or path[:depth]
            group = (
                groups.chosen_by(values := _child(values, path[depth])) if path[depth:] else None
            )
            depth += 1
        else:
            group = groups.chosen_by(values) if groups else None
        if group is None:
            replaceable = replaceable or path[:depth]
    if depth < len(path):
        group = None
        replaceable = replaceable or path[: depth + 1]
    return Location(group, info, replaceable or path)


def _child(values: Any, part: str) -> Any:
    if isinstance(values, dict):
        return values.get(part)
    if isinstance(values, list) and part.isdigit() and int(part) < len(values):
        return values[int(part)]
    return None


def known_keys(group: type[BaseModel], values: Any = None, *, prefix: Path = ()) -> Iterator[Path]:
    """All keys, groups before their members; of a choice those of the member in `values`.

    Without a name in `values`, the keys of all members. Items of lists only as far as `values`
    has them.
    """
    for key, info in group.model_fields.items():
        path = (*prefix, key)
        yield path
        if (groups := groups_in(info)) is None:
            continue
        value = _child(values, key)
        items = [(path, value)]
        if groups.is_list:
            listed = value if isinstance(value, list) else []
            items = [((*path, str(position)), item) for position, item in enumerate(listed)]
        for place, item in items:
            named = isinstance(item, dict) and NAME in item
            chosen = groups.chosen_by(item) if named or not groups.is_choice else None
            inner = [chosen] if chosen else groups.members
            # Members share keys such as `name`.
            yield from dict.fromkeys(
                found for member in inner for found in known_keys(member, item, prefix=place)
            )
