"""Load a validated run from files and overrides; report all errors at once.

Owns: the order of layers (command line > file > base > site file > default), validation, one error
per invalid key (place, value, what is allowed, the nearest key), and writing a run as YAML.
Leaves out: the YAML dialect and merging (`source`), what a key may hold (`schema`).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from vitscale.config.errors import UserError, UserErrors, did_you_mean, nearest
from vitscale.config.schema import (
    NAME,
    Path,
    describe,
    find,
    groups_of,
    known_keys,
    tree_of,
    value_at,
)
from vitscale.config.section import Run
from vitscale.config.source import (
    COMMAND_LINE,
    Source,
    kind_of,
    merge,
    read_chain,
    read_override,
    resolve_scalar,
    show_value,
    shown_path,
    to_yaml,
)

RunT = TypeVar("RunT", bound=Run)
RunTypes = type[RunT] | Mapping[str, type[RunT]]

DEFAULT = "default"
SITE_VARIABLE = "VITSCALE_SITE"
SITE_FILE = "~/.config/vitscale/site.yaml"
SITE_GROUPS = ("launch", "tracking")


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
    """Read, merge and validate.

    path: None: the overrides alone. with_site: take defaults from the site file.
    Raises UserErrors with all errors, including `errors`; conflicts between values come alone,
    once each value by itself is valid.
    """
    found, given = list(errors), []
    file = COMMAND_LINE if path is None else shown_path(str(path))
    layers = [Source({}, {})] if path is None else read_chain(str(path), errors=found)
    for text in overrides:
        try:
            given.append(read_override(text, errors=found))
        except UserError as error:
            found.append(error)
    if not layers:
        raise UserErrors(_in_order(found))
    layers += [reduce(merge, given)] if given else []
    run, places = None, reduce(merge, layers).places | {(): file}
    try:
        run_type = _choose_type(run_types, reduce(merge, layers).values, places)
        if with_site:
            site = read_site(errors=found)
            known = {k: site.values[k] for k in site.values.keys() & run_type.model_fields.keys()}
            layers.insert(0, Source(known, site.places))
        merged = reduce(lambda under, over: merge(under, over, tree_of(run_type)), layers)
        places = merged.places | {(): file}
        run = run_type.model_validate(merged.values)
    except ValidationError as error:
        reported = {each.where for each in found}
        explained = explain(error, run_type, merged.values, places)
        found += [each for each in explained if each.where not in reported]
    except UserError as error:
        found.append(error)
    if run is not None and not found:
        for key, what in run.problems():
            found.append(UserError(what, where=_where(tuple(key.split(".")), places)))
    if run is None or found:
        raise UserErrors(_in_order(found))
    sources = {".".join(leaf): places.get(leaf, DEFAULT) for leaf, _ in run_leaves(run)}
    return Loaded(run=run.with_card(_card(path) if path is not None else ""), sources=sources)


def load_run_file(run_types: RunTypes[RunT], path: FilePath | str) -> RunT:
    """Validate a resolved configuration, such as config.yaml of a run folder.

    A site file has no effect on it.
    """
    return load_run(run_types, path, with_site=False).run


def read_values(path: FilePath | str) -> dict[str, Any]:
    """The values of a file with its bases, not validated. Raises UserErrors."""
    errors: list[UserError] = []
    layers = read_chain(str(path), errors=errors)
    if errors:
        raise UserErrors(errors)
    return reduce(merge, layers).values


def read_site(*, errors: list[UserError]) -> Source:
    """Read one user's defaults of SITE_GROUPS; nothing if there is no file.

    The file is $VITSCALE_SITE, none if that is empty, else SITE_FILE if it exists.
    """
    named = os.environ.get(SITE_VARIABLE)
    path = os.path.expanduser(SITE_FILE) if named is None else named
    if not path or (named is None and not os.path.lexists(path)):
        return Source({}, {})
    where = None if named is None else SITE_VARIABLE
    site = reduce(merge, read_chain(path, errors=errors, where=where), Source({}, {}))
    for key, value in site.values.items():
        if key not in SITE_GROUPS:
            what = f"{key} cannot be set in a site file"
        elif isinstance(value, dict | None):  # null: its keys are all comments
            continue
        else:
            what = f"{key} is {kind_of(value)} instead of keys and values"
        where, allowed = _where((key,), site.places), ", ".join(SITE_GROUPS)
        step = did_you_mean(key, SITE_GROUPS, "set it in the run's file")
        errors.append(UserError(what, where=where, allowed=allowed, next_step=step))
    groups = {key: value for key, value in site.values.items() if isinstance(value, dict)}
    return Source(groups, site.places)


def types_by_stage(run_types: RunTypes[RunT]) -> Mapping[str, type[RunT]]:
    if isinstance(run_types, Mapping):
        return run_types
    return {str(run_types.model_fields["stage"].default): run_types}


def _choose_type(run_types: RunTypes[RunT], values: Any, places: Mapping[Path, str]) -> type[RunT]:
    by_stage = types_by_stage(run_types)
    stage = values.get("stage", None if isinstance(run_types, Mapping) else next(iter(by_stage)))
    if isinstance(stage, str) and stage in by_stage:
        return by_stage[stage]
    where, allowed = _where(("stage",), places), ", ".join(by_stage)
    if stage is None:
        raise UserError("stage is missing", where=where, allowed=allowed)
    what, step = "is not a stage of this script", "run the script of that stage, or another file"
    raise UserError(f"{show_value(stage)} {what}", where=where, allowed=allowed, next_step=step)


def _card(path: FilePath | str) -> str:
    """The comment that a readable file starts with."""
    with open(path, encoding="utf-8-sig") as file:
        lines = itertools.takewhile(lambda line: line.startswith("#"), file)
        return "\n".join(line.removeprefix("#").removeprefix(" ").rstrip() for line in lines)


def _where(path: Path, places: Mapping[Path, str]) -> str:
    """`file:line: key`; a key that no file sets is placed at its group."""
    known = next(path[:n] for n in range(len(path), -1, -1) if path[:n] in places)
    return f"{places[known]}: {'.'.join(path)}"


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


# ---- errors of values -------------------------------------------------------------------------

MISSING: Any = object()


def explain(
    error: ValidationError, run_type: type[Run], values: Any, places: Mapping[Path, str]
) -> list[UserError]:
    """One error per invalid key."""
    found: dict[Path, UserError] = {}
    details = error.errors(include_url=False)
    for detail in details:
        kind, loc = detail["type"], detail["loc"]
        if kind == "too_short" and sum(each["loc"][: len(loc)] == loc for each in details) > 1:
            continue  # pydantic counts without the items that have errors of their own
        if kind in ("missing", "extra_forbidden"):  # an int: an item of a list of fixed length
            path = _path_of(loc[:-1], values)
            path += (loc[-1],) if isinstance(loc[-1], str) else ()
        else:
            path = _path_of(loc, values)
            if kind.startswith("union_tag") and isinstance(value_at(values, path), dict):
                path += (NAME,)
        value, where = value_at(values, path, MISSING), _where(path, places)
        node, _ = find(run_type, path, values)
        names = list(groups_of(node))
        is_name = path[-1:] == (NAME,) and len(names) > 1
        allowed = ", ".join(names) if is_name else describe(node)
        if kind == "extra_forbidden":
            what = f"unknown key {'.'.join(path)}"
            allowed, step = _known_instead(run_type, path, values)
        elif value is MISSING:
            what, step = f"{'.'.join(path)} is missing", None
        else:
            what, step = _what(value, kind, is_name), _hint(value, kind, allowed)
        new = UserError(what, where=where, allowed=allowed, next_step=step)
        found.setdefault(path, new)
    return list(found.values())


def _path_of(loc: Sequence[int | str], values: Any) -> Path:
    """Pydantic's location without the parts that are not keys (names of union members)."""
    path: Path = ()
    for part in map(str, loc):
        inner = value_at(values, (part,), MISSING)
        if inner is not MISSING:
            path, values = (*path, part), inner
    return path


