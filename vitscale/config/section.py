"""Base classes of configuration sections, and the settings of a run as one tree.

The tree is pydantic's JSON schema without references. A node is the schema of a key. A group has
`properties`; a choice has `oneOf`, groups of which the key `name` chooses one. Both may stand in
`anyOf` beside null, or be the `items` of a list.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Strict,
    Tag,
    model_serializer,
)
from pydantic.functional_serializers import SerializerFunctionWrapHandler
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema

# Plugins would be searched for in all installed packages, at every start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

KeyPath = tuple[str, ...]
Item = TypeVar("Item")
# Types of settings. YAML has lists and no tuples, so a list is taken for one.
Items = Annotated[tuple[Item, ...], Strict(strict=False)]
Pair = Annotated[tuple[float, float], Strict(strict=False)]
Triple = Annotated[tuple[float, float, float], Strict(strict=False)]
Problems = Iterator[tuple[str, str]]
"""(dotted key, what is wrong and what to do) for each conflict between values."""
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


class Section(BaseModel):
    """A frozen group of settings. Unknown keys, NaN and silent type conversion are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe fields by the docstrings below them.

        Not with `use_attribute_docstrings`, which reads the source at the start of every command.
        """
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        # The nearest class comes first, so that its text wins over that of a base class.
        for each in cls.__mro__:
            texts = _docstrings_in(each.__module__) if issubclass(each, Section) else {}
            for (section, name), text in texts.items():
                if section == each.__name__ and name in properties:
                    properties[name].setdefault("description", text)
        return schema

    def problems(self) -> Problems:
        """Yield the conflicts between values."""
        yield from ()


@cache
def _docstrings_in(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the text below it."""
    found = {}
    for section in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(section, ast.ClassDef):
            for field, text in pairwise(section.body):
                # A docstring of a field is the expression below its annotation.
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    doc = inspect.cleandoc(ast.literal_eval(text.value))
                    found[section.name, ast.unparse(field.target)] = doc
    return found


