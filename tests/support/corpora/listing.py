"""List a whole source, for the tests of all sources."""

from __future__ import annotations

from data_prep.sources.protocol import Input, Source, with_damage


class MemorySpool:
    """A spool in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, data: bytes) -> tuple[str, int]:
        offset = len(self.data)
        self.data += data
        return "spool", offset


def list_source(source: Source, spool: MemorySpool | None = None) -> list[Input]:
    """Every input of every container."""
    spool = spool or MemorySpool()
    return [
        row
        for box in source.containers()
        for row in with_damage(box, source.inputs(box, spool=spool))
    ]
