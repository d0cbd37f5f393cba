"""Read labels of WebDataset samples without an index.

Leaves out: which members make a sample (`stream`, `scan`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

from vitscale.config.errors import UserError
from vitscale.data.tars.settings import WebdatasetSettings

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MAX_LABEL_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class TarLabels:
    """The classes of tars, and where their labels are."""

    classes: tuple[str, ...]
    """Position = label; empty: the samples have no labels."""
    suffix: str
    """Suffix of the member with the label."""
    field: str | None
    """Its JSON field; None: the whole member."""

    @classmethod
    def of(cls, settings: WebdatasetSettings) -> TarLabels:
        """Raises UserError if the class names cannot be read."""
        suffix, _, field = settings.label.partition(":")
        return cls(classes=_classes(settings), suffix=suffix, field=field or None)

    @property
    def sha256(self) -> str:
        """Hash of the class names, as in a manifest."""
        text = json.dumps(list(self.classes), ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def label(self, data: bytes | None, *, key: str, tar: str) -> int | None:
        """The label in a member; None if there are no classes. data: None if there is no member.

        Raises ValueError for a sample without a label, UserError for one outside the classes.
        """
        if not self.classes:
            return None
        if data is None:
            raise ValueError(f"no member .{self.suffix}")
        value = self._value(data)
        if value in self._positions:
            return self._positions[value]
        if value.isdecimal() and int(value) < len(self.classes):
            return int(value)
        raise UserError(
            f"sample {key!r} has label {value[:60]!r}",
            where=tar,
            allowed=f"0 to {len(self.classes) - 1}, or a line of data.webdataset.class_names",
            next_step="correct data.webdataset.num_classes or class_names",
        )

    def read(self, member: IO[bytes]) -> bytes:
        """The content of a member with a label; one that is too long is cut, and refused later."""
        return member.read(MAX_LABEL_BYTES + 1)

    def _value(self, data: bytes) -> str:
        if len(data) > MAX_LABEL_BYTES:
            raise ValueError(f"a label of {len(data)} bytes")
        if self.field is None:
            return data.decode("utf-8").strip()
        content = json.loads(data)
        value = content.get(self.field) if isinstance(content, dict) else None
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ValueError(f"no field {self.field!r} with a name or a number")
        return str(value).strip()

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}


def _classes(settings: WebdatasetSettings) -> tuple[str, ...]:
    if settings.class_names is None:
        return tuple(map(str, range(settings.num_classes or 0)))
    path = Path(settings.class_names).expanduser()
    where = "data.webdataset.class_names"
    try:
        names = tuple(line.strip() for line in path.read_text("utf-8").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", where=where) from None
    names = names[:-1] if names and not names[-1] else names
    if not names or "" in names or len(set(names)) < len(names):
        raise UserError(f"{path} has empty or equal lines, or none", where=where)
    return names
