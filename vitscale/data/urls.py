"""Validate URLs of shard folders and join file names to them.

fsspec supports schemes that run commands, and chains of schemes (`pipe:`, `a::b`). Both are
refused here: a scheme must be in `SCHEMES`, and fsspec gets plain URLs only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath
from urllib.parse import quote

from vitscale.config.errors import UserError

# Scheme -> optional package that it needs.
SCHEMES: dict[str, str | None] = {
    "http": None,
    "https": None,
    "s3": "s3fs",
    "gs": "gcsfs",
    "memory": None,
}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_PLAIN = re.compile(r"[A-Za-z0-9._~%+=,@!:/ -]*")


def is_url(text: str) -> bool:
    """Whether a text starts like a URL, with a scheme and a colon."""
    return _SCHEME.match(text) is not None


def url_problem(text: str) -> str | None:
    """Why a URL of a folder is refused. Never quotes the URL: it may contain a password."""
    scheme, _, rest = text.partition(":")
    if scheme not in (*SCHEMES, "file"):
        return (
            f"scheme {scheme + ':'!r} is not supported; allowed: {', '.join(SCHEMES)}, file, and "
            "paths (write ./ before a path with a colon)"
        )
    if not rest.startswith("//"):
        return f"a URL starts with {scheme}://"
    if "::" in rest:
        return "is a chain of URLs (::); give one URL"
    authority, _, path = rest[2:].partition("/")
    if "@" in authority or "?" in rest or "#" in rest:
        return (
            "a URL with a user name, password, '?' or '#' would put secrets into logs; give "
            "credentials where fsspec looks for them (environment, ~/.netrc, ~/.aws)"
        )
    if not authority and scheme not in ("file", "memory"):
        return f"has no host or bucket after {scheme}://"
    if not _PLAIN.fullmatch(rest) or ".." in path.split("/"):
        return (
            "has characters that a plain URL cannot have (line breaks, braces, wildcards, quotes, "
            "'..'); nothing is expanded"
        )
    return None


@dataclass(frozen=True, slots=True)
class Url:
    """A folder or file at a URL with a scheme of `SCHEMES`; `/` joins names as with paths."""

    text: str

    @classmethod
    def checked(cls, text: str, *, where: str) -> Url:
        """Raises UserError if `url_problem` finds one."""
        problem = url_problem(text)
        if problem is not None:
            raise UserError(problem, where=where)
        return cls(text.rstrip("/"))

    @property
    def scheme(self) -> str:
        return self.text.partition(":")[0]

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        """Join a relative name, which may contain `..` but must stay on the host or in the bucket.

        Names come from a manifest, so anything else raises UserError.
        """
        scheme, _, rest = self.text.partition("://")
        authority, _, folder = rest.partition("/")
        joined = normpath(f"{folder}/{name}" if folder else name)
        if name.startswith("/") or joined.split("/")[0] == ".." or re.search(r"[\0-\x1f]", name):
            raise UserError(f"{name!r} is not a valid file name below a URL", where=self.text)
        if scheme in ("http", "https"):
            own = normpath(folder) if folder else "."
            joined = normpath(f"{own}/{quote(name)}")
        return Url(f"{scheme}://{authority}/{'' if joined == '.' else joined}".rstrip("/"))


# A folder or file, on a file system or at a URL.
Location = Path | Url


def location_of(path: Path | str, *, where: str = "data.path") -> Location:
    """Parse a path or URL. Raises UserError for a URL that is not allowed."""
    if isinstance(path, Path) or not is_url(path):
        return Path(path)
    url = Url.checked(path, where=where)
    return Path(path.removeprefix("file://")) if url.scheme == "file" else url
