"""Turn pydantic's validation errors into `UserError`s.

Owns: one error per invalid key (place, value, its YAML type, what is allowed, the nearest name),
and the run with invalid values replaced, so that conflicts among the valid ones are found too.
Leaves out: reading and merging (`inheritance`), describing field types (`wording`).
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from vitscale.config.errors import UserError, nearest
from vitscale.config.schema import NAME, Path, groups_in, known_keys, locate
from vitscale.config.section import Run
from vitscale.config.wording import describe_field, kind_of, show_value
from vitscale.config.yaml_source import YamlNode, node_at, plain_value, resolve_scalar

RunT = TypeVar("RunT", bound=Run)


def where_is(root: YamlNode, path: Path, *, file: str) -> str:
    """`file:line: key`; a key that no file sets is placed at its group."""
    node, _ = node_at(root, path)
    return f"{file if node is root else node.place}: {'.'.join(path)}"


def explain(
    error: ValidationError, run_type: type[Run], root: YamlNode, *, file: str
) -> tuple[list[UserError], set[Path]]:
    """One error per invalid key, and the paths to remove so that the rest is valid."""
    found: dict[Path, UserError] = {}
    bad_paths: set[Path] = set()
    values = plain_value(root)
    details = error.errors(include_url=False)
    for detail in details:
        kind, loc = detail["type"], detail["loc"]
        if kind == "too_short" and any(
            each["loc"][: len(loc)] == loc and each is not detail for each in details
        ):
            continue  # pydantic counts without the items that have errors of their own
        absent = kind in ("missing", "extra_forbidden")
        path = _path_of(values, loc, keep_last=absent)
        if absent and locate(run_type, path[:-1], values).group is None:
            path = path[:-1]  # a list of the wrong length, not a missing key
            absent = False
        bad_paths.add(locate(run_type, path, values).replaceable)
        if kind in ("union_tag_not_found", "union_tag_invalid"):
            path = (*path, NAME)
            absent = kind == "union_tag_not_found"
        if path in found or node_at(root, path)[1]:
            continue
        where = where_is(root, path, file=file)
        if kind == "extra_forbidden" and absent:
            found[path] = _unknown_key(run_type, path, values, where=where)
        elif absent:
            found[path] = UserError(
                f"{'.'.join(path)} is missing",
                where=where,
                allowed=_allowed(run_type, path, values),
            )
        else:
            found[path] = _bad_value(detail, root, path, run_type, where=where)
    return list(found.values()), bad_paths


def _path_of(values: Any, location: Sequence[int | str], *, keep_last: bool) -> Path:
    """Pydantic's location without the parts that are not keys (names of union members)."""
    path: list[str] = []
    for position, part in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        elif isinstance(values, dict) and not is_last:
            continue  # the name of the chosen group
        elif not (keep_last and is_last):
            break
        path.append(str(part))
    return tuple(path)


def _allowed(run_type: type[BaseModel], path: Path, values: Any) -> str | None:
    """What a key may hold, in words; of the name of a choice, the names."""
    location = locate(run_type, path, values)
    if location.info is None:
        return None
    groups = groups_in(location.info)
    if groups is not None and groups.is_choice and path[-1] == NAME:
        return ", ".join(groups.by_name)
    return describe_field(location.info)


def _unknown_key(run_type: type[BaseModel], path: Path, values: Any, *, where: str) -> UserError:
    around = locate(run_type, path[:-1], values)
    assert around.group is not None
    groups = groups_in(around.info) if around.info is not None else None
    others = groups.by_name.items() if groups is not None else ()
    owners = [name for name, member in others if path[-1] in member.model_fields]
    if any("." in part for part in path):
        step = "in a file write dots as nested groups, not inside one key"
    elif owners:
        step = f"remove it; it belongs to {'.'.join(path[:-1])}.{NAME}={' or '.join(owners)}"
    else:
        best = nearest_key(path, run_type=run_type, values=values)
        step = f"did you mean {best}?" if best else "remove it"
    return UserError(
        f"unknown key {'.'.join(path)}",
        where=where,
        allowed=", ".join(around.group.model_fields),
        next_step=step,
    )


