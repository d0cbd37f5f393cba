"""Read a configuration file with its `base:` files, and merge layers.

Owns: the chain of bases, and which inherited keys a group of another name loses.
Leaves out: the YAML dialect (`yaml_source`), validation (`loader`).
"""

from __future__ import annotations

import os

from pydantic import BaseModel

from vitscale.config.errors import UserError, nearest
from vitscale.config.schema import groups_in
from vitscale.config.wording import kind_of, show_value
from vitscale.config.yaml_source import MAX_FILE_BYTES, YamlNode, parse_yaml, plain_value

MAX_BASES = 16


def shown_path(path: str) -> str:
    """`path`, relative to the working directory where it is inside."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") and os.path.isabs(path) else relative


def read_layers(
    path: str, *, chain: tuple[str, ...], errors: list[UserError], where: str | None = None
) -> list[YamlNode] | None:
    """The file's bases, the lowest first, and the file; None if one of them is unusable."""
    name = shown_path(path)
    real = os.path.realpath(path)
    if real in map(os.path.realpath, chain):
        shown = " -> ".join(shown_path(step) for step in (*chain, path))
        errors.append(UserError(f"circular base: {shown}", where=where or name))
        return None
    if len(chain) > MAX_BASES:
        errors.append(UserError(f"more than {MAX_BASES} base files in a chain", where=where))
        return None
    text = _read_text(path, where=where, errors=errors)
    root = None if text is None else parse_yaml(text, name=name, errors=errors)
    if root is None:
        return None
    if not isinstance(root.content, dict):
        if root.content is None and not root.broken:
            root = YamlNode({}, root.place)
        else:
            errors.append(
                UserError(
                    f"contains {kind_of(root.content)} instead of keys and values",
                    where=root.place,
                    allowed="lines like `key: value`",
                )
            )
            return None
    assert isinstance(root.content, dict)
    base = root.content.get("base")
    own = YamlNode({k: n for k, n in root.content.items() if k != "base"}, root.place)
    if base is None or base.broken:
        return [own] if base is None else None
    if not isinstance(base.content, str) or not base.content:
        errors.append(
            UserError(
                f"{show_value(plain_value(base))} is {kind_of(base.content)}",
                where=f"{base.place}: base",
                allowed="the path of one YAML file, relative to this file",
            )
        )
        return None
    under = read_layers(
        os.path.join(os.path.dirname(path), base.content),
        chain=(*chain, path),
        errors=errors,
        where=f"{base.place}: base",
    )
    return None if under is None else [*under, own]


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


def merge(
    under: YamlNode, over: YamlNode, group: type[BaseModel] | None = None, *, file: str = ""
) -> YamlNode:
    """`over` wins; mappings are merged key by key, everything else is replaced whole.

    Where `over` chooses another member of a choice in `group`, keys of the former member that the
    new one lacks are dropped, unless they are written in `file`.
    """
    if not isinstance(under.content, dict) or not isinstance(over.content, dict):
        return over
    merged = dict(under.content)
    for key, child in over.content.items():
        if key not in merged:
            merged[key] = child
            continue
        inherited, member = merged[key], None
        info = group.model_fields.get(key) if group is not None else None
        groups = groups_in(info) if info is not None else None
        if groups is not None and not groups.is_list:
            former = groups.chosen_by(plain_value(inherited))
            member = groups.chosen_by(plain_value(merge(inherited, child)))
            inherited = _without_keys_of(former, inherited, member=member, file=file)
        merged[key] = merge(inherited, child, member, file=file)
    return YamlNode(merged, over.place, broken=under.broken or over.broken)


def _without_keys_of(
    former: type[BaseModel] | None, node: YamlNode, *, member: type[BaseModel] | None, file: str
) -> YamlNode:
    if former is None or member is None or not isinstance(node.content, dict):
        return node
    lost = former.model_fields.keys() - member.model_fields.keys()
    kept = {
        key: child
        for key, child in node.content.items()
        if key not in lost or child.place.rpartition(":")[0] == file
    }
    return YamlNode(kept, node.place, broken=node.broken)
