"""Base classes of configuration sections.

Owns: what all sections share (frozen, strict, unknown keys refused), and choices of sections.
Leaves out: loading (`loader`), and the sections themselves (`settings.py` of each package).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union

from pydantic import BaseModel, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.json_schema import SkipJsonSchema

from vitscale.config.schema import DEFAULT_NAME, NAME


class Section(BaseModel):
    """A frozen group of settings. Unknown keys, NaN and silent type conversion are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, what is wrong and what to do) for each conflict between values."""
        yield from ()


class Run(Section):
    """A whole configuration file."""

    # No key of the file has its alias.
    card: SkipJsonSchema[str] = Field(default="", exclude=True, validation_alias="# card")
    """The comment at the top of the file, without its `#`: what the run is, and its sources."""


class NamedSection(Section):
    """Settings of one entry of a registry, chosen by `name`. Concrete types narrow `name`."""

    name: str


def choice_of(registry: Mapping[str, Any], *, default: str | None = None) -> Any:
    """The field type "settings of one entry of `registry`", chosen by `name`.

    Each entry has its settings type in `Settings`, whose `name` is the entry's key. default: the
    entry of a group without a name.
    """

    def with_name(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        if default is None or not isinstance(value, dict) or NAME in value:
            return validate(value)
        chosen = validate({NAME: default} | value)
        chosen.model_fields_set.discard(NAME)  # nobody set it
        return chosen

    members = tuple(entry.Settings for entry in registry.values())
    mark = Field(discriminator=NAME, json_schema_extra={DEFAULT_NAME: default})
    return Annotated[Union[members], mark, WrapValidator(with_name)]  # noqa: UP007  # at run time
