"""Load a validated run from files and overrides, and write it; report all errors at once.

Layers: command line > file > base > site file > default. One error per invalid key: its place, its
value, what is allowed, the nearest key.

Files are a strict subset of YAML 1.2: no aliases, anchors, tags or duplicate keys; only true and
false are booleans; `1e-4` is a number, `.inf` is text.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from vitscale.config.errors import (
    UserError,
    UserErrors,
    did_you_mean,
    nearest,
    not_read,
    print_note,
)
from vitscale.config.packaged import find_config, similar_configs
from vitscale.config.redaction import flatten
from vitscale.config.section import (
    NAME,
    KeyPath,
    Node,
    Run,
    chosen,
    describe,
    groups_of,
    is_list,
    settings_of,
    tree_of,
)

RunT = TypeVar("RunT", bound=Run)
RunTypes = type[RunT] | Mapping[str, type[RunT]]

DEFAULT = "default"
SITE_VARIABLE = "VITSCALE_SITE"
SITE_FILE = "~/.config/vitscale/site.yaml"
SITE_GROUPS = ("launch", "tracking")
COMMAND_LINE = "command line"
MAX_FILE_BYTES = 1 << 20
MISSING: Any = object()
# Entries of a run card that hold for the file as it is, and not with other data or length.
OF_FILE = re.compile(r"^(What|Command|Hardware|Expect):.*(\n .*)*\n?", re.MULTILINE)

CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}
INTEGER = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
# Text that needs no quotes, wherever it stands.
PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")
KIND_WORDS: dict[type, str] = {
    bool: "a truth value",
    int: "a whole number",
    float: "a number with a fraction or exponent",
    str: "text",
    type(None): "null (nothing)",
    list: "a list",
    dict: "a group of keys",
}


class Place(str):
    """Where a value was written, and, for one without quotes, its text: 007 was read as 7."""

    text: str | None = None

    def __new__(cls, place: str, text: str | None = None) -> Place:
        self = super().__new__(cls, place)
        self.text = text
        return self


class Source(NamedTuple):
    """Plain values, and the place of every key and list item: "file:line" or "command line"."""

    values: Any
    places: dict[KeyPath, str]


NOTHING = Source({}, {})


def kind_of(value: object) -> str:
    """How YAML read a value."""
    return KIND_WORDS.get(type(value), type(value).__name__)


def show_value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shorten(repr(value))


def shorten(text: str) -> str:
    if len(text) <= 60:
        return text
    return text[:57] + "..."


def value_at(values: Any, path: KeyPath, default: Any = None) -> Any:
    for part in path:
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        else:
            return default
    return values


# ---- the dialect ------------------------------------------------------------------------------


def resolve_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of an unquoted scalar. A number beyond 64 bits is text."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if INTEGER.fullmatch(text):
        # A longer number is most likely an id, which must stay as it is written.
        if len(text) <= 24 and abs(whole := int(text)) < 1 << 63:
            return whole
        return text
    if FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return text


class _Loader(yaml.SafeLoader):
    """Composes nodes without what would let a short text stand for much, or for code."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        # Without anchors an alias has nothing to name, so pyyaml itself refuses it.
        event: Any = self.peek_event()
        for kind in ("anchor", "tag"):
            given = getattr(event, kind, None)
            if given is not None:
                problem = f"{kind} {shorten(given)}; write plain values, or share through base:"
                mark = event.start_mark
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return super().compose_node(parent, index)


