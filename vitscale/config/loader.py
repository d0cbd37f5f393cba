"""Load a validated run from files and overrides; report all errors at once.

Owns: overrides, validation, and writing a run as YAML.
Leaves out: files and merging (`inheritance`), the wording of errors (`validation_errors`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from vitscale.config.errors import UserError, UserErrors
from vitscale.config.inheritance import merge, read_layers, shown_path
from vitscale.config.section import Run
from vitscale.config.site import read_site
from vitscale.config.validation_errors import explain, where_is, without_bad_values
from vitscale.config.wording import show_value
from vitscale.config.yaml_source import (
    Path,
    YamlNode,
    node_at,
    parse_value,
    parse_yaml,
    plain_value,
    resolve_scalar,
)

RunT = TypeVar("RunT", bound=Run)
RunTypes = type[RunT] | Mapping[str, type[RunT]]

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[RunT]):
    run: RunT
    sources: dict[str, str]
    """Dotted key of every leaf -> where its value came from."""


def load_run(
    run_types: RunTypes[RunT],
    path: FilePath | str | None,
    *,
    overrides: Sequence[str] = (),
    errors: Sequence[UserError] = (),
    with_site: bool = True,
) -> Loaded[RunT]:
    """Read, merge and validate. Raises UserErrors with all errors, including `errors`.

    path: None: the overrides alone.
    with_site: take defaults from the site file.
    """
    found = list(errors)
    file = COMMAND_LINE
    card = ""
    layers: list[YamlNode] | None = [YamlNode({}, COMMAND_LINE)]
    if path is not None:
        file = shown_path(str(path))
        layers = read_layers(str(path), chain=(), errors=found)
        card = "" if layers is None else _card(path)
    read = [_read_override(text, errors=found) for text in overrides]
    given = [node for node in read if node is not None]
    if layers is not None:
        if given:
            layers.append(reduce(merge, given))
        run_type = _choose_type(run_types, reduce(merge, layers), file=file, errors=found)
        if run_type is not None:
            site = read_site(run_type.model_fields, errors=found) if with_site else None
            layers = layers if site is None else [site, *layers]
            root = reduce(lambda under, over: merge(under, over, run_type, file=file), layers)
            run = _validate(run_type, root, file=file, errors=found)
            if run is not None and not found:
                return Loaded(run=run.with_card(card), sources=dict(_sources(run, root)))
    raise UserErrors(_in_order(found))


def _card(path: FilePath | str) -> str:
    """The comment that a readable file starts with."""
    with open(path, encoding="utf-8-sig") as file:
        lines = itertools.takewhile(lambda line: line.startswith("#"), file)
        return "\n".join(line.removeprefix("#").removeprefix(" ").rstrip() for line in lines)


def load_run_file(run_types: RunTypes[RunT], path: FilePath | str) -> RunT:
    """Validate a resolved configuration, such as config.yaml of a run folder.

    A site file has no effect on it.
    """
    return load_run(run_types, path, with_site=False).run


def _read_override(text: str, *, errors: list[UserError]) -> YamlNode | None:
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    where = f"{COMMAND_LINE}: {key.strip()}"
    if not equals:
        errors.append(
            UserError(
                f"{text!r} is not key=value",
                where=COMMAND_LINE,
                next_step=f"write {text}=VALUE, for example optim.lr=1e-3",
            )
        )
        return None
    if not all(path) or len(path) > 32:
        errors.append(
            UserError(f"{key!r} is not a key", where=COMMAND_LINE, allowed="names joined by dots")
        )
        return None
    if path == ("base",):
        errors.append(UserError("base can only be set in a file", where=where))
        return None
    if not value.strip():
        errors.append(
            UserError(
                "no value after =", where=where, next_step=f"write {key}=null or {key}='\"\"'"
            )
        )
        return None
    node = parse_value(value, place=COMMAND_LINE, where=where, errors=errors)
    for part in reversed(path):
        node = YamlNode({part: node}, COMMAND_LINE)
    return node


# ---- validation -------------------------------------------------------------------------------


def _validate(
    run_type: type[RunT], root: YamlNode, *, file: str, errors: list[UserError]
) -> RunT | None:
    values = plain_value(root)
    run, bad_paths = None, set[Path]()
    try:
        run = run_type.model_validate(values)
    except ValidationError as error:
        found, bad_paths = explain(error, run_type, root, file=file)
        errors.extend(found)
    complete = run or without_bad_values(run_type, values, bad_paths)
    if complete is not None:
        for key, what in complete.problems():
            path = tuple(key.split("."))
            if not any(path == bad[: len(path)] or bad == path[: len(bad)] for bad in bad_paths):
                errors.append(UserError(what, where=where_is(root, path, file=file)))
    return run


def _choose_type(
    run_types: RunTypes[RunT], root: YamlNode, *, file: str, errors: list[UserError]
) -> type[RunT] | None:
    by_stage = types_by_stage(run_types)
    node, broken = node_at(root, ("stage",))
    if node is root:
        if not isinstance(run_types, Mapping):
            return run_types
        errors.append(
            UserError("stage is missing", where=f"{file}: stage", allowed=", ".join(by_stage))
        )
        # Its other errors, too: those of the stage that it fits best, if its keys say which.
        found = {each: _num_errors(each, plain_value(root)) for each in by_stage.values()}
        same_keys = len({unknown for unknown, _ in found.values()}) == 1
        return None if same_keys else min(found, key=lambda each: found[each])
    if broken:
        return None
    if isinstance(node.content, str) and node.content in by_stage:
        return by_stage[node.content]
    errors.append(
        UserError(
            f"{show_value(plain_value(node))} is not a stage of this script",
            where=f"{node.place}: stage",
            allowed=", ".join(by_stage),
            next_step="run the script of that stage, or another file",
        )
    )
    return None


def _num_errors(run_type: type[Run], values: Any) -> tuple[int, int]:
    """(unknown keys, errors)."""
    try:
        run_type.model_validate(values)
    except ValidationError as error:
        unknown = sum(each["type"] == "extra_forbidden" for each in error.errors())
        return unknown, error.error_count()
    return 0, 0


def _in_order(errors: Sequence[UserError]) -> list[UserError]:
    """By file and line, what is missing from a file first; the command line last."""
    files: dict[str, int] = {}

    def place(error: UserError) -> tuple[int, int]:
        file, _, rest = (error.where or COMMAND_LINE).partition(":")
        line = rest.partition(":")[0]
        if file == COMMAND_LINE:
            return len(errors), 0
        return files.setdefault(file, len(files)), int(line) if line.isdecimal() else 0

    return sorted(errors, key=place)


def types_by_stage(run_types: RunTypes[RunT]) -> Mapping[str, type[RunT]]:
    if isinstance(run_types, Mapping):
        return run_types
    info = run_types.model_fields.get("stage")
    return {str(info.default) if info is not None else run_types.__name__: run_types}


# ---- writing ----------------------------------------------------------------------------------


def _sources(run: Run, root: YamlNode) -> Iterator[tuple[str, str]]:
    for path, _ in run_leaves(run):
        yield ".".join(path), _source_of(root, path)


def _source_of(root: YamlNode, path: Path) -> str:
    """The place of the key itself; that of its group does not count."""
    node = root
    for part in path:
        if not isinstance(node.content, dict) or part not in node.content:
            return DEFAULT
        node = node.content[part]
    return node.place


def run_leaves(run: BaseModel) -> Iterator[tuple[Path, Any]]:
    """(path, plain value) of every setting; lists and empty groups count as leaves."""
    yield from _leaves(run.model_dump(mode="python"), ())


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and (value or not path):
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    else:
        yield path, value


def run_to_yaml(run: Run, *, sources: Mapping[str, str] | None = None) -> str:
    """The resolved run as YAML that `load_run_file` reads back, its card as a comment on top.

    sources: where each value came from, as a comment beside it.
    """
    card = "".join(f"# {line}".rstrip() + "\n" for line in run.card.splitlines())
    text = _dump(run.model_dump(mode="python"))
    if sources is None:
        return card + text
    lines = text.split("\n")
    root = parse_yaml(text, name="", errors=[])
    assert root is not None
    for path, _ in run_leaves(run):
        node, _ = node_at(root, path)
        number = int(node.place.removeprefix(":")) - 1
        lines[number] = f"{lines[number]:<48}  # {sources['.'.join(path)]}"
    return card + "\n".join(lines)


def yaml_flow(value: Any) -> str:
    """One value on one line, in the dialect of `yaml_source`."""
    return _dump(value, default_flow_style=True).removesuffix("...\n").strip()


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


def _dump(value: Any, *, default_flow_style: bool = False) -> str:
    return yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=default_flow_style,
        sort_keys=False,
        width=math.inf,
    )
