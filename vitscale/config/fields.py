"""Walk the fields of sections, and describe in words what they may hold.

Owns: groups of settings, choices of them by `name`, lists of them; phrases such as "a whole
number above 0, or null".
Leaves out: the sections (`section`), errors (`loader`), the list of settings (`reference`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Path = tuple[str, ...]
NAME = "name"
"""The key that chooses one of several groups."""
TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "anything",
}
LIMIT_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@dataclass(frozen=True, slots=True)
class DefaultName:
    """Marks a choice that is required, but whose name may be left out."""

    name: str


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of settings that a field, or each item of its list, can hold."""

    members: tuple[type[BaseModel], ...]
    by_name: dict[str, type[BaseModel]]
    """The members of a choice by the key `name`, of which there may be one alone; else empty."""
    is_list: bool
    default_name: str | None
    """The member of a choice that needs no name."""

    def chosen_by(self, value: Any) -> type[BaseModel] | None:
        """The member that a value names; None when its name is unknown or missing."""
        if not self.by_name:
            return self.members[0]
        name = value.get(NAME, self.default_name) if isinstance(value, dict) else self.default_name
        return self.by_name.get(name) if isinstance(name, str) else None


def groups_in(info: FieldInfo) -> Groups | None:
    """The groups that a field holds; None for a plain value."""
    found = [*_parts(info.annotation), *info.metadata]
    items = [part for each in found if _is_list(each) for part in _parts(get_args(each)[0])]
    is_list = any(map(_is_group, items))
    found += items
    members = tuple(part for part in found if _is_group(part))
    if not members:
        return None
    marks = [part for part in found if isinstance(part, FieldInfo)]
    if not any(mark.discriminator == NAME for mark in (info, *marks)):
        return Groups(members, {}, is_list, None)
    by_name = {str(member.model_fields[NAME].default): member for member in members}
    default = None if info.is_required() else info.get_default(call_default_factory=True)
    named = [default, *(part for part in found if isinstance(part, DefaultName))][-1]
    return Groups(members, by_name, is_list, getattr(named, NAME, None))


def _parts(annotation: Any) -> Iterator[Any]:
    """The types of a union, and the metadata of annotated ones."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        yield from _parts(inner)
        yield from marks
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _parts(member)
    else:
        yield annotation


def _is_list(annotation: Any) -> bool:
    args = get_args(annotation)
    return get_origin(annotation) is list or (
        get_origin(annotation) is tuple and args[-1] is Ellipsis
    )


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def value_at(values: Any, path: Path, default: Any = None) -> Any:
    for part in path:
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


def locate(
    run_type: type[BaseModel], path: Path, values: Any
) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """Follow `path`; where a name chooses the group, `values` has it.

    Returns the group whose keys are allowed there (None inside a plain value, in a list and in an
    unknown member), and the field at the path or the innermost one around it.
    """
    group: type[BaseModel] | None = run_type
    info, depth = None, 0
    while group is not None and depth < len(path) and path[depth] in group.model_fields:
        info = group.model_fields[path[depth]]
        groups = groups_in(info)
        depth += 2 if groups is not None and groups.is_list else 1
        group = groups.chosen_by(value_at(values, path[:depth])) if groups is not None else None
    return (group if depth == len(path) else None), info


def known_keys(group: type[BaseModel], values: Any, *, prefix: Path = ()) -> Iterator[Path]:
    """All keys but those in lists; of a choice those of the member that `values` names."""
    for key, info in group.model_fields.items():
        path = (*prefix, key)
        yield path
        groups = groups_in(info)
        if groups is not None and not groups.is_list:
            member = groups.chosen_by(value_at(values, path))
            if member is not None:
                yield from known_keys(member, values, prefix=path)


def describe_field(info: FieldInfo) -> str:
    """What a field may hold."""
    groups = groups_in(info)
    if groups is not None and groups.by_name:
        text = f"a group with the key {NAME}: {', '.join(groups.by_name)}"
        if groups.is_list:
            return f"a list, each item {text}"
        return f"{text}, or null" if type(None) in get_args(info.annotation) else text
    return _describe(info.annotation, info.metadata)


def _describe(annotation: Any, marks: Any = ()) -> str:
    """marks: metadata of the field, among it limits."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(args[0], [m for each in args[1:] for m in getattr(each, "metadata", ())])
    if origin is Literal:
        return ", ".join("null" if arg is None else str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        text = " or ".join(_describe(arg, marks) for arg in args if arg is not type(None))
        return f"{text}, or null" if type(None) in args else text
    if _is_list(annotation):
        return f"a list, each item {_describe(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)} values, each {_describe(args[0])}"
    if origin is dict:
        return f"a group of keys, each with {_describe(args[1])}"
    if _is_group(annotation):
        return f"a group with the keys {', '.join(annotation.model_fields)}"
    words = TYPE_WORDS.get(annotation, str(annotation))
    limits = [
        f"{word} {getattr(mark, name)}"
        for mark in marks
        for name, word in LIMIT_WORDS.items()
        if hasattr(mark, name)
    ]
    if limits and annotation in (int, float):
        return f"{words} {' and '.join(limits)}"
    return words
