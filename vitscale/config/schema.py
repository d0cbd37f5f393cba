"""The settings of a run type as one tree: pydantic's JSON schema without references.

A node is the schema of a key. A group has `properties`; a choice has `oneOf`, groups of which the
key `name` chooses one. Both may stand in `anyOf` beside null, or be the `items` of a list.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    choices = [each for each in node.get("anyOf", [node]) if "oneOf" in each]
    return choices[0].get(DEFAULT_NAME) if choices else None


def chosen(node: Node, value: Any) -> Node | None:
    """The group that `value` names; None if there is none of that name."""
    groups = groups_of(node)
    name = value.get(NAME) if isinstance(value, dict) and NAME in value else default_name(node)
    return groups.get("") or (groups.get(name) if isinstance(name, str) else None)


def value_at(values: Any, path: Path, default: Any = None) -> Any:
    for part in path:
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


def find(run_type: type[BaseModel], path: Path, values: Any) -> tuple[Node, Node | None]:
    """The innermost node on `path`, and the group whose keys are allowed at its end, if any.

    values: have the names of choices.
    """
    node = tree_of(run_type)
    group: Node | None = node
    depth = 0
    while group is not None and depth < len(path) and path[depth] in group["properties"]:
        node = group["properties"][path[depth]]
        depth += 2 if is_list(node) and groups_of(node) else 1
        group = chosen(node, value_at(values, path[:depth]))
    return node, group if depth == len(path) else None


def known_keys(group: Node, values: Any, *, prefix: Path = ()) -> Iterator[Path]:
    """All keys but those in lists; of a choice those of the group that `values` names."""
    for key, node in group["properties"].items():
        path = (*prefix, key)
        yield path
        inner = None if is_list(node) else chosen(node, value_at(values, path))
        if inner is not None:
            yield from known_keys(inner, values, prefix=path)


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
