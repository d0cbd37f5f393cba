"""The base type of every configuration section.

Owns: what all sections share (frozen, strict, unknown keys refused).
Leaves out: reading files and reporting (`loader`), and the sections (beside their parts).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen group of settings. Unknown keys, NaN and silent type conversion are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _literal_of_same_type(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes true for the 1 of Literal[0, 1], even in strict mode."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if get_origin(annotation) is Literal and isinstance(value, bool | float):
            if type(value) not in map(type, get_args(annotation)):
                raise ValueError("is of another type than the allowed values")
        return value


class Run(Section):
    """A whole configuration file. Its `problems` are conflicts between values of valid type."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, what is wrong and what to do); every one is reported."""
        yield from ()