def nearest_key(path: Path, *, run_type: type[BaseModel], values: Any = None) -> str | None:
    """The most similar known dotted key."""
    keys = list(known_keys(run_type, values))
    dotted = [".".join(key) for key in keys]
    same_name = [
        name
        for key, name in zip(keys, dotted, strict=True)
        if key[-1] == path[-1] and not _is_set_around(key, path, values)
    ]
    if same_name:
        return nearest(".".join(path), same_name) or same_name[0]
    siblings = [key[-1] for key in keys if key[:-1] == path[:-1]]
    longer = [key for key in siblings if _extends(key, path[-1])]
    if len(longer) == 1:
        return ".".join((*path[:-1], longer[0]))
    if close := get_close_matches(path[-1], siblings, n=1, cutoff=CLEARLY_A_TYPO):
        return ".".join((*path[:-1], close[0]))
    other = get_close_matches(path[-1], OTHER_NAMES, n=1, cutoff=CLEARLY_A_TYPO)
    if other and OTHER_NAMES[other[0]] in dotted:
        return OTHER_NAMES[other[0]]
    longer = [name for key, name in zip(keys, dotted, strict=True) if _extends(key[-1], path[-1])]
    if longer:
        return nearest(".".join(path), longer) or longer[0]
    if (name := nearest(".".join(path), dotted)) is not None:
        return name
    last = nearest(path[-1], [key[-1] for key in keys])
    return next((name for name in dotted if name.split(".")[-1] == last), None)


def _is_set_around(key: Path, path: Path, values: Any) -> bool:
    """Whether `key` is set already, in a group that `path` is in."""
    if key[:-1] != path[: len(key) - 1]:
        return False
    for part in key[:-1]:
        values = values[int(part)] if isinstance(values, list) else values[part]
    return isinstance(values, dict) and key[-1] in values


# Names in other trainers; by spelling alone an unrelated key would be nearest.
OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "batch_size": "data.global_batch",
    "micro_batch_size": "engine.max_micro_batch",
    "num_epochs": "schedule.epochs",
    "max_steps": "schedule.steps",
    "grad_clip": "optim.clip_norm",
    "gradient_clipping": "optim.clip_norm",
    "stochastic_depth": "model.drop_path",
    "constraint": "launch.sbatch",
    "reservation": "launch.sbatch",
}
# Ratio of difflib: one wrong letter of five gives 0.8; unrelated names such as warmup and name 0.6.
CLEARLY_A_TYPO = 0.75


def _extends(name: str, part: str) -> bool:
    """Whether `part` is the beginning or the end of `name`, in whole words."""
    return name.startswith(f"{part}_") or name.endswith(f"_{part}")


LIMIT_ERRORS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "literal_error",
        "union_tag_invalid",
        "value_error",
    }
)


def _bad_value(
    detail: Any, root: YamlNode, path: Path, run_type: type[BaseModel], *, where: str
) -> UserError:
    node, _ = node_at(root, path)
    value = plain_value(node)
    allowed = _allowed(run_type, path, plain_value(root))
    if detail["type"] in LIMIT_ERRORS:
        what = f"{show_value(value)} is not allowed"
    elif isinstance(value, list):
        what = f"{show_value(value)} is a list of {len(value)}"
    else:
        what = f"{show_value(value)} was read as {kind_of(value)}"
    return UserError(
        what,
        where=where,
        allowed=allowed or str(detail["msg"]),
        next_step=_hint(value, detail["type"], allowed=allowed),
    )


def _hint(value: Any, kind: str, *, allowed: str | None) -> str | None:
    if kind in ("literal_error", "union_tag_invalid") and isinstance(value, str) and allowed:
        best = nearest(value, allowed.split(", "))
        return f"did you mean {best}?" if best else None
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


def without_bad_values(
    run_type: type[RunT], values: dict[str, Any], bad_paths: set[Path]
) -> RunT | None:
    """The run with invalid values replaced, to find conflicts among the valid ones; None if
    nothing valid can replace them. The invalid values themselves were reported before.
    """
    for path in bad_paths:
        group: Any = values
        for part in path[:-1]:
            group = group.setdefault(part, {}) if isinstance(group, dict) else None
        if not isinstance(group, dict):
            return None
        group.pop(path[-1], None)
        parent = locate(run_type, path[:-1], values).group
        info = parent.model_fields.get(path[-1]) if parent is not None else None
        if info is not None and info.is_required():
            group[path[-1]] = _placeholder(info)
    try:
        return run_type.model_validate(values)
    except ValidationError:
        return None


def _placeholder(info: FieldInfo) -> Any:
    """A valid value for a required field."""
    if (groups := groups_in(info)) is not None:
        if groups.is_list:
            return []
        fields = groups.members[0].model_fields.items()
        name = {NAME: next(iter(groups.by_name))} if groups.is_choice else {}
        return name | {key: _placeholder(inner) for key, inner in fields if inner.is_required()}
    valid: dict[Any, Any] = {int: 1, float: 1.0, str: "placeholder"}
    return valid.get(info.annotation)
