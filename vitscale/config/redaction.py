"""Remove credentials from what is logged, shown or sent to a tracking server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

# All of these take time linear in the text: none may begin with a run of any length at any place.
_USERINFO = re.compile(r"(?<=[A-Za-z0-9+.-]://)[^/\s?#'\"]*@")
# Signed URLs carry secrets under any name.
_QUERY = re.compile(r"\?[^\s'\"=?]+=[^\s'\"]+")
# Tokens of a model are no secrets.
_WORD = r"(?:password|passwd|secret|(?<!class_)(?<!distillation_)token|api_?key|access_?key)"
_NAME = rf"\b\w*{_WORD}"
_SECRET_KEY = re.compile(rf"{_NAME}$", re.IGNORECASE)
# In YAML, with the sign of a line in a patch.
_SECRET_LINE = re.compile(rf"^(?P<key>[+-]?[ \t]*[\w-]*{_WORD}: +)\S.*$", re.I | re.M)
# NAME=VALUE in shell, such as HF_TOKEN=abc; not HF_TOKEN=$(cat FILE), HF_TOKEN_PATH=FILE.
SECRET_ASSIGNMENT = re.compile(
    rf"(?P<name>{_NAME})=(?![\"']?(?:[\s$]|$))(?:\"[^\"]*\"|'[^']*'|[^\s\"'&]+)", re.IGNORECASE
)
# Settings of `launch` that others may see: the rest (setup, python, accounts) is the site's own.
_SIZES = ("nodes", "tasks_per_node", "num_tasks", "gpus_per_node", "cpus_per_task", "mem_gb")
# MLflow's limits of a parameter's name.
_ODD_KEY_CHARS, _MAX_KEY_CHARS = re.compile(r"[^\w\-. :/]"), 250


def redact(text: str) -> str:
    """Remove user:password and queries from URLs, and values of names that sound secret."""
    text = _QUERY.sub("?***", _USERINFO.sub("", text))
    text = SECRET_ASSIGNMENT.sub(r"\g<name>=***", text)
    return _SECRET_LINE.sub(r"\g<key>'***'", text)


def short_reason(error: BaseException) -> str:
    """The first line of an error's text, `redact`ed and cut; the type if there is no text."""
    lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _shared(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        shown = value.keys() & _SIZES if key == "launch" else value
        return {name: _shared(each, str(name)) for name, each in value.items() if name in shown}
    if isinstance(value, list | tuple):
        return [_shared(each, key) for each in value]
    if value is not None and _SECRET_KEY.search(key):
        return "***"
    return redact(value) if isinstance(value, str) else value


def shared_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as others may see it: no secrets, and of `launch` the sizes alone."""
    return yaml.safe_dump(_shared(config, ""), sort_keys=False)


def flatten_params(config: Mapping[str, Any]) -> dict[str, str]:
    """The same as {dotted key: text as in YAML}."""

    def leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and (value or not key):
            for name, inner in value.items():
                yield from leaves(inner, f"{key}.{name}" if key else str(name))
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield _ODD_KEY_CHARS.sub("_", key)[:_MAX_KEY_CHARS], text

    return dict(leaves(_shared(config, ""), ""))
