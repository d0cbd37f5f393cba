"""Describe field types and values in words, for error messages and `--help`.

Owns: phrases such as "a whole number above 0, or null".
Leaves out: which fields there are (`schema`), error reports (`validation_errors`).
"""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitscale.config.schema import NAME, groups_in
from vitscale.config.yaml_source import shorten

TYPE_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    Any: "anything",
}
KIND_WORDS: dict[type, str] = {
    bool: "a truth value",
    int: "a whole number",
    float: "a number with a fraction or exponent",
    str: "text",
    type(None): "null (nothing)",
    list: "a list",
    dict: "a group of keys",
}


def kind_of(value: object) -> str:
    """How YAML read a value."""
    return KIND_WORDS.get(type(value), type(value).__name__)


def show_value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(repr(value))


def describe_field(info: FieldInfo) -> str:
    """What a field may hold."""
    groups = groups_in(info)
    if groups is not None and groups.is_choice:
        text = f"a group with the key {NAME}: {', '.join(groups.by_name)}"
        if groups.is_list:
            return f"a list, each item {text}"
        return f"{text}, or null" if type(None) in get_args(info.annotation) else text
    limits = " and ".join(filter(None, map(_describe_limit, info.metadata)))
    return _describe(info.annotation, limits)


def _describe_limit(limit: Any) -> str:
    if isinstance(limit, annotated_types.Gt):
        return f"above {limit.gt}"
    if isinstance(limit, annotated_types.Ge):
        return f"at least {limit.ge}"
    if isinstance(limit, annotated_types.Lt):
        return f"below {limit.lt}"
    if isinstance(limit, annotated_types.Le):
        return f"at most {limit.le}"
    return ""


def _describe(annotation: Any, limits: str = "") -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        own = [limit for each in args[1:] for limit in getattr(each, "metadata", ())]
        return _describe(args[0], " and ".join(filter(None, map(_describe_limit, own))))
    if origin is Literal:
        return ", ".join("null" if arg is None else str(arg) for arg in args)
    if origin in (Union, types.UnionType):
        options = [_describe(arg, limits) for arg in args if arg is not type(None)]
        text = " or ".join(options)
        return f"{text}, or null" if type(None) in args else text
    if origin in (tuple, list):
        if len(args) == 2 and args[1] is Ellipsis or origin is list:
            return f"a list, each item {_describe(args[0])}"
        return f"a list of {len(args)} values, each {_describe(args[0])}"
    if origin is dict:
        return f"a group of keys, each with {_describe(args[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a group with the keys {', '.join(annotation.model_fields)}"
    words = TYPE_WORDS.get(annotation, str(annotation))
    return f"{words} {limits}" if limits and annotation in (int, float) else words
