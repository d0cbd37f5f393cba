"""Read YAML into plain values, with the file and line of every key beside them; merge and write it.

The dialect is a strict subset of YAML 1.2: no aliases, anchors, tags or duplicate keys; only true
and false are booleans; `1e-4` is a number, `.inf` is text.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from typing import Any, NamedTuple

import yaml

from vitscale.config.errors import UserError, did_you_mean
from vitscale.config.packaged import similar_configs
from vitscale.config.section import KeyPath, Node, chosen, is_list

COMMAND_LINE = "command line"
MAX_FILE_BYTES = 1 << 20
MISSING: Any = object()

CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}
INTEGER = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
# Text that needs no quotes, wherever it stands.
PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")
KIND_WORDS: dict[type, str] = {
    bool: "a truth value",
    int: "a whole number",
    float: "a number with a fraction or exponent",
    str: "text",
    type(None): "null (nothing)",
    list: "a list",
    dict: "a group of keys",
}


class Source(NamedTuple):
    """Plain values, and the place of every key and list item: "file:line" or "command line"."""

    values: Any
    places: dict[KeyPath, str]


def kind_of(value: object) -> str:
    """How YAML read a value."""
    return KIND_WORDS.get(type(value), type(value).__name__)


def show_value(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else shorten(repr(value))


def shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def value_at(values: Any, path: KeyPath, default: Any = None) -> Any:
    for part in path:
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


# ---- the dialect ------------------------------------------------------------------------------


def resolve_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar. A number beyond 64 bits is text."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if INTEGER.fullmatch(text):
        return whole if len(text) <= 24 and abs(whole := int(text)) < 1 << 63 else text
    if FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


class _Loader(yaml.SafeLoader):
    """Composes nodes without what would let a short text stand for much, or for code."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        for kind in ("anchor", "tag"):
            if (given := getattr(event, kind, None)) is not None:
                problem = f"{kind} {shorten(given)}; write plain values, or share through base:"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def read_yaml(text: str, *, name: str) -> Source:
    """Read one YAML text, None where it is empty. Raises UserError with a place in `name`."""
    places: dict[KeyPath, str] = {}

    def value_of(node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return resolve_scalar(node.value) if node.style is None else node.value
        found: dict[str, Any] = {}
        is_group = isinstance(node, yaml.MappingNode)
        for number, each in enumerate(node.value):
            key_node, value_node = each if is_group else (None, each)
            key = str(number if key_node is None else key_node.value)
            inner, place = (*path, key), _place(name, (key_node or value_node).start_mark)
            if is_group and not isinstance(key_node, yaml.ScalarNode):
                raise UserError("a list or group cannot be a key", where=place)
            if key in found:
                what = f"key {key!r} is given twice; first at {places[inner]}"
                where, step = f"{place}: {'.'.join(inner)}", "keep one of the two"
                raise UserError(what, where=where, next_step=step)
            places[inner] = place
            found[key] = value_of(value_node, inner)
        return found if is_group else list(found.values())

    try:
        node = yaml.compose(text, Loader=_Loader)
    # The others: characters that YAML does not allow, and escapes such as "\UFFFFFFFF".
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        what, mark = str(error).splitlines()[0], None
        if isinstance(error, yaml.MarkedYAMLError):
            what = " ".join(filter(None, (error.context, error.problem)))
            mark = error.problem_mark or error.context_mark
        raise UserError(f"not readable as YAML: {what}", where=_place(name, mark)) from None
    return Source(None if node is None else value_of(node, ()), places)


def _place(name: str, mark: yaml.Mark | None) -> str:
    return name if name.startswith(COMMAND_LINE) else f"{name}:{mark.line + 1 if mark else 1}"


# ---- files and overrides ----------------------------------------------------------------------


def shown_path(path: str) -> str:
    """`path`, relative to the working directory where it is inside."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") and os.path.isabs(path) else relative


def read_chain(path: str, *, where: str | None = None) -> list[Source]:
    """Read the file and its bases, the lowest first. Raises UserError for the first unusable one.

    where: what names the file; later the line of `base:`.
    """
    found: list[Source] = []
    files: list[str] = []
    while path:
        if os.path.realpath(path) in map(os.path.realpath, files):
            shown = " -> ".join(map(shown_path, [*files, path]))
            raise UserError(f"circular base: {shown}", where=where)
        files.append(path)
        source = _read_file(path, where=where)
        found.insert(0, source)
        base, where = source.values.pop("base", ""), f"{source.places.get(('base',))}: base"
        if not isinstance(base, str):
            what = f"{show_value(base)} is {kind_of(base)}"
            allowed = "the path of one YAML file, relative to this file"
            raise UserError(what, where=where, allowed=allowed)
        path = base and os.path.join(os.path.dirname(path), base)
    return found


def _read_file(path: str, *, where: str | None) -> Source:
    """Read one file. Raises UserError if there are no keys and values in it."""
    name = shown_path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        files = glob.glob(os.path.join(os.path.dirname(path), "*.y*ml"))
        step = did_you_mean(name, sorted(map(shown_path, files)), similar_configs(path))
        what = "file" if path.endswith(("yaml", "yml")) else "configuration"
        raise UserError(f"there is no {what} {name}", where=where, next_step=step) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=where or name) from None
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text", where=where or name) from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"is larger than {MAX_FILE_BYTES >> 20} MiB", where=where or name)
    source = read_yaml(text, name=name)
    if not isinstance(source.values, dict | None):
        what = f"contains {kind_of(source.values)} instead of keys and values"
        raise UserError(what, where=name, allowed="lines like `key: value`")
    return Source(source.values or {}, source.places)


def read_override(text: str) -> Source:
    """Read `key=value`, the value in YAML; text needs no quotes. Raises UserError."""
    key, equals, value = (part.strip() for part in text.partition("="))
    path, where = tuple(key.split(".")), f"{COMMAND_LINE}: {key}"
    if not equals:
        step = f"write {text}=VALUE, for example optim.lr=1e-3"
        raise UserError(f"{text!r} is not key=value", where=COMMAND_LINE, next_step=step)
    if not all(path):
        what, allowed = f"{key!r} is not a key", "names joined by dots"
        raise UserError(what, where=COMMAND_LINE, allowed=allowed)
    if path == ("base",):
        raise UserError("base can only be set in a file", where=where)
    if not value:
        step = f"write {key}=null or {key}='\"\"'"
        raise UserError("no value after =", where=where, next_step=step)
    found = Source(resolve_scalar(value), {})
    if value[0] in "[{'\"":
        found = read_yaml(value, name=where)
    places = {(*path, *inner): COMMAND_LINE for inner in found.places}
    values = found.values
    for depth in range(len(path), 0, -1):
        values, places[path[:depth]] = {path[depth - 1]: values}, COMMAND_LINE
    return Source(values, places)


# ---- merging ----------------------------------------------------------------------------------


def merge(under: Source, over: Source, group: Node | None = None) -> Source:
    """`over` wins; groups are merged key by key, everything else is replaced whole.

    Where `over` chooses another group of a choice in `group`, it inherits only the keys that the
    new one has.
    """
    values = _merged(under.values, over.values, group)
    places = (under.places | over.places).items()
    kept = {k: where for k, where in places if value_at(values, k, MISSING) is not MISSING}
    return Source(values, kept)


def _merged(under: Any, over: Any, group: Node | None) -> Any:
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    merged = dict(under)
    for key, value in over.items():
        inherited, new = under.get(key), None
        node = group["properties"].get(key) if group is not None else None
        if node is not None and not is_list(node) and isinstance(inherited, dict):
            former, new = chosen(node, inherited), chosen(node, _merged(inherited, value, None))
            if former is not None and new is not None:
                lost = former["properties"].keys() - new["properties"].keys()
                inherited = {name: each for name, each in inherited.items() if name not in lost}
        merged[key] = _merged(inherited, value, new)
    return merged


# ---- writing ----------------------------------------------------------------------------------


def yaml_flow(value: Any) -> str:
    """Write one value on one line, in our dialect."""
    if isinstance(value, dict):
        pairs = (f"{yaml_flow(key)}: {yaml_flow(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_flow, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if PLAIN.fullmatch(value) and isinstance(resolve_scalar(value), str):
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)
