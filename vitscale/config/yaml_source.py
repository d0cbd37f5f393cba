"""Parse YAML into nodes that carry their file and line.

Owns: the dialect (a strict subset of YAML 1.2: no aliases, anchors, tags or duplicate keys; only
true and false are booleans; `1e-4` is a number) and the file:line of every value.
Leaves out: merging (`inheritance`), what the keys mean (`loader`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import yaml

from vitscale.config.errors import UserError

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 20_000  # keeps reading under two seconds; a real configuration has a few hundred
MAX_DEPTH = 32
MAX_KEY_LENGTH = 100  # YAML ends a key after 1024 characters, escapes of ten included

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
BOOLEANS = {
    "true": True, "True": True, "TRUE": True,
    "false": False, "False": False, "FALSE": False,
}  # fmt: skip
INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

Path = tuple[str, ...]
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its place. A broken node has been reported and must not be used."""

    content: Scalar | list[YamlNode] | dict[str, YamlNode]
    place: str
    broken: bool = False


def plain_value(node: YamlNode) -> Any:
    """The node as plain Python values, without broken parts."""
    if isinstance(node.content, dict):
        return {key: plain_value(n) for key, n in node.content.items() if not _is_broken(n)}
    if isinstance(node.content, list):
        return [plain_value(child) for child in node.content]
    return node.content


def _is_broken(node: YamlNode) -> bool:
    """A list is broken with any of its elements; a mapping only loses the key."""
    return node.broken or (isinstance(node.content, list) and any(map(_is_broken, node.content)))


def node_at(root: YamlNode, path: Path) -> tuple[YamlNode, bool]:
    """The node at `path`, or its closest parent, and whether a node on the way is broken."""
    node, broken = root, _is_broken(root)
    for part in path:
        if isinstance(node.content, dict) and part in node.content:
            node = node.content[part]
        elif isinstance(node.content, list) and part.isdigit() and int(part) < len(node.content):
            node = node.content[int(part)]
        else:
            break
        broken = broken or _is_broken(node)
    return node, broken


def resolve_scalar(text: str) -> Scalar:
    """The value of an unquoted scalar. Raises ValueError for numbers out of range."""
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


def parse_yaml(text: str, *, name: str, errors: list[UserError]) -> YamlNode | None:
    """Read one document; None when it is not readable. Errors are appended to `errors`."""
    return _Reader(name=name, errors=errors).document(text)


def parse_value(text: str, *, place: str, where: str, errors: list[UserError]) -> YamlNode:
    """Read the value of a `key=value` override: a scalar, or YAML in brackets or quotes."""
    text = text.strip()
    reader = _Reader(name=where, errors=errors, place=place)
    if text[:1] in ("[", "{", "'", '"'):
        return reader.document(text) or YamlNode(None, place, broken=True)
    return reader.scalar(text, is_plain=True, place=place, where=where)


def shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


class _TooLarge(yaml.MarkedYAMLError):
    """A document beyond the limits on size or depth."""


class _Loader(yaml.SafeLoader):
    """Composes nodes within limits, without expanding aliases."""

    num_nodes = 0
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        mark: Any = event.start_mark
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            what = f"more than {MAX_NODES} keys and values"
            raise _TooLarge(problem=what, problem_mark=mark)
        if self.depth > MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH} levels"
            raise _TooLarge(problem=what, problem_mark=mark)
        if isinstance(event, yaml.AliasEvent):
            self.get_event()
            node: Any = yaml.ScalarNode("", "", mark, mark)
            node.refused = [(f"YAML alias *{event.anchor}", ALIAS_ADVICE)]
            return node
        refused = []
        if event.anchor is not None:
            refused.append((f"YAML anchor &{event.anchor}", ANCHOR_ADVICE))
        if event.tag is not None:
            refused.append((f"YAML tag {shorten(event.tag)}", TAG_ADVICE))
        event.anchor = None  # PyYAML would end at the second of the same name
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        node.refused = refused
        return node