def _known_instead(run_type: type[BaseModel], path: Path, values: Any) -> tuple[str, str]:
    """What is allowed in place of an unknown key, and the next step."""
    node, group = find(run_type, path[:-1], values)
    assert group is not None
    owners = [n for n, each in groups_of(node).items() if n and path[-1] in each["properties"]]
    if any("." in part for part in path):
        step = "in a file write dots as nested groups, not inside one key"
    elif owners:
        step = f"remove it; it belongs to {'.'.join(path[:-1])}.{NAME}={' or '.join(owners)}"
    else:
        best = nearest_key(path, run_type, values)
        step = f"did you mean {best}?" if best else "remove it"
    return ", ".join(group["properties"]), step


# Names in other trainers; by spelling alone an unrelated key would be nearest.
OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "batch_size": "data.global_batch",
    "micro_batch_size": "engine.max_micro_batch",
    "num_epochs": "schedule.epochs",
    "max_steps": "schedule.steps",
    "grad_clip": "optim.clip_norm",
    "gradient_clipping": "optim.clip_norm",
    "heads": "model.num_heads",
    "stochastic_depth": "model.drop_path",
    "constraint": "launch.sbatch",
    "reservation": "launch.sbatch",
}


def nearest_key(path: Path, run_type: type[BaseModel], values: Any) -> str | None:
    """The most similar known dotted key; one of the same name or in the same group first."""
    name, dotted = path[-1], [".".join(key) for key in known_keys(tree_of(run_type), values)]
    if OTHER_NAMES.get(name) in dotted:
        return OTHER_NAMES[name]
    if same_name := [key for key in dotted if key.rpartition(".")[2] == name]:
        return nearest(".".join(path), same_name) or same_name[0]
    group = find(run_type, path[:-1], values)[1]
    assert group is not None
    siblings = [".".join((*path[:-1], key)) for key in group["properties"]]
    return nearest(".".join(path), siblings) or nearest(".".join(path), dotted)


