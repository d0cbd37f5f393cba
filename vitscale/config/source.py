"""Read YAML into plain values, with the file and line of every key beside them; merge and write it.

Owns: the dialect (a strict subset of YAML 1.2: no aliases, anchors, tags or duplicate keys; only
true and false are booleans; `1e-4` is a number), `base:` chains, and what a file inherits.
Leaves out: what the keys mean (`loader`).
"""

from __future__ import annotations

import glob
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import yaml

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.schema import Node, Path, chosen, is_list, value_at

COMMAND_LINE = "command line"
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32

CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}
INTEGER = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
KIND_WORDS: dict[type, str] = {
    bool: "a truth value",
    int: "a whole number",
    float: "a number with a fraction or exponent",
    str: "text",
    type(None): "null (nothing)",
    list: "a list",
    dict: "a group of keys",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Plain values, and the place of every key and list item: "file:line" or "command line"."""

    values: dict[str, Any]
    places: dict[Path, str]


def kind_of(value: object) -> str:
    """How YAML read a value."""
    return KIND_WORDS.get(type(value), type(value).__name__)


def show_value(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else shorten(repr(value))


def shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


# ---- the dialect ------------------------------------------------------------------------------


def resolve_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar. Raises ValueError for numbers out of range."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if INTEGER.fullmatch(text):
        if len(text) > 24 or abs(whole := int(text)) >= 1 << 63:
            raise ValueError("is a whole number beyond 64 bits")
        return whole
    if NOT_FINITE.fullmatch(text):
        raise ValueError("is not a finite number")
    if FLOAT.fullmatch(text):
        if math.isinf(number := float(text)):
            raise ValueError("is a number too large for a 64-bit float")
        return number
    return text


class _Loader(yaml.SafeLoader):
    """Composes nodes without what would let a short text stand for much, or for code."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        problem = None
        if event.anchor is not None:
            kind = "alias *" if isinstance(event, yaml.AliasEvent) else "anchor &"
            problem = f"{kind}{event.anchor}; write the value out, or share it through base:"
        elif event.tag is not None:
            problem = f"tag {shorten(event.tag)}; remove it, values are plain values"
        elif self.depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH} levels"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reader:
    """Turns one text into values. Collects places and errors; a wrong scalar stays text."""

    def __init__(self, name: str, errors: list[UserError]) -> None:
        self.name, self.errors = name, errors
        self.places: dict[Path, str] = {}

    def document(self, text: str, path: Path = ()) -> Any:
        """Read YAML; None if there is nothing in it. Raises UserError if it cannot be read."""
        try:
            node = yaml.compose(text, Loader=_Loader)
            return None if node is None else self._value(node, path, _line(node))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = " ".join(part for part in (error.context, error.problem) if part)
            line = mark.line + 1 if mark else 1
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            # Characters that YAML does not allow, and escapes such as "\UFFFFFFFF".
            what, line = str(error).splitlines()[0], 1
        raise UserError(f"not readable as YAML: {what}", where=self._where(line, path))

    def scalar(self, text: str, path: Path, line: int, *, is_plain: bool) -> Any:
        try:
            text.encode()
            return resolve_scalar(text) if is_plain else text
        except UnicodeEncodeError:
            self._report(f"{ascii(text)[:80]} is not valid Unicode text", line, path)
        except ValueError as error:
            self._report(f"{shorten(text)} {error}", line, path, allowed="finite numbers")
        return text

    def _where(self, line: int, path: Path) -> str:
        place = self.name if self.name == COMMAND_LINE else f"{self.name}:{line}"
        return ": ".join(filter(None, (place, ".".join(path))))

    def _report(self, what: str, line: int, path: Path, **more: str) -> None:
        self.errors.append(UserError(what, where=self._where(line, path), **more))

    def _value(self, node: yaml.Node, path: Path, line: int) -> Any:
        """line: that of the value's key, which places it."""
        self.places[path] = self._where(line, ())
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node.value, path, line, is_plain=node.style is None)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self._value(each, (*path, str(i)), _line(each)) for i, each in items]
        group: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, inner, line = key_node.value, (*path, str(key_node.value)), _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._report("a list or group cannot be a key", line, path)
            elif key in group:
                first = self.places[inner].rpartition(":")[2]
                also = f"; first on line {first}" if first.isdecimal() else ""
                what, step = f"key {key!r} is given twice{also}", "keep one of the two"
                self._report(what, line, inner, next_step=step)
            else:
                group[key] = self._value(value_node, inner, line)
        return group


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def read_yaml(text: str, *, name: str) -> Any:
    """Read the values of one document in our dialect. Raises UserErrors with places in `name`."""
    errors: list[UserError] = []
    try:
        value = _Reader(name, errors).document(text)
    except UserError as error:
        errors.append(error)
    if errors:
        raise UserErrors(errors)
    return value


# ---- files and overrides ----------------------------------------------------------------------


