"""Base classes of configuration sections.

Owns: what all sections share (frozen, strict, unknown keys refused), and choices of sections.
Leaves out: loading (`loader`), and the sections themselves (`settings.py` of each package).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, PrivateAttr, Tag

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

    _card: str = PrivateAttr(default="")

    @property
    def card(self) -> str:
        """The comment at the top of the file, without its `#`: what the run is, and its sources."""
        return self._card

    def with_card(self, card: str) -> Self:
        run = self.model_copy()
        run._card = card
        return run


class NamedSection(Section):
    """Settings of one entry of a registry, chosen by `name`. Concrete types narrow `name`."""

    name: str


def choice_of(registry: Mapping[str, Any], *, default: str | None = None) -> Any:
    """The field type "settings of one entry of `registry`", chosen by `name`.

    Each entry has its settings type in `Settings`, whose `name` is the entry's key. default: the
    entry of a group without a name.
    """

    def name_of(value: Any) -> str | None:
        name = value.get(NAME, default) if isinstance(value, dict) else getattr(value, NAME, None)
        return name if isinstance(name, str) else None

    members = tuple(Annotated[entry.Settings, Tag(name)] for name, entry in registry.items())
    extra: dict[str, Any] = {DEFAULT_NAME: default}
    mark = Field(discriminator=Discriminator(name_of), json_schema_extra=extra)
    return Annotated[Union[members], mark]  # noqa: UP007  # made at run time
