"""Load a validated run from files and overrides, and write it; report all errors at once.

Layers: command line > file > base > site file > default. One error per invalid key: its place, its
value, what is allowed, the nearest key.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from vitscale.config.errors import UserError, UserErrors, did_you_mean, nearest
from vitscale.config.packaged import find_config
from vitscale.config.section import (
    NAME,
    KeyPath,
    Node,
    Run,
    chosen,
    describe,
    groups_of,
    settings_of,
    tree_of,
)
from vitscale.config.source import (
    COMMAND_LINE,
    MISSING,
    Source,
    kind_of,
    merge,
    read_chain,
    read_override,
    show_value,
    shown_path,
    value_at,
    yaml_flow,
)

RunT = TypeVar("RunT", bound=Run)
RunTypes = type[RunT] | Mapping[str, type[RunT]]

DEFAULT = "default"
SITE_VARIABLE = "VITSCALE_SITE"
SITE_FILE = "~/.config/vitscale/site.yaml"
SITE_GROUPS = ("launch", "tracking")


class Loaded(NamedTuple, Generic[RunT]):
    run: RunT
    places: Mapping[KeyPath, str]
    """Where each value that is no default came from."""


def load_run(
    run_types: RunTypes[RunT],
    path: Path | str | None,
    *,
    overrides: Sequence[str] = (),
    errors: Sequence[UserError] = (),
    with_site: bool = True,
) -> Loaded[RunT]:
    """Read, merge and validate.

    path: a file, or the name of a packaged one; None: the overrides alone.
    with_site: take defaults from the site file.
    Raises UserErrors with all errors, including `errors`; conflicts between values come alone,
    once each value by itself is valid, and so do values once their file can be read.
    """
    path = None if path is None else find_config(str(path))
    found, given = list(errors), Source({}, {})
    for text in overrides:
        try:
            given = merge(given, read_override(text))
        except UserError as error:
            found.append(error)
    files = [Source({}, {(): COMMAND_LINE if path is None else shown_path(path)})]
    try:
        files += [] if path is None else read_chain(path)
    except UserError as error:
        raise UserErrors([*found, error]) from None
    merged = reduce(merge, [*files, given])
    try:
        run_type = _choose_type(run_types, merged)
        site = read_site(errors=found) if with_site else Source({}, {})
        known = {k: v for k, v in site.values.items() if k in run_type.model_fields}
        layers = [Source(known, site.places), *files, given]
        merged = reduce(partial(merge, group=tree_of(run_type)), layers)
        run = run_type.model_validate({"# card": _card(path)} | merged.values)
        if not found:
            conflicts = run.problems()
            found = [UserError(what, where=_where(k.split("."), merged)) for k, what in conflicts]
    except ValidationError as error:
        found += explain(error, run_type, merged)
    except UserError as error:
        found.append(error)
    if found:
        raise UserErrors(found)
    return Loaded(run=run, places=merged.places)


def load_run_file(run_types: RunTypes[RunT], path: Path | str) -> RunT:
    """Validate a resolved configuration, such as config.yaml of a run folder.

    A site file has no effect on it.
    """
    return load_run(run_types, path, with_site=False).run


def read_values(path: Path | str) -> dict[str, Any]:
    """The values of a file, or a packaged name, with its bases, not validated. Raises UserError."""
    values: dict[str, Any] = reduce(merge, read_chain(find_config(str(path)))).values
    return values


def read_site(*, errors: list[UserError]) -> Source:
    """Read one user's defaults of SITE_GROUPS; nothing if there is no file.

    The file is $VITSCALE_SITE, none if that is empty, else SITE_FILE if it exists.
    """
    named = os.environ.get(SITE_VARIABLE)
    path = os.path.expanduser(SITE_FILE) if named is None else named
    if not path or (named is None and not os.path.lexists(path)):
        return Source({}, {})
    try:
        site = reduce(merge, read_chain(path, where=None if named is None else SITE_VARIABLE))
    except UserError as error:
        errors.append(error)
        return Source({}, {})
    groups = {}
    for key, value in site.values.items():
        if key in SITE_GROUPS and isinstance(value, dict):
            groups[key] = value
        elif key not in SITE_GROUPS or value is not None:  # null: its keys are all comments
            what = f"{key} as {kind_of(value)} cannot be set in a site file"
            where, allowed = _where([key], site), f"the groups {', '.join(SITE_GROUPS)}"
            step = "set it in the run's file"
            errors.append(UserError(what, where=where, allowed=allowed, next_step=step))
    return Source(groups, site.places)


def types_by_stage(run_types: RunTypes[RunT]) -> Mapping[str, type[RunT]]:
    if isinstance(run_types, Mapping):
        return run_types
    return {str(run_types.model_fields["stage"].default): run_types}


def _choose_type(run_types: RunTypes[RunT], source: Source) -> type[RunT]:
    by_stage = types_by_stage(run_types)
    default = None if isinstance(run_types, Mapping) else next(iter(by_stage))
    stage = source.values.get("stage", default)
    if isinstance(stage, str) and stage in by_stage:
        return by_stage[stage]
    where, allowed = _where(["stage"], source), ", ".join(by_stage)
    if stage is None:
        raise UserError("stage is missing", where=where, allowed=allowed)
    what, step = "is not a stage of this script", "run the script of that stage, or another file"
    raise UserError(f"{show_value(stage)} {what}", where=where, allowed=allowed, next_step=step)


def _card(path: Path | str | None) -> str:
    """The comment that a readable file starts with."""
    text = "" if path is None else Path(path).read_text(encoding="utf-8-sig")
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ").rstrip() for line in lines)


# ---- errors of values -------------------------------------------------------------------------

# Starts of pydantic's names of errors in values of the right type.
LIMIT_ERRORS = ("greater_than", "less_than", "literal_error", "value_error", "union_tag")


def explain(error: ValidationError, run_type: type[Run], source: Source) -> list[UserError]:
    """One error per invalid key."""
    settings, found = settings_of(run_type), dict[KeyPath, UserError]()
    for detail in error.errors(include_url=False):
        kind, loc = detail["type"], detail["loc"]
        path, place = _path_of(loc, source.values), tuple(p for p in loc if isinstance(p, str))
        while place not in settings:
            place = place[:-1]
        step, allowed = None, describe(node := settings[place].node)
        if kind == "missing" and isinstance(loc[-1], str):  # an int: in a list of fixed length
            path = (*path, loc[-1])
        elif kind.startswith("union_tag") and isinstance(value_at(source.values, path), dict):
            path, allowed = (*path, NAME), ", ".join(groups_of(node))
        value = value_at(source.values, path, MISSING)
        what = f"{show_value(value)} was read as {kind_of(value)}"
        if kind == "extra_forbidden":
            what = f"unknown key {'.'.join(path)}"
            group = chosen(node, value_at(source.values, path[:-1]))
            assert group is not None
            allowed = ", ".join(group["properties"])
            step = _instead(path, node, group, [setting.key for setting in settings.values()])
        elif value is MISSING:
            what = f"{'.'.join(path)} is missing"
        elif kind.startswith(LIMIT_ERRORS):
            what = f"{show_value(value)} is not allowed"
            if isinstance(value, str):
                step = did_you_mean(value, allowed.split(", "))
        elif isinstance(value, list):
            what = f"{show_value(value)} is a list of {len(value)}"
        elif kind.startswith("string") and value is not None and not isinstance(value, dict):
            step = f'put it in quotes: "{show_value(value)}"'
        new = UserError(what, where=_where(path, source), allowed=allowed, next_step=step)
        found.setdefault(path, new)
    return list(found.values())


def _instead(path: KeyPath, node: Node, group: Node, keys: Sequence[str]) -> str:
    """The next step after an unknown key of a group in `node`."""
    name, dotted, prefix = path[-1], ".".join(path), "".join(f"{part}." for part in path[:-1])
    if any("." in part for part in path):
        return "in a file write dots as nested groups, not inside one key"
    if owners := [n for n, each in groups_of(node).items() if name in each["properties"]]:
        return f"remove it; it belongs to {prefix}{NAME}={' or '.join(owners)}"
    known = [key for key in keys if ".N." not in key]
    same_name = [key for key in known if key.rpartition(".")[2] == name]
    best = nearest(dotted, same_name or [f"{prefix}{key}" for key in group["properties"]])
    best = best or next(iter(same_name), nearest(dotted, known))
    return f"did you mean {best}?" if best else "remove it"


def _path_of(loc: Sequence[int | str], values: Any) -> KeyPath:
    """Pydantic's location without the parts that are not keys (names of union members)."""
    path: KeyPath = ()
    for part in map(str, loc):
        inner = value_at(values, (part,), MISSING)
        if inner is not MISSING:
            path, values = (*path, part), inner
    return path


def _where(path: Sequence[str], source: Source) -> str:
    """`file:line: key`; a key that no file sets is placed at its group."""
    known = next(k for n in range(len(path), -1, -1) if (k := tuple(path[:n])) in source.places)
    return f"{source.places[known]}: {'.'.join(path)}"


# ---- writing ----------------------------------------------------------------------------------


def run_to_yaml(run: Run, *, places: Mapping[KeyPath, str] | None = None) -> str:
    """The resolved run as YAML that `load_run_file` reads back, its card as a comment on top.

    places: where each value came from, as a comment beside it.
    """
    card = [f"# {line}".rstrip() for line in run.card.splitlines()]
    return "\n".join([*card, *_lines(run.model_dump(), (), places), ""])


def _lines(
    values: Mapping[str, Any], path: KeyPath, places: Mapping[KeyPath, str] | None
) -> Iterator[str]:
    for key, value in values.items():
        inside, line = (*path, key), "  " * len(path) + f"{yaml_flow(key)}:"
        if isinstance(value, dict) and value:
            yield line
            yield from _lines(value, inside, places)
        else:
            line += f" {yaml_flow(value)}"
            place = "" if places is None else f"  # {places.get(inside, DEFAULT)}"
            yield f"{line:<48}{place}" if place else line
