"""Read labels of WebDataset samples without an index: numbers in members `.cls`.

Leaves out: which members make a sample (`stream`, `scan`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from vitscale.config.errors import UserError
from vitscale.data.tars.settings import WebdatasetSettings

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIX = "cls"
MAX_LABEL_BYTES = 100


@dataclass(frozen=True, kw_only=True)
class TarLabels:
    """The classes of tars."""

    num_classes: int
    """0: the samples have no labels."""

    @classmethod
    def of(cls, settings: WebdatasetSettings) -> TarLabels:
        return cls(num_classes=settings.num_classes or 0)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.num_classes)))

    @property
    def sha256(self) -> str:
        """Hash of the class names, as in a manifest."""
        text = json.dumps(list(self.classes), ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def label(self, data: bytes | None, *, key: str, tar: str) -> int | None:
        """The label in a member; None if there are no classes. data: None if there is no member.

        Raises ValueError for a sample without a label, UserError for one outside the classes.
        """
        if not self.num_classes:
            return None
        if data is None:
            raise ValueError(f"no member .{LABEL_SUFFIX}")
        value = data[:MAX_LABEL_BYTES].decode("utf-8").strip()
        if value.isdecimal() and int(value) < self.num_classes:
            return int(value)
        raise UserError(
            f"sample {key!r} has label {value[:60]!r}",
            where=tar,
            allowed=f"0 to {self.num_classes - 1}",
            next_step="correct data.webdataset.num_classes, or make an index with "
            "data_prep/index_shards.py",
        )
