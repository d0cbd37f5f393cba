"""Remove credentials from text that is logged, shown or sent to a tracking server."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s?#'\"]*@")
# Signed URLs carry secrets under any name.
_QUERY = re.compile(r"\?[^\s'\"=?]+=[^\s'\"]+")
# NAME=VALUE in shell, such as HF_TOKEN=abc; not HF_TOKEN=$(cat FILE), HF_TOKEN_PATH=FILE.
SECRET_ASSIGNMENT = re.compile(
    r"(?P<name>\b\w*(?:password|passwd|secret|token|api_?key|access_?key))=(?![\"']?(?:[\s$]|$))"
    r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'&]+)",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Remove user:password and queries from URLs, and values of variables that sound secret."""
    text = _QUERY.sub("?***", _USERINFO.sub(r"\g<scheme>", text))
    return SECRET_ASSIGNMENT.sub(r"\g<name>=***", text)


def short_reason(error: BaseException) -> str:
    """The first line of an error's text, `redact`ed and cut; the type if there is no text."""
    lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
