"""The settings of a run type as one tree: pydantic's JSON schema without references.

A node is the schema of a key. A group has `properties`; a choice has `oneOf`, groups of which the
key `name` chooses one. Both may stand in `anyOf` beside null, or be the `items` of a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

Path = tuple[str, ...]
Node = dict[str, Any]
NAME = "name"
"""The key that chooses one of several groups."""
DEFAULT_NAME = "default_name"
"""The group of a choice that needs no name; beside `oneOf`."""
WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
}
LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}


@cache
def tree_of(run_type: type[BaseModel]) -> Node:
    schema = run_type.model_json_schema()
    tree: Node = _without_references(schema, schema.pop("$defs", {}))
    return tree


def _without_references(value: Any, definitions: Node) -> Any:
    if isinstance(value, list):
        return [_without_references(each, definitions) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        value = definitions[value["$ref"].rpartition("/")[2]] | value
    return {k: _without_references(v, definitions) for k, v in value.items() if k != "$ref"}


def is_list(node: Node) -> bool:
    return any(each.get("type") == "array" for each in node.get("anyOf", [node]))


def groups_of(node: Node) -> dict[str, Node]:
    """The groups that a key, or each item of its list, can hold: by name; one alone by ""."""
    for each in node.get("anyOf", [node]):
        each = each.get("items", each)
        if "oneOf" in each:
            return {group["properties"][NAME]["const"]: group for group in each["oneOf"]}
        if "properties" in each:
            return {"": each}
    return {}


def default_name(node: Node) -> str | None:
    return next((e[DEFAULT_NAME] for e in node.get("anyOf", [node]) if DEFAULT_NAME in e), None)


def chosen(node: Node, value: Any) -> Node | None:
    """The group that `value` names; None if there is none of that name."""
    groups = groups_of(node)
    name = value.get(NAME) if isinstance(value, dict) and NAME in value else default_name(node)
    return groups.get("") or (groups.get(name) if isinstance(name, str) else None)


@dataclass(frozen=True, slots=True)
class Setting:
    """A key, or a group of keys."""

    key: str
    """Dotted, with N for a position in a list."""
    name: str
    """Of the group in a choice that it is in; or ""."""
    node: Node


@cache
def settings_of(run_type: type[BaseModel]) -> dict[Path, Setting]:
    """The tree and all its keys, by location in pydantic's errors without positions in lists."""
    tree = tree_of(run_type)
    return {(): Setting("", "", tree), **dict(_settings(tree, (), "", ""))}


def _settings(group: Node, place: Path, prefix: str, name: str) -> Iterator[tuple[Path, Setting]]:
    for key, node in group["properties"].items():
        inside, dotted = (*place, key), f"{prefix}{key}"
        yield inside, Setting(dotted, name, node)
        dotted += ".N." if is_list(node) else "."
        for choice, inner in groups_of(node).items():
            deeper = (*inside, choice) if choice else inside
            yield from _settings(inner, deeper, dotted, choice or name)


def describe(node: Node | bool) -> str:
    """What a key may hold, such as "a whole number above 0, or null"."""
    if not isinstance(node, dict):
        return "anything"
    if "anyOf" in node:
        kinds = [each for each in node["anyOf"] if each.get("type") != "null"]
        text = " or ".join(map(describe, kinds))
        is_nullable = len(kinds) < len(node["anyOf"]) and not (is_list(node) and groups_of(node))
        return f"{text}, or null" if is_nullable else text
    if "oneOf" in node:
        return f"a group with the key {NAME}: {', '.join(groups_of(node))}"
    if "enum" in node or "const" in node:
        return ", ".join(map(str, node.get("enum", [node.get("const")])))
    if "prefixItems" in node:
        items = node["prefixItems"]
        return f"a list of {len(items)} values, each {describe(items[0])}"
    if node.get("type") == "array":
        return f"a list, each item {describe(node['items'])}"
    if "properties" in node:
        return f"a group with the keys {', '.join(node['properties'])}"
    if node.get("type") == "object":
        return f"a group of keys, each with {describe(node.get('additionalProperties', True))}"
    given = {word: str(node[limit]) for limit, word in LIMITS.items() if limit in node}
    limits = [f"{word} {number.removesuffix('.0')}" for word, number in given.items()]
    return " ".join([WORDS.get(str(node.get("type")), "anything"), " and ".join(limits)]).strip()