def shown_path(path: str) -> str:
    """`path`, relative to the working directory where it is inside."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") and os.path.isabs(path) else relative


def read_chain(path: str, *, errors: list[UserError], where: str | None = None) -> list[Source]:
    """Read the file and its bases, the lowest first; nothing if one of them is unusable.

    where: what names the file; later the line of `base:`.
    """
    found: list[Source] = []
    files: list[str] = []
    try:
        while path:
            if os.path.realpath(path) in map(os.path.realpath, files):
                shown = " -> ".join(map(shown_path, [*files, path]))
                raise UserError(f"circular base: {shown}", where=where)
            files.append(path)
            source = _read_file(path, where=where, errors=errors)
            found.insert(0, source)
            base, where = source.values.pop("base", ""), f"{source.places.get(('base',))}: base"
            if not isinstance(base, str):
                what = f"{show_value(base)} is {kind_of(base)}"
                allowed = "the path of one YAML file, relative to this file"
                raise UserError(what, where=where, allowed=allowed)
            path = base and os.path.join(os.path.dirname(path), base)
    except UserError as error:
        errors.append(error)
        return []
    return found


def _read_file(path: str, *, where: str | None, errors: list[UserError]) -> Source:
    """Read one file. Raises UserError if there are no keys and values in it."""
    name = shown_path(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        folder = os.path.dirname(path) or "."
        files = sorted(glob.glob("*.y*ml", root_dir=folder))
        listed = ", ".join(files[:20]) + (", ..." if len(files) > 20 else "")
        best = nearest(os.path.basename(path), files)
        raise UserError(
            f"there is no file {name}",
            where=where,
            allowed=f"in {shown_path(folder)}: {listed or 'no YAML files'}",
            next_step=f"did you mean {shown_path(os.path.join(folder, best))}?" if best else None,
        ) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=where or name) from None
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text", where=where or name) from None
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"is larger than {MAX_FILE_BYTES >> 20} MiB", where=where or name)
    reader = _Reader(name, errors)
    values = reader.document(text)
    if not isinstance(values, dict | None):
        what = f"contains {kind_of(values)} instead of keys and values"
        raise UserError(what, where=reader.places[()], allowed="lines like `key: value`")
    return Source(values or {}, reader.places)


def read_override(text: str, *, errors: list[UserError]) -> Source:
    """Read `key=value`, the value in YAML; text needs no quotes. Raises UserError for its form."""
    key, equals, value = (part.strip() for part in text.partition("="))
    path, where = tuple(key.split(".")), f"{COMMAND_LINE}: {key}"
    if not equals:
        step = f"write {text}=VALUE, for example optim.lr=1e-3"
        raise UserError(f"{text!r} is not key=value", where=COMMAND_LINE, next_step=step)
    if not all(path) or len(path) > MAX_DEPTH:
        what, allowed = f"{key!r} is not a key", "names joined by dots"
        raise UserError(what, where=COMMAND_LINE, allowed=allowed)
    if path == ("base",):
        raise UserError("base can only be set in a file", where=where)
    if not value:
        step = f"write {key}=null or {key}='\"\"'"
        raise UserError("no value after =", where=where, next_step=step)
    reader = _Reader(COMMAND_LINE, errors)
    if value[0] in "[{'\"":
        values = reader.document(value, path)
    else:
        values = reader.scalar(value, path, 1, is_plain=True)
    for part in reversed(path):
        values = {part: values}
    inside = {path[:depth]: COMMAND_LINE for depth in range(1, len(path) + 1)}
    return Source(values, inside | reader.places)


# ---- merging ----------------------------------------------------------------------------------


def merge(under: Source, over: Source, group: Node | None = None) -> Source:
    """`over` wins; groups are merged key by key, everything else is replaced whole.

    Where `over` chooses another group of a choice in `group`, it inherits only the keys that the
    new one has.
    """
    values = _merged(under.values, over.values, group)
    places = (under.places | over.places).items()
    gone = object()
    kept = {path: where for path, where in places if value_at(values, path, gone) is not gone}
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


class _Dumper(yaml.SafeDumper):
    """Writes lists on one line, no aliases, and text in quotes where our reader needs them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quoted_where_needed(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = text.isprintable() and isinstance(resolve_scalar(text), str)
    except ValueError:
        is_plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


def _list_on_one_line(dumper: yaml.SafeDumper, items: Any) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _quoted_where_needed)
_Dumper.add_representer(list, _list_on_one_line)
_Dumper.add_representer(tuple, _list_on_one_line)


def to_yaml(value: Any, *, flow: bool = False) -> str:
    return yaml.dump(
        value, Dumper=_Dumper, default_flow_style=flow, sort_keys=False, width=math.inf
    )


def yaml_flow(value: Any) -> str:
    """Write one value on one line, in our dialect."""
    return to_yaml(value, flow=True).removesuffix("...\n").strip()
