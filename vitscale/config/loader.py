"""From files and overrides to a validated run, with every mistake in one report.

Owns: `base:` inheritance, precedence, validation, the wording of errors, and writing a run as YAML.
Leaves out: the YAML dialect (`yaml_source`), the command line (`command_line`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.findings import explain, where_is, without_bad_values
from vitscale.config.section import Run
from vitscale.config.wording import (
    kind_of,
    show_value,
)
from vitscale.config.yaml_source import (
    MAX_FILE_BYTES,
    Node,
    Path,
    merge,
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
MAX_BASES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[RunT]):
    run: RunT
    sources: dict[str, str]
    """Dotted key of every leaf -> where its value came from."""


def load_run(
    run_types: RunTypes[RunT],
    path: FilePath | str,
    *,
    overrides: Sequence[str] = (),
    errors: Sequence[UserError] = (),
) -> Loaded[RunT]:
    """Read, merge and validate. Raises UserErrors with all mistakes, `errors` among them."""
    found = list(errors)
    root = read_with_bases(str(path), chain=(), errors=found)
    usable = root is not None
    root = root or Node({}, shown_path(str(path)))
    for text in overrides:
        override = _read_override(text, errors=found)
        if override is not None:
            root = merge(root, override)
    if usable:
        run = _validate(run_types, root, file=shown_path(str(path)), errors=found)
        if run is not None and not found:
            return Loaded(run=run, sources=dict(_sources(run, root)))
    raise UserErrors(found)


def load_run_file(run_types: RunTypes[RunT], path: FilePath | str) -> RunT:
    """Validate a configuration file, for example the resolved config.yaml of a run folder."""
    return load_run(run_types, path).run


# ---- reading ----------------------------------------------------------------------------------


def shown_path(path: str) -> str:
    """`path` as a person would write it from here."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") and os.path.isabs(path) else relative


def read_with_bases(
    path: str, *, chain: tuple[str, ...], errors: list[UserError], where: str | None = None
) -> Node | None:
    """The file merged over its `base:`; None when a file could not be read at all."""
    name = shown_path(path)
    real = os.path.realpath(path)
    if real in map(os.path.realpath, chain):
        shown = " -> ".join(shown_path(step) for step in (*chain, path))
        errors.append(UserError(f"files inherit in a circle: {shown}", where=where or name))
        return None
    if len(chain) >= MAX_BASES:
        errors.append(UserError(f"more than {MAX_BASES} files inherit in a row", where=where))
        return None
    text = _read_text(path, where=where, errors=errors)
    root = None if text is None else parse_yaml(text, name=name, errors=errors)
    if root is None:
        return None
    if not isinstance(root.content, dict):
        if root.content is None and not root.broken:
            root = Node({}, root.place)
        else:
            errors.append(
                UserError(
                    f"holds {kind_of(root.content)}, not keys and values",
                    where=root.place,
                    allowed="lines like `key: value`",
                )
            )
            return None
    assert isinstance(root.content, dict)
    base = root.content.get("base")
    own = Node({k: n for k, n in root.content.items() if k != "base"}, root.place)
    if base is None or base.broken:
        return own if base is None else None
    if not isinstance(base.content, str) or not base.content:
        errors.append(
            UserError(
                f"{show_value(plain_value(base))} is {kind_of(base.content)}",
                where=f"{base.place}: base",
                allowed="the path of one YAML file, relative to this file",
            )
        )
        return None
    under = read_with_bases(
        os.path.join(os.path.dirname(path), base.content),
        chain=(*chain, path),
        errors=errors,
        where=f"{base.place}: base",
    )
    return None if under is None else merge(under, own)


def _read_text(path: str, *, where: str | None, errors: list[UserError]) -> str | None:
    name = shown_path(path)
    if not os.path.isfile(path):
        errors.append(_missing_file(path, where=where))
        return None
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            errors.append(
                UserError(f"is larger than {MAX_FILE_BYTES >> 20} MiB", where=where or name)
            )
            return None
        return data.decode("utf-8-sig")
    except OSError as error:
        errors.append(UserError(f"cannot be read: {error.strerror}", where=where or name))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        errors.append(UserError("is not UTF-8 text", where=f"{name}:{line}"))
    return None


