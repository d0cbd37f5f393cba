"""YAML text as a tree of nodes that remember where they stand.

Owns: the dialect (a strict subset of YAML 1.2: no aliases, anchors, tags or duplicate keys; only
true and false are truth values; `1e-4` is a number) and the file:line of every value.
Leaves out: merging (`inheritance`), what the keys mean (`loader`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from vitscale.config.errors import UserError

MAX_FILE_BYTES = 1 << 20
MAX_EVENTS = 20_000  # keeps reading under two seconds; a real configuration has a few hundred
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
class Node:
    """A value and its place. A broken node was reported already and must not be used."""

    content: Scalar | list[Node] | dict[str, Node]
    place: str
    text: str | None = None
    """The characters of an unquoted scalar; None for everything else."""
    broken: bool = False


def plain_value(node: Node) -> Any:
    """The node as plain Python values, without broken parts."""
    if isinstance(node.content, dict):
        return {key: plain_value(n) for key, n in node.content.items() if not _is_broken(n)}
    if isinstance(node.content, list):
        return [plain_value(child) for child in node.content]
    return node.content


def _is_broken(node: Node) -> bool:
    """A list with a broken element is of no use either; a mapping only loses the key."""
    return node.broken or (isinstance(node.content, list) and any(map(_is_broken, node.content)))


def node_at(root: Node, path: Path) -> tuple[Node, bool]:
    """The node at `path`, or the deepest one above it, and whether a broken one was met."""
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
    """The value of an unquoted scalar. Raises ValueError for numbers that no setting can hold."""
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


def parse_yaml(text: str, *, name: str, errors: list[UserError]) -> Node | None:
    """Read one document; None when nothing can be made of it. Errors are appended to `errors`."""
    return _Builder(name=name, errors=errors).document(text)


def parse_value(text: str, *, place: str, where: str, errors: list[UserError]) -> Node:
    """Read the value of a `key=value` override: a scalar, or YAML in brackets or quotes."""
    text = text.strip()
    if text[:1] in ("[", "{", "'", '"'):
        builder = _Builder(name=where, errors=errors, place=place)
        return builder.document(text) or Node(None, place, broken=True)
    return _scalar(text, text, place=place, where=where, errors=errors)


def _scalar(
    text: str, plain: str | None, *, place: str, where: str, errors: list[UserError]
) -> Node:
    try:
        value = resolve_scalar(text) if plain is not None else text
        text.encode()
    except UnicodeEncodeError:
        errors.append(UserError(f"{ascii(text)[:80]} is not valid Unicode text", where=where))
    except ValueError as error:
        errors.append(UserError(f"{shorten(text)} {error}", where=where, allowed="finite numbers"))
    else:
        return Node(value, place, plain)
    return Node(None, place, broken=True)


def shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


class _Stop(Exception):
    """The document cannot be read further; the reason is in the list of errors."""


@dataclass
class _Builder:
    """Builds nodes from the parser's events, so that aliases are never expanded."""

    name: str
    errors: list[UserError]
    place: str | None = None
    """The place given to every node; None: name:line."""
    num_events: int = 0
    _events: Iterator[Any] = field(default_factory=lambda: iter(()))

    def document(self, text: str) -> Node | None:
        self._events = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        try:
            root = self._read_document()
            return root or Node({}, self._place(1))
        except _Stop:
            return None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = " ".join(part for part in (error.context, error.problem) if part)
            self._report(f"not readable as YAML: {what}", mark.line + 1 if mark else 1)
        except yaml.YAMLError as error:  # characters that YAML does not allow
            self._report(f"not readable as YAML: {str(error).splitlines()[0]}", 1)
        except (ValueError, OverflowError) as error:  # escapes such as "\UFFFFFFFF"
            self._report(f"not readable as YAML: {error}", 1)
        return None

    def _read_document(self) -> Node | None:
        root = None
        num_documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    self._report(
                        "a second YAML document starts here", _line(event), allowed="one document"
                    )
                    raise _Stop
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, path=())
        return root

    def _place(self, line: int) -> str:
        return self.place or f"{self.name}:{line}"

    def _report(
        self, what: str, line: int, *, path: Path = (), allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:  # fmt: skip
        self.errors.append(
            UserError(what, where=self._where(line, path), allowed=allowed, next_step=next_step)
        )

    def _where(self, line: int, path: Path) -> str:
        if self.place is not None:
            return self.name
        return f"{self._place(line)}: {'.'.join(path)}" if path else self._place(line)

    def _next(self) -> Any:
        event = next(self._events)
        self.num_events += 1
        if self.num_events > MAX_EVENTS:
            self._report(f"more than {MAX_EVENTS} keys and values", _line(event))
            raise _Stop
        return event

    def _node(self, event: Any, *, path: Path) -> Node:
        line = _line(event)
        if len(path) > MAX_DEPTH:
            self._report(f"nested deeper than {MAX_DEPTH} levels", line)
            raise _Stop
        broken = self._refuse_yaml_features(event, path)
        if isinstance(event, yaml.AliasEvent):
            return Node(None, self._place(line), broken=True)
        if isinstance(event, yaml.MappingStartEvent):
            return Node(self._mapping(path), self._place(line), broken=broken)
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(self._sequence(path), self._place(line), broken=broken)
        plain = event.value if event.style is None else None
        place, where = self._place(line), self._where(line, path)
        if broken:
            return Node(None, place, broken=True)
        return _scalar(event.value, plain, place=place, where=where, errors=self.errors)

    def _refuse_yaml_features(self, event: Any, path: Path) -> bool:
        line = _line(event)
        if isinstance(event, yaml.AliasEvent):
            self._report(
                f"YAML alias *{event.anchor} is not supported", line, path=path,
                next_step="write the value out, or share it through base:",
            )  # fmt: skip
            return True
        if event.anchor is not None:
            self._report(
                f"YAML anchor &{event.anchor} is not supported", line, path=path,
                next_step="remove it, and share values through base:",
            )  # fmt: skip
        if event.tag is not None:
            self._report(
                f"YAML tag {shorten(event.tag)} is not supported", line, path=path,
                allowed="plain values, lists and groups of keys",
            )  # fmt: skip
        return event.tag is not None

    def _sequence(self, path: Path) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            items.append(self._node(event, path=(*path, str(len(items)))))
        return items

    def _mapping(self, path: Path) -> dict[str, Node]:
        children: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._key(event, path)
            line = _line(event)
            child = self._node(self._next(), path=(*path, key or "?"))
            if key is None:
                continue
            if key in children:
                where = "" if self.place else f"; first on line {lines[key]}"
                self._report(
                    f"key {key!r} is given twice{where}", line, path=(*path, key),
                    next_step="keep one of the two",
                )  # fmt: skip
                continue
            # The key's line, not the value's: that is where a reader looks for it.
            children[key] = Node(child.content, self._place(line), child.text, child.broken)
            lines[key] = line
        return children

    def _key(self, event: Any, path: Path) -> str | None:
        line = _line(event)
        if not isinstance(event, yaml.ScalarEvent):
            if not self._refuse_yaml_features(event, path):
                self._report("a list or group cannot be a key", line, path=path)
            raise _Stop
        if self._refuse_yaml_features(event, path):
            return None
        plain = event.value if event.style is None else None
        node = _scalar(
            event.value, plain, place="", where=self._where(line, path), errors=self.errors
        )
        if node.broken:
            return None
        if not isinstance(node.content, str) or not node.content:
            self._report(
                f"key {event.value!r} is not text", line, path=path,
                next_step=f'quote it: "{event.value}"' if event.value else "give the key a name",
            )  # fmt: skip
            return None
        if len(node.content) > MAX_KEY_LENGTH:
            self._report(
                f"key {shorten(node.content)!r} is longer than {MAX_KEY_LENGTH} characters",
                line,
                path=path,
            )
            return None
        return node.content


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