class Run(Section):
    """A whole configuration file."""

    # No key of the file has its alias.
    card: SkipJsonSchema[str] = Field(
        default="", exclude=True, validation_alias="# card"
    )
    """The comment at the top of the file, without its `#`: what the run is, and its sources."""

    def implied(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (origin, values) for keys that nobody has set and that an input of the run settles:
        its weights say which model they are of, its shards which splits they have."""
        yield from ()


class NamedSection(Section):
    """Settings of one entry of a registry, chosen by `name`. Concrete types narrow `name`."""

    name: str

    @model_serializer(mode="wrap")
    def _with_name(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # The name stays where defaults are left out, too: another name is another group.
        return {NAME: self.name} | dump(self)


def choice_of(registry: Mapping[str, Any], *, default: str | None = None) -> Any:
    """The field type "settings of one entry of `registry`", chosen by `name`.

    Each entry has its settings type in `Settings`, whose `name` is the entry's key. default: the
    entry of a group without a name.
    """

    def name_of(value: Any) -> Any:
        # Called for raw values of a file and for sections that are already validated.
        if isinstance(value, dict):
            return value.get(NAME, default)
        return getattr(value, NAME, None)

    members = tuple(
        Annotated[each.Settings, Tag(name)] for name, each in registry.items()
    )
    mark = Field(
        discriminator=Discriminator(name_of), json_schema_extra={DEFAULT_NAME: default}
    )
    return Annotated[Union[members], mark]  # noqa: UP007  # at run time


# ---- the tree of settings ----------------------------------------------------------------------


@cache
def tree_of(run_type: type[BaseModel]) -> Node:
    schema = run_type.model_json_schema()
    definitions = schema.pop("$defs", {})

    def without_references(value: Any) -> Any:
        if isinstance(value, list):
            return [without_references(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            # Keys beside a reference, such as its own description, win over the definition's.
            value = definitions[value["$ref"].rpartition("/")[2]] | value
        return {k: without_references(v) for k, v in value.items() if k != "$ref"}

    tree: Node = without_references(schema)
    return tree


def is_list(node: Node) -> bool:
    return any(each.get("type") == "array" for each in node.get("anyOf", [node]))


def groups_of(node: Node) -> dict[str, Node]:
    """The groups that a key, or each item of its list, can hold: by name; one alone by ""."""
    for each in node.get("anyOf", [node]):
        each = each.get("items", each)
        if "oneOf" in each:
            return {
                group["properties"][NAME]["const"]: group for group in each["oneOf"]
            }
        if "properties" in each:
            return {"": each}
    return {}


def default_name(node: Node) -> str | None:
    return next(
        (e[DEFAULT_NAME] for e in node.get("anyOf", [node]) if DEFAULT_NAME in e), None
    )


def chosen(node: Node, value: Any) -> Node | None:
    """The group that `value` names; None if there is none of that name."""
    groups = groups_of(node)
    name = default_name(node)
    if isinstance(value, dict):
        name = value.get(NAME, name)
    return groups.get("") or (groups.get(name) if isinstance(name, str) else None)


class Setting(NamedTuple):
    """A key, or a group of keys."""

    key: str
    """Dotted, with N for a position in a list."""
    name: str
    """Name of the group in a choice that it is in; or ""."""
    node: Node


@cache
def settings_of(run_type: type[BaseModel]) -> dict[KeyPath, Setting]:
    """The tree and all its keys, by location in pydantic's errors without positions in lists."""
    found: dict[KeyPath, Setting] = {(): Setting("", "", tree_of(run_type))}

    def add(group: Node, place: KeyPath, prefix: str, name: str) -> None:
        for key, node in group["properties"].items():
            inside = (*place, key)
            dotted = f"{prefix}{key}"
            found[inside] = Setting(dotted, name, node)
            dotted += ".N." if is_list(node) else "."
            # Groups of a choice add their name to the place, as pydantic does in its errors.
            for choice, inner in groups_of(node).items():
                if choice:
                    add(inner, (*inside, choice), dotted, choice)
                else:
                    add(inner, inside, dotted, name)

    add(tree_of(run_type), (), "", "")
    return found


def describe(node: Node | bool) -> str:
    """What a key may hold, such as "a whole number above 0, or null"."""
    if not isinstance(node, dict):
        return "anything"
    if "anyOf" in node:
        kinds = [each for each in node["anyOf"] if each.get("type") != "null"]
        text = " or ".join(map(describe, kinds))
        is_nullable = len(kinds) < len(node["anyOf"]) and not (
            is_list(node) and groups_of(node)
        )
        if is_nullable:
            return f"{text}, or null"
        return text

    if "oneOf" in node:
        return f"a group with the key {NAME}: {', '.join(groups_of(node))}"
    if "enum" in node or "const" in node:
        return ", ".join(map(str, node.get("enum", [node.get("const")])))
    if "examples" in node:
        return f"{WORDS[node['type']]} such as {node['examples'][0]}"
    if "prefixItems" in node:
        items = node["prefixItems"]
        return f"a list of {len(items)} values, each {describe(items[0])}"
    if node.get("type") == "array":
        if "oneOf" in node["items"]:
            names = [*groups_of(node)]
            text = f"names with commas, or a list such as [{{{NAME}: {names[0]}}}]"
            return f"{text}; names: {', '.join(names)}"
        text = "a list"
        if "maxItems" in node:
            text += f" of at most {node['maxItems']}"
        return f"{text}, each item {describe(node['items'])}"
    if "properties" in node:
        return f"a group with the keys {', '.join(node['properties'])}"
    if node.get("type") == "object":
        return f"a group of keys, each with {describe(node.get('additionalProperties', True))}"

    text = WORDS.get(str(node.get("type")), "anything")
    limits = [
        f"{word} {str(node[limit]).removesuffix('.0')}"
        for limit, word in LIMITS.items()
        if limit in node
    ]
    return f"{text} {' and '.join(limits)}".strip()