def _missing_file(path: str, *, where: str | None) -> UserError:
    name = shown_path(path)
    folder = os.path.dirname(path) or "."
    what = f"{name} is a folder, not a file" if os.path.isdir(path) else f"there is no file {name}"
    if os.path.isdir(path):
        folder = path
    if not os.path.isdir(folder):
        return UserError(what, where=where, next_step=f"folder {folder} does not exist either")
    files = sorted(f for f in os.listdir(folder) if f.endswith((".yaml", ".yml")))
    best = nearest(os.path.basename(path), files)
    listed = ", ".join(files[:20]) + (", ..." if len(files) > 20 else "")
    return UserError(
        what,
        where=where,
        allowed=f"in {shown_path(folder)}: {listed or 'no YAML files'}",
        next_step=f"did you mean {shown_path(os.path.join(folder, best))}?" if best else None,
    )


def _read_override(text: str, *, errors: list[UserError]) -> Node | None:
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
        errors.append(UserError("base belongs into the file, not here", where=where))
        return None
    if not value.strip():
        errors.append(
            UserError(
                "no value behind =", where=where, next_step=f"write {key}=null or {key}='\"\"'"
            )
        )
        return None
    node = parse_value(value, place=COMMAND_LINE, where=where, errors=errors)
    for part in reversed(path):
        node = Node({part: node}, COMMAND_LINE)
    return node


# ---- validation -------------------------------------------------------------------------------


def _validate(
    run_types: RunTypes[RunT], root: Node, *, file: str, errors: list[UserError]
) -> RunT | None:
    run_type = _choose_type(run_types, root, file=file, errors=errors)
    if run_type is None:
        return None
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
    run_types: RunTypes[RunT], root: Node, *, file: str, errors: list[UserError]
) -> type[RunT] | None:
    by_stage: Mapping[str, type[RunT]]
    by_stage = run_types if isinstance(run_types, Mapping) else {_stage_of(run_types): run_types}
    node, broken = node_at(root, ("stage",))
    if node is root:
        if not isinstance(run_types, Mapping):
            return run_types
        errors.append(
            UserError("stage is missing", where=f"{file}: stage", allowed=", ".join(by_stage))
        )
        return None
    if broken:
        return None
    if isinstance(node.content, str) and node.content in by_stage:
        return by_stage[node.content]
    errors.append(
        UserError(
            f"{show_value(plain_value(node))} is not a stage that this script knows",
            where=f"{node.place}: stage",
            allowed=", ".join(by_stage),
            next_step="run the script of that stage, or give another file",
        )
    )
    return None


def _stage_of(run_type: type[Run]) -> str:
    info = run_type.model_fields.get("stage")
    return str(info.default) if info is not None else run_type.__name__


# ---- writing ----------------------------------------------------------------------------------


def _sources(run: Run, root: Node) -> Iterator[tuple[str, str]]:
    for path, _ in run_leaves(run):
        yield ".".join(path), _source_of(root, path)


def _source_of(root: Node, path: Path) -> str:
    """A key counts as given only if it is written itself."""
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
    """The resolved run as YAML that `load_run_file` reads back; with a `# source` per value."""
    lines: list[str] = []
    open_groups: Path = ()
    for path, value in run_leaves(run):
        groups = path[:-1]
        shared = len(os.path.commonprefix([open_groups, groups]))
        for depth in range(shared, len(groups)):
            lines.append(f"{'  ' * depth}{yaml_scalar(groups[depth])}:")
        open_groups = groups
        line = f"{'  ' * len(groups)}{yaml_scalar(path[-1])}: {yaml_flow(value)}"
        if sources is not None:
            line = f"{line:<48}  # {sources['.'.join(path)]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def yaml_flow(value: Any) -> str:
    """One value on one line, in the dialect of `yaml_source`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_scalar(k)}: {yaml_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(yaml_flow(item) for item in value) + "]"
    return yaml_scalar(value)


PLAIN_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-")


def yaml_scalar(value: str | int | float | bool | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if value and set(value) <= PLAIN_CHARACTERS and value[0] not in "-." and _stays_text(value):
        return value
    return '"' + "".join(map(_escape, value)) + '"'


def _stays_text(value: str) -> bool:
    try:
        return isinstance(resolve_scalar(value), str)
    except ValueError:
        return False


def _escape(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if " " <= character <= "~":
        return character
    return f"\\U{ord(character):08x}"
