"""Read YAML into plain values, with the file and line of every key beside them; merge and write it.

Owns: the dialect (a strict subset of YAML 1.2: no aliases, anchors, tags or duplicate keys; only
true and false are booleans; `1e-4` is a number), `base:` chains, and what a file inherits.
Leaves out: what the keys mean (`loader`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.fields import Path, groups_in, value_at

COMMAND_LINE = "command line"
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
BOOLEANS = {
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip
INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
KIND_WORDS: dict[type, str] = {
    bool: "a truth value",
    int: "a whole number",
    float: "a number with a fraction or exponent",
    str: "text",
    type(None): "null (nothing)",
    list: "a list",
    dict: "a group of keys",
}


class _Broken:
    def __repr__(self) -> str:
        return "..."


BROKEN: Any = _Broken()
"""Stands for a value that was reported already."""


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
    if text in NULLS:
        return None
    if text in BOOLEANS:
        return BOOLEANS[text]
    if INTEGER.fullmatch(text):
        base = {"0x": 16, "0o": 8}.get(text[:2], 10)
        if len(text) > 24 or abs(whole := int(text, base)) >= 1 << 63:
            raise ValueError("is a whole number beyond 64 bits")
        return whole
    if FLOAT.fullmatch(text):
        if math.isinf(number := float(text)):
            raise ValueError("is a number too large for a 64-bit float")
        return number
    if NOT_FINITE.fullmatch(text):
        raise ValueError("is not a finite number")
    return text


class _Reader:
    """Turns one text into values. Collects places and errors; a broken value becomes BROKEN."""

    def __init__(self, place_of: Callable[[int], str], errors: list[UserError]) -> None:
        self.place_of, self.errors = place_of, errors
        self.places: dict[Path, str] = {}
        self.events: Any = None

    def document(self, text: str, path: Path = ()) -> Any:
        """Read YAML; None if there is nothing in it."""
        self.events = yaml.parse(text, Loader=yaml.SafeLoader)
        try:
            next(self.events)
            if isinstance(first := next(self.events), yaml.StreamEndEvent):
                return None
            value = self._value(next(self.events), path)
            next(self.events)
            if not isinstance(second := next(self.events), yaml.StreamEndEvent):
                what = f"a second document begins; the first is on line {_line(first)}"
                raise yaml.MarkedYAMLError(problem=what, problem_mark=second.start_mark)
            return value
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = " ".join(part for part in (error.context, error.problem) if part)
            line = mark.line + 1 if mark else 1
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            # Characters that YAML does not allow, and escapes such as "\UFFFFFFFF".
            what, line = str(error).splitlines()[0], 1
        return self._report(f"not readable as YAML: {what}", line, path)

    def scalar(self, text: str, path: Path, line: int, *, is_plain: bool) -> Any:
        self.places.setdefault(path, self.place_of(line))
        try:
            text.encode()
            return resolve_scalar(text) if is_plain else text
        except UnicodeEncodeError:
            return self._report(f"{ascii(text)[:80]} is not valid Unicode text", line, path)
        except ValueError as error:
            what = f"{shorten(text)} {error}"
            return self._report(what, line, path, allowed="finite numbers")

    def _report(self, what: str, line: int, path: Path, **more: str) -> Any:
        where = ": ".join(filter(None, (self.place_of(line), ".".join(path))))
        self.errors.append(UserError(what, where=where, **more))
        return BROKEN

    def _value(self, event: Any, path: Path, line: int | None = None) -> Any:
        """Read the value that starts with `event`. `line`: that of its key, which places it."""
        line = line or _line(event)
        self.places.setdefault(path, self.place_of(line))
        if len(path) > MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._refuse(f"alias *{event.anchor}", line, path, SHARE_ADVICE)
        if isinstance(event, yaml.MappingStartEvent):
            value: Any = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                value.append(self._value(item, (*path, str(len(value)))))
        else:
            value = self.scalar(event.value, path, line, is_plain=event.style is None)
        if event.anchor is not None:
            value = self._refuse(f"anchor &{event.anchor}", line, path, SHARE_ADVICE)
        if event.tag is not None:
            value = self._refuse(f"tag {shorten(event.tag)}", line, path, TAG_ADVICE)
        return value

    def _refuse(self, what: str, line: int, path: Path, next_step: str) -> Any:
        return self._report(f"YAML {what} is not supported", line, path, next_step=next_step)

    def _mapping(self, path: Path) -> dict[str, Any]:
        group: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key, line = self._key(event, path), _line(event)
            inner = (*path, "?" if key is None else key)
            value = self._value(next(self.events), inner, line)
            if key in group:
                first = self.places[inner].rpartition(":")[2]
                also = f"; first on line {first}" if first.isdecimal() else ""
                step = "keep one of the two"
                self._report(f"key {key!r} is given twice{also}", line, inner, next_step=step)
            elif key is not None:
                group[key] = value
        return group

    def _key(self, event: Any, path: Path) -> str | None:
        """The key that starts with `event`; None for a wrong one."""
        key = self._value(event, path)
        if isinstance(key, str) and key:
            return key
        if isinstance(key, list | dict):
            self._report("a list or group cannot be a key", _line(event), path)
        elif key is not BROKEN:
            step = f'quote it: "{event.value}"' if event.value else "give the key a name"
            self._report(f"key {event.value!r} is not text", _line(event), path, next_step=step)
        return None


SHARE_ADVICE = "write the value out, or share it through base:"
TAG_ADVICE = "remove it; values are plain values, lists and groups of keys"


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def read_yaml(text: str, *, name: str) -> Any:
    """Read the values of one document in our dialect. Raises UserErrors with places in `name`."""
    errors: list[UserError] = []
    value = _Reader(lambda line: f"{name}:{line}", errors).document(text)
    if errors:
        raise UserErrors(errors)
    return value


def lines_of(text: str) -> dict[Path, int]:
    """The line of every key in a document that `to_yaml` wrote."""
    reader = _Reader(str, [])
    reader.document(text)
    return {path: int(place) for path, place in reader.places.items()}


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
    while True:
        if os.path.realpath(path) in map(os.path.realpath, files):
            shown = " -> ".join(map(shown_path, [*files, path]))
            errors.append(UserError(f"circular base: {shown}", where=where))
            return []
        files.append(path)
        source = _read_file(path, where=where, errors=errors)
        if source is None:
            return []
        found.insert(0, source)
        if "base" not in source.values:
            return found
        base, where = source.values.pop("base"), f"{source.places[('base',)]}: base"
        if not isinstance(base, str) or not base:
            if base is not BROKEN:
                what = f"{show_value(base)} is {kind_of(base)}"
                allowed = "the path of one YAML file, relative to this file"
                errors.append(UserError(what, where=where, allowed=allowed))
            return []
        path = os.path.join(os.path.dirname(path), base)


def _read_file(path: str, *, where: str | None, errors: list[UserError]) -> Source | None:
    name = shown_path(path)
    if not os.path.isfile(path):
        errors.append(_missing_file(path, where=where))
        return None
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        errors.append(UserError(f"cannot be read: {error.strerror}", where=where or name))
        return None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        errors.append(UserError("is not UTF-8 text", where=f"{name}:{line}"))
        return None
    if len(data) > MAX_FILE_BYTES:
        errors.append(UserError(f"is larger than {MAX_FILE_BYTES >> 20} MiB", where=where or name))
        return None
    reader = _Reader(lambda line: f"{name}:{line}", errors)
    values = reader.document(text)
    if values is None or isinstance(values, dict):
        return Source(values or {}, reader.places)
    if values is not BROKEN:
        what = f"contains {kind_of(values)} instead of keys and values"
        errors.append(UserError(what, where=reader.places[()], allowed="lines like `key: value`"))
    return None


def _missing_file(path: str, *, where: str | None) -> UserError:
    is_folder = os.path.isdir(path)
    name, folder = shown_path(path), path if is_folder else os.path.dirname(path) or "."
    what = f"{name} is a folder, not a file" if is_folder else f"there is no file {name}"
    if not os.path.isdir(folder):
        return UserError(what, where=where, next_step=f"folder {folder} does not exist either")
    files = sorted(f for f in os.listdir(folder) if f.endswith((".yaml", ".yml")))
    listed = ", ".join(files[:20]) + (", ..." if len(files) > 20 else "")
    best = nearest(os.path.basename(path), files)
    return UserError(
        what,
        where=where,
        allowed=f"in {shown_path(folder)}: {listed or 'no YAML files'}",
        next_step=f"did you mean {shown_path(os.path.join(folder, best))}?" if best else None,
    )


def read_override(text: str, *, errors: list[UserError]) -> Source | None:
    """Read `key=value`, the value in YAML; text needs no quotes. None if the form is wrong."""
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    path, where = tuple(key.split(".")), f"{COMMAND_LINE}: {key}"
    error = None
    if not equals:
        step = f"write {text}=VALUE, for example optim.lr=1e-3"
        error = UserError(f"{text!r} is not key=value", where=COMMAND_LINE, next_step=step)
    elif not all(path) or len(path) > MAX_DEPTH:
        what = f"{key!r} is not a key"
        error = UserError(what, where=COMMAND_LINE, allowed="names joined by dots")
    elif path == ("base",):
        error = UserError("base can only be set in a file", where=where)
    elif not value:
        step = f"write {key}=null or {key}='\"\"'"
        error = UserError("no value after =", where=where, next_step=step)
    if error is not None:
        errors.append(error)
        return None
    reader = _Reader(lambda line: COMMAND_LINE, errors)
    if value[0] in "[{'\"":
        values = reader.document(value, path)
    else:
        values = reader.scalar(value, path, 1, is_plain=True)
    for part in reversed(path):
        values = {part: values}
    inside = {path[:depth]: COMMAND_LINE for depth in range(1, len(path))}
    return Source(values, inside | reader.places)


# ---- merging ----------------------------------------------------------------------------------


def merge(under: Source, over: Source, group: type[BaseModel] | None = None) -> Source:
    """`over` wins; groups are merged key by key, everything else is replaced whole.

    Where `over` chooses another member of a choice in `group`, it inherits only the keys that the
    new member has.
    """
    values = _merged(under.values, over.values, group)
    places = (under.places | over.places).items()
    gone = object()
    kept = {path: where for path, where in places if value_at(values, path, gone) is not gone}
    return Source(values, kept)


def _merged(under: Any, over: Any, group: type[BaseModel] | None) -> Any:
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    merged = dict(under)
    for key, value in over.items():
        if key not in under:
            merged[key] = value
            continue
        inherited, member = under[key], None
        info = group.model_fields.get(key) if group is not None else None
        groups = groups_in(info) if info is not None else None
        if groups is not None and not groups.is_list:
            former = groups.chosen_by(inherited)
            member = groups.chosen_by(_merged(inherited, value, None))
            if isinstance(inherited, dict) and former is not None and member is not None:
                lost = former.model_fields.keys() - member.model_fields.keys()
                inherited = {name: each for name, each in inherited.items() if name not in lost}
        merged[key] = _merged(inherited, value, member)
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


def _list_on_one_line(dumper: yaml.SafeDumper, items: Sequence[Any]) -> yaml.SequenceNode:
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
