"""URLs of shard folders: which are allowed, and how names are joined to them.

fsspec knows schemes that run commands and chains of them (`pipe:`, `a::b`). None of these can be
reached from here: a scheme must be in `SCHEMES`, and fsspec is given plain paths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath
from urllib.parse import quote

from vitscale.config.errors import UserError

# Scheme -> what to install for it, beyond what vitscale needs anyway.
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
    """Whether this would be read as a URL: whatever begins like a scheme."""
    return _SCHEME.match(text) is not None


def url_problem(text: str) -> str | None:
    """What is wrong with a URL of a folder, without repeating it: it may hold a password."""
    scheme, _, rest = text.partition(":")
    if scheme not in (*SCHEMES, "file"):
        return (
            f"nothing is read by way of {scheme + ':'!r}; allowed: {', '.join(SCHEMES)}, file, and "
            "paths (./ in front, where one has a colon in it)"
        )
    if not rest.startswith("//"):
        return f"a URL begins with {scheme}://"
    if "::" in rest:
        return "is a chain of URLs (::); give one URL"
    authority, _, path = rest[2:].partition("/")
    if "@" in authority or "?" in rest or "#" in rest:
        return (
            "a URL with a user name, password, '?' or '#' would carry secrets into logs; give "
            "credentials as fsspec's backends take them (environment, ~/.netrc, ~/.aws)"
        )
    if not authority and scheme not in ("file", "memory"):
        return f"names no host or bucket behind {scheme}://"
    if not _PLAIN.fullmatch(rest) or ".." in path.split("/"):
        return (
            "holds characters that are no part of a plain URL (line breaks, braces, wildcards, "
            "quotes, '..'); nothing is expanded in it"
        )
    return None


@dataclass(frozen=True, slots=True)
class Url:
    """A folder or file behind a scheme of `SCHEMES`; `/` joins names as with paths."""

    text: str

    @classmethod
    def checked(cls, text: str, *, where: str) -> Url:
        """Raises UserError for whatever `url_problem` finds."""
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
        """A relative name below (or with `..` beside) this folder, on the same host or in the same
        bucket. Names come from a manifest: raises UserError for any other."""
        scheme, _, rest = self.text.partition("://")
        authority, _, folder = rest.partition("/")
        joined = normpath(f"{folder}/{name}" if folder else name)
        if name.startswith("/") or joined.split("/")[0] == ".." or re.search(r"[\0-\x1f]", name):
            raise UserError(f"{name!r} is no name of a file below a URL", where=self.text)
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
