"""Remove credentials from what is logged, shown or sent to a tracking server."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

# ---- what a secret looks like -----------------------------------------------------------------

# Patterns are text: all compiled at import, they would be 9 ms of the start of every command.

# Words before `_token` that make it one of a model.
_OF_MODELS = "cls reg class dist mask distillation register".split()
# The end of a name that holds a secret: DB_PASSWORD, hf_token, api-key, GH_PAT. The path of a file
# of credentials is none.
_WORDS = (
    r"password|passwd|passphrase|pgpass|secret|cookie|connection_?string|(?<=login\()key",
    "".join(rf"(?<!{each}_)" for each in _OF_MODELS) + "token",
    r"(?:api|access|account|auth|encryption|master|private|secret|shared|signing|ssh|storage)"
    r"[_-]?key",
    r"credentials?(?![\"']?\]?\s*[=:,]\s*[\"']?[/~.])",
    r"(?<![a-z])(?:pwd|pat|auth|authorization)|(?<=_)(?<!forward_)(?<!backward_)pass",
)
_WORD = f"(?:{'|'.join(_WORDS)})"
_NAME = rf"\b\w*{_WORD}"
_MANY = r"(?:(?<!token)s)?"
_SECRET_KEY = rf"(?i){_NAME}{_MANY}$"
# Text in quotes, of Python, JSON, YAML or a shell, with one character or more.
_LONG = r"(?:\"\"\"(?:.|\n)+?\"\"\"|'''(?:.|\n)+?''')"
_QUOTED = rf"[rbfu]{{0,2}}(?:{_LONG}|\"[^\"\n]+\"|'[^'\n]+')"
# The next line of a patch has a sign first.
_GAP = r"[ \t]*(?:\n[+ -]?[ \t]*)?"
_START = r"^[+-]?[ \t]*"

# The bounds keep the time linear, whatever the text is.
_USERINFO = r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,40}://)[^/\s?#'\"]*@"
# Signed URLs carry secrets under any name.
_QUERY = r"\?[^\s'\"=?]+=[^\s'\"]+"
# NAME = "text", "NAME": "text", x["NAME"] = "text", NAME: str = "text", NAME == "text": all texts
# of the line, and of the next ones up to the bracket that closes.
_SECRET_TEXT = (
    rf"(?i)(?P<key>{_WORD}{_MANY}[\"']?\]?[ \t]*(?:=>|:=|[=!]?=|:))"
    rf"(?P<rest>[ \t]*{_LONG}|[^\n]*[(\[{{][ \t]*(?:\n[^\n)\]}}]*)+|[^\n]*)"
)
# f("NAME", "text"), f("NAME", default="text").
_SECRET_ARGUMENT = (
    rf"(?i)(?P<key>{_WORD}[\"'],{_GAP}(?:default[ \t]*=[ \t]*)?){_QUOTED}(?![ \t]*:)"
)
# NAME=VALUE in shell, such as HF_TOKEN=abc; not HF_TOKEN=$(cat FILE), HF_TOKEN_PATH=FILE, f(x).
_NO_SECRET = r"[\"']?(?:[\s$]|$)|\*\*\*|[\w.]*[(\[{]|(?:true|false|none|null)\b"
SECRET_ASSIGNMENT = re.compile(
    rf"(?i)(?P<name>{_NAME})=(?!{_NO_SECRET})(?:\"[^\"]*\"|'[^']*'|[^\s\"'&]+)"
)
# A line of YAML, with the sign of a line in a patch; also an item of a list, or the next line.
_SECRET_LINE = (
    rf"(?im)(?P<key>{_START}(?:-[ \t]+)?[\"']?[\w-]*{_NAME}{_MANY}[\"']?:[ \t]+)"
    r"(?:[|>][+-]?[ \t]*\n.*|(?![(\[{][ \t]*$)\S.*)$"
)
# Within braces: {user: me, password: abc}.
_SECRET_ITEM = (
    rf"(?i)(?P<key>[{{,][ \t]*[\"']?{_NAME}[\"']?:[ \t]+)(?![\"'({{\[])[^\s,}}]+"
)
# NAME = text without quotes, of letters and digits, as in INI files; no call, no attribute.
_SECRET_BARE = rf"(?i)(?P<key>{_WORD}[ \t]+=[ \t]+)(?=\S*\d)(?=\S*[a-z])[\w+/-]{{8,}}=*(?![\w(.\[])"
# The next word is the secret in commands, in .netrc and in XML.
_BEFORE_SECRET = (
    rf"(?<![\w-])--(?=\w)[\w-]{{0,60}}?{_WORD}[ \t]+",  # --token abc
    r"(?<![\w-])(?:-u|--user)[ \t=]+[\w.@-]+:",  # curl -u me:abc
    rf"\bsetenv[ \t]+{_NAME}[ \t]+",
    r"\bsshpass[ \t]+-p[ \t]*",
    r"\blogin[ \t]+\S+[ \t]+password[ \t]+",
    rf"{_START}password[ \t]+(?=\S+$)",
    rf"<{_NAME}>",
)
_SECRET_WORD = rf"(?im)(?P<key>{'|'.join(_BEFORE_SECRET)})(?![-$\"',)\]])[^\s\"'<]+"
# Secrets by their form, whatever their name is: HTTP's, keys of providers, JSON web tokens.
_SECRET_FORM = (
    r"(?P<key>\b(?i:bearer)[ \t]+(?![{$<])(?=[\w.~+/=-]{6})"
    r"|\b(?i:basic)[ \t]+(?=[A-Za-z+/]*[0-9=])(?=[A-Za-z0-9+/=]{8}))[\w.~+/=-]+"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{6,}|\bAIza[\w-]{30,}|\bhf_[A-Za-z0-9]{20,}"
    r"|\b(?:gh[oprsu]|github_pat|glpat|npm|pypi|xox[abprs]|sk|rk)[_-][\w-]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*"
)
_PRIVATE_KEY = (
    r"-----BEGIN (?P<kind>[A-Z ]*PRIVATE KEY)-----"
    r"(?:(?:(?!-----)(?:.|\n))*?-----END (?P=kind)-----|(?:[\s+\\n\"'-]*[A-Za-z0-9+/=]{20,})*)"
)

# ---- what others may see ----------------------------------------------------------------------

# Settings of `launch` that others may see: the rest (setup, python, accounts) is the site's own.
_SIZES = "nodes tasks_per_node num_tasks gpus_per_node cpus_per_task mem_gb".split()
# MLflow's limits of a parameter's name.
_ODD_KEY_CHARS = r"[^\w\-. :/]"
_MAX_KEY_CHARS = 250


def redact(text: str) -> str:
    """Remove user:password and queries from URLs, values of names that sound secret, and what is
    a secret by its form: keys of providers, private keys, HTTP's credentials."""
    # Larger forms come first, since later patterns would cut pieces out of them.
    text = re.sub(_PRIVATE_KEY, "*** private key ***", text)
    text = re.sub(_USERINFO, r"\g<scheme>", text)
    text = re.sub(_QUERY, "?***", text)
    text = re.sub(_SECRET_TEXT, _without_texts, text)
    text = re.sub(_SECRET_ARGUMENT, r"\g<key>'***'", text)
    text = re.sub(SECRET_ASSIGNMENT, r"\g<name>=***", text)

    for pattern in (_SECRET_LINE, _SECRET_ITEM):
        text = re.sub(pattern, r"\g<key>'***'", text)

    for pattern in (_SECRET_BARE, _SECRET_WORD):
        text = re.sub(pattern, r"\g<key>***", text)
    return re.sub(_SECRET_FORM, lambda found: f"{found['key'] or ''}***", text)


