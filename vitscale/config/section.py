"""The base type of every configuration section.

Owns: what all sections share (frozen, strict, unknown keys refused).
Leaves out: reading files and reporting (`loader`), and the sections (beside their parts).
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings. Unknown keys, NaN and silent type conversion are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Run(Section):
    """A whole configuration file. Its `problems` are conflicts between values of valid type."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, what is wrong and what to do); every one is reported."""
        yield from ()
