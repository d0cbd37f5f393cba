"""Field types and values in words, for error messages and `--help`.

Owns: "a whole number above 0, or null" and the list of all dotted keys of a run type.
Leaves out: finding errors (`loader`).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vitscale.config.yaml_source import Path, shorten

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


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The section type inside an annotation, if it is one (or one or null)."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def describe_field(info: FieldInfo) -> str:
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
    if (model := model_in(annotation)) is not None:
        return f"a group with the keys {', '.join(model.model_fields)}"
    words = TYPE_WORDS.get(annotation, str(annotation))
    return f"{words} {limits}" if limits and annotation in (int, float) else words


def known_keys(run_type: type[BaseModel], *, prefix: Path = ()) -> Iterator[Path]:
    """All keys of a run type, groups before their members."""
    for name, info in run_type.model_fields.items():
        yield (*prefix, name)
        if (model := model_in(info.annotation)) is not None:
            yield from known_keys(model, prefix=(*prefix, name))


def field_at(run_type: type[BaseModel], path: Path) -> FieldInfo | None:
    """The field that holds `path`; for a path inside a list or free group, the field around it."""
    model: type[BaseModel] | None = run_type
    info: FieldInfo | None = None
    for part in path:
        if model is None or part not in model.model_fields:
            break
        info = model.model_fields[part]
        model = model_in(info.annotation)
    return info