def _without_texts(found: re.Match[str]) -> str:
    return found["key"] + re.sub(_QUOTED, "'***'", found["rest"])


def short_reason(error: BaseException) -> str:
    """The first line of an error's text, `redact`ed and cut; the type if there is no text."""
    lines = redact(str(error)).strip().splitlines() or [type(error).__name__]
    return printable(lines[0][:200])


def printable(text: str) -> str:
    """The text without characters that control a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _shared(value: Any, key: str) -> Any:
    # A name that holds a secret hides its value, whatever the type.
    if value is not None and re.search(_SECRET_KEY, key):
        return "***"
    if isinstance(value, Mapping):
        # Only sizes of `launch` are shown; accounts, paths and setup belong to the site.
        shown = value.keys() & _SIZES if key == "launch" else value
        return {
            name: _shared(each, str(name))
            for name, each in value.items()
            if name in shown
        }
    if isinstance(value, list | tuple):
        return [_shared(each, key) for each in value]
    if isinstance(value, str):
        return redact(value)
    return value


def shared_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as others may see it: no secrets, and of `launch` the sizes alone."""
    return yaml.safe_dump(_shared(config, ""), sort_keys=False, allow_unicode=True)


def shown_setting(key: str, text: str | None) -> str | None:
    """The text of one setting without secrets. key: dotted."""
    if text is None:
        return None
    return str(_shared(text, key.rpartition(".")[2]))


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """{dotted key: text as in YAML}, secrets included. A flat configuration stays as it is."""

    def leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
        # An empty group within a configuration is a value; an empty configuration has none.
        if isinstance(value, Mapping) and (value or not key):
            for name, inner in value.items():
                yield from leaves(inner, f"{key}.{name}" if key else str(name))
        else:
            yield (
                key,
                value if isinstance(value, str) else json.dumps(value, default=str),
            )

    return dict(leaves(config, ""))


def flatten_params(config: Mapping[str, Any]) -> dict[str, str]:
    """{dotted key: text} as others may see it, with keys that MLflow allows."""
    texts = flatten(_shared(config, "")).items()
    return {
        # MLflow takes no `a//b` and `a/../b`.
        posixpath.normpath(re.sub(_ODD_KEY_CHARS, "_", key)[:_MAX_KEY_CHARS]): text
        for key, text in texts
    }