ALIAS_ADVICE = "write the value out, or share it through base:"
ANCHOR_ADVICE = "remove it, and share values through base:"
TAG_ADVICE = "remove it; values are plain values, lists and groups of keys"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reader:
    """Converts PyYAML's nodes to `YamlNode` and reports what the dialect refuses."""

    name: str
    errors: list[UserError]
    place: str | None = None
    """The place given to every node; None: name:line."""

    def document(self, text: str) -> YamlNode | None:
        try:
            root = yaml.compose(text, Loader=_Loader)
            return YamlNode({}, self._place(1)) if root is None else self._node(root, path=())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = " ".join(part for part in (error.context, error.problem) if part)
            if not isinstance(error, _TooLarge):
                what = f"not readable as YAML: {what}"
            self._report(what, mark.line + 1 if mark else 1)
        except yaml.YAMLError as error:  # characters that YAML does not allow
            self._report(f"not readable as YAML: {str(error).splitlines()[0]}", 1)
        except (ValueError, OverflowError) as error:  # escapes such as "\UFFFFFFFF"
            self._report(f"not readable as YAML: {error}", 1)
        return None

    def scalar(self, text: str, *, is_plain: bool, place: str, where: str) -> YamlNode:
        try:
            value = resolve_scalar(text) if is_plain else text
            text.encode()
        except UnicodeEncodeError:
            what = f"{ascii(text)[:80]} is not valid Unicode text"
            self.errors.append(UserError(what, where=where))
        except ValueError as error:
            what = f"{shorten(text)} {error}"
            self.errors.append(UserError(what, where=where, allowed="finite numbers"))
        else:
            return YamlNode(value, place)
        return YamlNode(None, place, broken=True)

    def _place(self, line: int) -> str:
        return self.place or f"{self.name}:{line}"

    def _where(self, line: int, path: Path) -> str:
        if self.place is not None:
            return self.name
        return f"{self._place(line)}: {'.'.join(path)}" if path else self._place(line)

    def _report(
        self, what: str, line: int, *, path: Path = (), next_step: str | None = None
    ) -> None:
        self.errors.append(UserError(what, where=self._where(line, path), next_step=next_step))

    def _node(self, source: Any, *, path: Path, line: int | None = None) -> YamlNode:
        """Convert one node. `line`: the line of its key, which places the value."""
        own_line = _line(source)
        place = self._place(line or own_line)
        if self._refused(source, path):
            return YamlNode(None, place, broken=True)
        if isinstance(source, yaml.MappingNode):
            return YamlNode(self._mapping(source, path), place)
        if isinstance(source, yaml.SequenceNode):
            items = enumerate(source.value)
            return YamlNode([self._node(item, path=(*path, str(i))) for i, item in items], place)
        where = self._where(own_line, path)
        return self.scalar(source.value, is_plain=source.style is None, place=place, where=where)

    def _refused(self, source: Any, path: Path) -> bool:
        for what, next_step in source.refused:
            what = f"{what} is not supported"
            self._report(what, _line(source), path=path, next_step=next_step)
        return bool(source.refused)

    def _mapping(self, source: Any, path: Path) -> dict[str, YamlNode]:
        children: dict[str, YamlNode] = {}
        lines: dict[str, int] = {}
        for key_source, value in source.value:
            key, line = self._key(key_source, path), _line(key_source)
            child = self._node(value, path=(*path, key or "?"), line=line)
            if key is None:
                continue
            if key in children:
                where = "" if self.place else f"; first on line {lines[key]}"
                what, step = f"key {key!r} is given twice{where}", "keep one of the two"
                self._report(what, line, path=(*path, key), next_step=step)
                continue
            children[key], lines[key] = child, line
        return children

    def _key(self, source: Any, path: Path) -> str | None:
        line, text = _line(source), source.value
        if self._refused(source, path):
            return None
        if not isinstance(source, yaml.ScalarNode):
            self._report("a list or group cannot be a key", line, path=path)
            return None
        where = self._where(line, path)
        key = self.scalar(text, is_plain=source.style is None, place="", where=where)
        if key.broken:
            return None
        if not isinstance(key.content, str) or not text:
            step = f'quote it: "{text}"' if text else "give the key a name"
            self._report(f"key {text!r} is not text", line, path=path, next_step=step)
            return None
        if len(text) > MAX_KEY_LENGTH:
            what = f"key {shorten(text)!r} is longer than {MAX_KEY_LENGTH} characters"
            self._report(what, line, path=path)
            return None
        return text


def _line(source: Any) -> int:
    return int(source.start_mark.line) + 1