def read_yaml(text: str, *, name: str) -> Source:
    """Read one YAML text, None where it is empty. Raises UserError with a place in `name`."""
    places: dict[KeyPath, str] = {}

    def value_of(node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            # Quotes make a text of anything.
            if node.style is None:
                return resolve_scalar(node.value)
            return node.value

        values: dict[str, Any] = {}
        is_group = isinstance(node, yaml.MappingNode)
        # A list is read like a group whose keys are positions, and these cannot repeat.
        pairs = node.value
        if not is_group:
            pairs = [(None, item) for item in pairs]
        for number, (key_node, value_node) in enumerate(pairs):
            key = str(key_node.value if is_group else number)
            inner = (*path, key)
            place = _place(name, (key_node or value_node).start_mark)
            if is_group and not isinstance(key_node, yaml.ScalarNode):
                raise UserError("a list or group cannot be a key", where=place)

            if key in values:
                raise UserError(
                    f"key {key!r} is given twice; first at {places[inner]}",
                    where=f"{place}: {'.'.join(inner)}",
                    next_step="keep one of the two",
                )

            text = None
            if isinstance(value_node, yaml.ScalarNode):
                text = value_node.value
            places[inner] = Place(place, text)
            values[key] = value_of(value_node, inner)
        if is_group:
            return values
        return list(values.values())

    try:
        node = yaml.compose(text, Loader=_Loader)
    # The others: characters that YAML does not allow, and escapes such as "\UFFFFFFFF".
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        what = str(error).splitlines()[0]
        mark = None
        if isinstance(error, yaml.MarkedYAMLError):
            what = " ".join(filter(None, (error.context, error.problem)))
            mark = error.problem_mark or error.context_mark
        step = None
        if r"\t" in what:
            step = "indent with blanks"
        what = f"not readable as YAML: {what}"
        raise UserError(what, where=_place(name, mark), next_step=step) from None
    return Source(None if node is None else value_of(node, ()), places)


def _place(name: str, mark: yaml.Mark | None) -> str:
    # A value of the command line has no lines.
    if name.startswith(COMMAND_LINE):
        return name
    return f"{name}:{mark.line + 1 if mark else 1}"


# ---- files and overrides ----------------------------------------------------------------------


def shown_path(path: Path | str) -> str:
    """`path`, relative to the working directory where it is inside."""
    relative = os.path.relpath(path)
    # A path outside is shorter and clearer as it was given.
    if relative.startswith("..") and os.path.isabs(path):
        return str(path)
    return relative


def read_chain(path: str, *, where: str | None = None) -> list[Source]:
    """Read the file and its bases, the lowest first. Raises UserError for the first unusable one.

    where: what names the file; later the line of `base:`.
    """
    sources: list[Source] = []
    files: list[str] = []
    while path:
        # By their real paths, since a link may lead back to a file that was read.
        if os.path.realpath(path) in map(os.path.realpath, files):
            shown = " -> ".join(map(shown_path, [*files, path]))
            raise UserError(f"circular base: {shown}", where=where)
        files.append(path)

        source = _read_file(path, where=where)
        sources.insert(0, source)
        base = source.values.pop("base", "")
        where = f"{source.places.get(('base',))}: base"
        # Without a base this is empty, which ends the loop.
        if not isinstance(base, str):
            raise UserError(
                f"{show_value(base)} is {kind_of(base)}",
                where=where,
                allowed="the path of one YAML file, relative to this file",
            )
        path = base and os.path.join(os.path.dirname(path), os.path.expanduser(base))
    return sources


def _read_file(path: str, *, where: str | None) -> Source:
    """Read one file. Raises UserError if there are no keys and values in it."""
    name = shown_path(path)
    try:
        with open(path, "rb") as file:
            # One byte more than allowed is enough to see that the file is too large.
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        # Files beside it, and packaged configurations, show a misspelt name.
        files = glob.glob(os.path.join(os.path.dirname(path), "*.y*ml"))
        step = did_you_mean(name, sorted(map(shown_path, files)), similar_configs(path))
        what = "configuration"
        if path.endswith(("yaml", "yml")):
            what = "file"
        what = f"there is no {what} {name}"
        raise UserError(what, where=where, next_step=step) from None
    except OSError as error:
        step = "give a YAML file, or a name that vitscale configs lists"
        # The folder of a run is a likely mistake, and its configuration what was meant.
        if os.path.exists(os.path.join(path, "config.yaml")):
            step = f"resume this run by its settings: {shown_path(path)}/config.yaml"
        raise not_read(error, where or name, next_step=step) from None
    except UnicodeDecodeError:
        raise UserError("is not UTF-8 text", where=where or name) from None

    if len(data) > MAX_FILE_BYTES:
        what = f"is larger than {MAX_FILE_BYTES >> 20} MiB"
        raise UserError(what, where=where or name)

    source = read_yaml(text, name=name)
    if not isinstance(source.values, dict | None):
        what = f"contains {kind_of(source.values)} instead of keys and values"
        raise UserError(what, where=name, allowed="lines like `key: value`")
    # A file may have nothing but comments.
    return Source(source.values or {}, source.places)


def read_override(text: str) -> Source:
    """Read `key=value`, the value in YAML; text needs no quotes. Raises UserError."""
    key, equals, value = (part.strip() for part in text.partition("="))
    path = tuple(key.split("."))
    where = f"{COMMAND_LINE}: {key}"
    if not equals:
        raise UserError(
            f"{text!r} is not key=value",
            where=COMMAND_LINE,
            next_step=f"write {text}=VALUE, for example optim.lr=1e-3",
        )

    if not all(path):
        what = f"{key!r} is not a key"
        raise UserError(what, where=COMMAND_LINE, allowed="names joined by dots")
    if path == ("base",):
        raise UserError("base can only be set in a file", where=where)
    if not value:
        step = f"write {key}=null or {key}='\"\"'"
        raise UserError("no value after =", where=where, next_step=step)

    # Only what begins like a list, a group or a text in quotes is YAML.
    inside = Source(resolve_scalar(value), {})
    if value[0] in "[{'\"":
        inside = read_yaml(value, name=where)

    values = inside.values
    places: dict[KeyPath, str] = {path: Place(COMMAND_LINE, value)}
    for key_path, place in inside.places.items():
        places[*path, *key_path] = Place(COMMAND_LINE, getattr(place, "text", None))

    while path:
        values = {path[-1]: values}
        places.setdefault(path, COMMAND_LINE)
        path = path[:-1]
    return Source(values, places)


# Keys whose texts are paths, N for a position in a list. In a file, and behind `=` on a command
# line, no shell has expanded `~`.
PATH_KEYS = frozenset(
    """
    output init images images.N data.path data.mixture.N.path data.only_keys
    data.remote.cache_path remote.cache_path objective.teacher.weights objective.teachers.N.weights
    objective.targets stages.N.config source.path source.val_labels source.leave_out labels.space
    labels.map
    """.split()
)


def _with_home(value: Any, key: str = "") -> Any:
    """The values with `~` and `~USER` expanded in paths. key: of the value, dotted."""
    if isinstance(value, dict):
        prefix = f"{key}." if key else ""
        return {k: _with_home(inner, f"{prefix}{k}") for k, inner in value.items()}
    if isinstance(value, list):
        return [_with_home(item, f"{key}.N") for item in value]
    if isinstance(value, str) and key in PATH_KEYS:
        return full_name(value)
    return value


# Keys that exclude each other: the one on the command line replaces the other of a file.
RIVALS = {"schedule.steps": "schedule.epochs", "schedule.epochs": "schedule.steps"}


def full_name(path: str) -> str:
    """The path with `~` expanded. `timm/NAME`, timm's own name of its weights on the Hub, becomes
    hf://timm/NAME, unless there is such a path here."""
    if path.startswith("timm/") and not os.path.exists(path):
        return f"hf://{path}"
    return os.path.expanduser(path)


# ---- merging ----------------------------------------------------------------------------------


def merge(under: Source, over: Source, group: Node | None = None) -> Source:
    """`over` wins; groups are merged key by key, everything else is replaced whole.

    Where `over` chooses another group of a choice in `group`, it inherits only the keys that the
    new one has.
    """
    values = _merged(under.values, over.values, group)
    places = under.places | over.places
    for path in list(places):
        # A value that was replaced has no place: errors must name the file that is in force.
        if value_at(values, path, MISSING) is MISSING:
            del places[path]
    return Source(values, places)


def _merged(under: Any, over: Any, group: Node | None) -> Any:
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    merged = dict(under)
    for key, value in over.items():
        inherited = under.get(key)
        new = None

        node = None
        if group is not None:
            node = group["properties"].get(key)
        if node is not None and not is_list(node) and isinstance(inherited, dict):
            # Only two groups of the same choice can differ in what they allow.
            former = chosen(node, inherited)
            new = chosen(node, _merged(inherited, value, None))
            if former is not None and new is not None:
                lost = former["properties"].keys() - new["properties"].keys()
                inherited = {k: v for k, v in inherited.items() if k not in lost}
        merged[key] = _merged(inherited, value, new)
    return merged


# ---- runs -------------------------------------------------------------------------------------


class Loaded(NamedTuple, Generic[RunT]):
    run: RunT
    places: Mapping[KeyPath, str]
    """Where each value that is no default came from."""
    settled: Sequence[str] = ()
    """A line for each value of a file that another one has replaced."""


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
    problems = list(errors)
    given = NOTHING
    for text in overrides:
        try:
            # Later words win, as on other command lines.
            given = merge(given, read_override(text))
        except UserError as error:
            problems.append(error)

    # The lowest layer has no values; keys that no layer sets are placed at it.
    files = [Source({}, {(): COMMAND_LINE})]
    words = [*overrides]
    if path is not None:
        words.insert(0, str(path))
        path = find_config(str(path))
        files = [Source({}, {(): shown_path(path)})]
        try:
            files += read_chain(path)
        except UserError as error:
            raise UserErrors([*problems, error]) from None

    # A rival in a file gives way before the run is validated, which would find a conflict.
    merged = reduce(merge, [*files, given])
    settled: list[str] = []
    for key, rival in RIVALS.items():
        path_of_rival = tuple(rival.split("."))
        former = value_at(merged.values, path_of_rival)
        is_chosen = value_at(given.values, (*key.split("."),)) is not None

        if is_chosen and former is not None and path_of_rival not in given.places:
            origin = merged.places[path_of_rival]
            settled.append(f"{key} replaces {rival}={former} of {origin}")
            given = merge(read_override(f"{rival}=null"), given)
    try:
        run_type = _choose_type(run_types, merged)
        site = read_site(errors=problems) if with_site else NOTHING
        # Keys that this stage lacks may stand in a site file, which serves all stages.
        known = {k: v for k, v in site.values.items() if k in run_type.model_fields}
        layers = [Source(known, site.places), *files, given]
        # The tree tells groups of a choice apart; to make it takes as long as all else here.
        names = (path for layer in layers for path in layer.places if len(path) > 1)
        tree = None
        if any(path[-1] == NAME for path in names):
            tree = tree_of(run_type)
        merged = reduce(partial(merge, group=tree), layers)
        merged = Source(_with_home(merged.values), merged.places)
        run = run_type.model_validate(merged.values)
        # Inputs of the run are read once all that was given is valid.
        for origin, values in run.implied():
            merged = _with_implied(merged, values, origin=origin)
            run = run_type.model_validate(merged.values)

        card = _card(path)
        if overrides:
            # The file's card knows neither data and length nor the result of this run.
            stage = vars(run).get("stage", "launch").replace("data_prep", "launch")
            card = f"Command: vitscale {stage} {shlex.join(words)}\n{OF_FILE.sub('', card)}"

        run = run.model_copy(update={"card": card.strip()})
        # Conflicts between values are only worth telling once each value is valid.
        if not problems:
            for key, what in run.problems():
                where = _where(key.split("."), merged)
                problems.append(UserError(what, where=where))
    except ValidationError as error:
        problems += explain(error, run_type, merged)
    except UserError as error:
        problems.append(error)
    if problems:
        raise UserErrors(problems)
    return Loaded(run=run, places=merged.places, settled=settled)


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
    path = os.path.expanduser(SITE_FILE if named is None else named)
    if not path or (named is None and not os.path.lexists(path)):
        return NOTHING
    try:
        site = reduce(merge, read_chain(path, where=named and SITE_VARIABLE))
    except UserError as error:
        errors.append(error)
        return NOTHING

    groups = {}
    for key, value in site.values.items():
        if key in SITE_GROUPS and isinstance(value, dict):
            groups[key] = value
        # A group is null where all its keys are comments.
        elif key not in SITE_GROUPS or value is not None:
            refusal = UserError(
                f"{key} as {kind_of(value)} cannot be set in a site file",
                where=_where([key], site),
                allowed=f"the groups {', '.join(SITE_GROUPS)}",
                next_step="set it in the run's file",
            )
            errors.append(refusal)
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
    what = "stage is missing"
    step = None
    if stage is not None:
        what = f"{show_value(stage)} is not a stage of this script"
        step = "run the script of that stage, or another file"
    where = _where(["stage"], source)
    raise UserError(what, where=where, allowed=", ".join(by_stage), next_step=step)


def _with_implied(given: Source, values: Mapping[str, Any], *, origin: str) -> Source:
    """Put values below those that were given, and print the new ones in a line."""
    places: dict[KeyPath, str] = {}
    shown = [f"{origin}:"]
    for key, text in flatten(values).items():
        path = tuple(key.split("."))
        if value_at(given.values, path, MISSING) is MISSING:
            places[path] = origin
            shown.append(f"{key}={text}")
    print_note(" ".join(shown))
    return merge(Source(values, places), given)


def _card(path: Path | str | None) -> str:
    """The comment that a readable file starts with."""
    text = "" if path is None else Path(path).read_text(encoding="utf-8-sig")
    # The card ends where the first line without a sign begins.
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return "\n".join(line[1:].removeprefix(" ").rstrip() for line in lines)


# ---- errors of values -------------------------------------------------------------------------

# Starts of pydantic's names of errors in values of the right type.
LIMIT_ERRORS = (
    "greater_than",
    "less_than",
    "literal_error",
    "value_error",
    "union_tag",
)


def explain(
    error: ValidationError, run_type: type[Run], source: Source
) -> list[UserError]:
    """One error per invalid key."""
    settings = settings_of(run_type)
    errors: dict[KeyPath, UserError] = {}
    for detail in error.errors(include_url=False):
        kind = detail["type"]
        loc = detail["loc"]
        # The last parts may be pydantic's own words, and unknown keys.
        place = tuple(key for key in loc if isinstance(key, str))
        while place not in settings:
            place = place[:-1]
        node = settings[place].node
        allowed = describe(node)
        step = None

        # Parts that are no keys, such as names of union members, are left out of the path.
        path: KeyPath = ()
        value = source.values
        for part in map(str, loc):
            inner = value_at(value, (part,), MISSING)
            if inner is not MISSING:
                path = (*path, part)
                value = inner

        # A key that is missing has no value. A position that is missing is one of a list.
        if kind == "missing" and isinstance(loc[-1], str):
            path = (*path, loc[-1])
        elif kind.startswith("union_tag") and isinstance(value, dict):
            path = (*path, NAME)
            allowed = ", ".join(groups_of(node))
        value = value_at(source.values, path, MISSING)

        what = f"{show_value(value)} was read as {kind_of(value)}"
        if kind == "extra_forbidden":
            what = f"unknown key {'.'.join(path)}"
            group = chosen(node, value_at(source.values, path[:-1]))
            assert group is not None
            allowed = ", ".join(group["properties"])
            step = _instead(path, node, group, run_type)
        elif value is MISSING:
            key = ".".join(path)
            what = f"{key} is missing"
            if kind == "missing":
                text = " ".join(node.get("description", "").split())
                step = f"set {key}=VALUE. {text}"
        elif kind.startswith(LIMIT_ERRORS):
            what = f"{show_value(value)} is not allowed"
            if isinstance(value, str):
                names = allowed.rpartition("names: ")[2]
                known = names.removeprefix("a list, each item ").split(", ")
                step = did_you_mean(value, known)
        elif isinstance(value, list):
            what = f"{show_value(value)} is a list of {len(value)}"
        elif kind.startswith("string") and not isinstance(value, dict | None):
            written = getattr(source.places.get(path), "text", None)
            step = f'put it in quotes: "{written or show_value(value)}"'
        # A list that is too short without its invalid items is no error of its own.
        if any(other[: len(path)] == path for other in errors):
            continue
        where = _where(path, source)
        errors[path] = UserError(what, where=where, allowed=allowed, next_step=step)
    return list(errors.values())


def _instead(path: KeyPath, node: Node, group: Node, run_type: type[Run]) -> str:
    """The next step after an unknown key of a group in `node`."""
    name = path[-1]
    dotted = ".".join(path)
    prefix = "".join(f"{part}." for part in path[:-1])

    if any("." in part for part in path):
        return "in a file write dots as nested groups, not inside one key"
    groups = groups_of(node).items()
    owners = [owner for owner, other in groups if name in other["properties"]]
    if owners:
        return f"remove it; it belongs to {prefix}{NAME}={' or '.join(owners)}"

    # A key of this name in another group is better than a similar one in the same group.
    known = [s.key for s in settings_of(run_type).values() if ".N." not in s.key]
    same_name = [key for key in known if key.rpartition(".")[2] == name]

    beside = [f"{prefix}{key}" for key in group["properties"]]
    best = nearest(dotted, same_name or beside)
    best = best or next(iter(same_name), nearest(dotted, known))
    if best:
        return f"did you mean {best}?"
    return "remove it"


def _where(path: Sequence[str], source: Source) -> str:
    """`file:line: key`; a key that no file sets is placed at its group."""
    # Keys of a file are known by their place; one that is missing has only that of its group.
    known = tuple(path)
    while known and known not in source.places:
        known = known[:-1]
    return f"{source.places[known]}: {'.'.join(path)}"


# ---- writing ----------------------------------------------------------------------------------


def yaml_flow(value: Any) -> str:
    """Write one value on one line, in our dialect."""
    if isinstance(value, dict):
        pairs = (f"{yaml_flow(key)}: {yaml_flow(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_flow, value))}]"
    if not isinstance(value, str):
        # JSON is a subset of YAML 1.2, so its quotes and numbers can be read back.
        return json.dumps(value)
    if PLAIN.fullmatch(value) and isinstance(resolve_scalar(value), str):
        return value

    quoted = json.dumps(value, ensure_ascii=False)
    # YAML allows only printable characters, and names of files may have others.
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


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
        inside = (*path, key)
        line = "  " * len(path) + f"{yaml_flow(key)}:"
        # An empty group stands on the line of its key.
        if isinstance(value, dict) and value:
            yield line
            yield from _lines(value, inside, places)
            continue
        line += f" {yaml_flow(value)}"
        if places is not None:
            line = f"{line:<48}  # {places.get(inside, DEFAULT)}"
        yield line