# Starts of pydantic's names of errors in values of the right type.
LIMIT_ERRORS = ("greater_than", "less_than", "literal_error", "value_error")


def _what(value: Any, kind: str, is_name: bool) -> str:
    if is_name or kind.startswith(LIMIT_ERRORS):
        return f"{show_value(value)} is not allowed"
    if isinstance(value, list):
        return f"{show_value(value)} is a list of {len(value)}"
    return f"{show_value(value)} was read as {kind_of(value)}"


def _hint(value: Any, kind: str, allowed: str) -> str | None:
    if kind.startswith(("literal_error", "union_tag")) and isinstance(value, str):
        return did_you_mean(value, allowed.split(", "))
    if kind.startswith("bool") and str(value).lower() in ("on", "yes", "1"):
        return "write true"
    if kind.startswith("bool") and str(value).lower() in ("off", "no", "0"):
        return "write false"
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if isinstance(value, str) and kind.startswith(("int", "float")):
        bare = value.replace("_", "")
        try:
            number = resolve_scalar(bare)
        except ValueError:
            return None
        if isinstance(number, int | float):
            return f"write {bare}" if bare != value else f"write {bare} without quotes"
    if kind.startswith("string") and value is not None and not isinstance(value, list | dict):
        return f'put it in quotes: "{show_value(value)}"'
    return None


# ---- writing ----------------------------------------------------------------------------------


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
    lines = to_yaml(run.model_dump(mode="python")).split("\n")
    if sources is not None:
        # A line for each leaf, in the same order; those of groups end with their colon.
        rows = [number for number, line in enumerate(lines) if line and not line.endswith(":")]
        for row, (path, _) in zip(rows, run_leaves(run), strict=False):
            lines[row] = f"{lines[row]:<48}  # {sources['.'.join(path)]}"
    return card + "\n".join(lines)
