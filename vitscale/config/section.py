"""Base classes of configuration sections.

Owns: what all sections share (frozen, strict, unknown keys refused, the default name of a choice).
Leaves out: loading (`loader`), and the sections themselves (`settings.py` of each package).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from vitscale.config.fields import NAME, DefaultName, groups_in


class Section(BaseModel):
    """A frozen group of settings. Unknown keys, NaN and silent type conversion are refused.

    A field can be a choice of sections by their key `name`:
    `Annotated[A | B, Field(discriminator="name")]`, each with `name: Literal["a"] = "a"`; so can
    the items of a list. A choice without a name takes that of the field's default, or `default` of
    `choice_of`.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        prepared = dict(values)
        for key, value in values.items():
            info = cls.model_fields.get(key)
            if info is None:
                continue
            if get_origin(info.annotation) is Literal and isinstance(value, bool | float):
                # Pydantic takes true for the 1 of Literal[0, 1], even in strict mode; no text.
                if type(value) not in map(type, get_args(info.annotation)):
                    prepared[key] = str(value)
            elif isinstance(value, dict) and NAME not in value:
                groups = groups_in(info)
                if groups is not None and groups.default_name is not None:
                    prepared[key] = {NAME: groups.default_name, **value}
        return prepared


class Run(Section):
    """A whole configuration file. Its `problems` are conflicts between values of valid type."""

    _card: str = PrivateAttr(default="")

    @property
    def card(self) -> str:
        """The comment at the top of the file, without its `#`: what the run is, and its sources."""
        return self._card

    def with_card(self, card: str) -> Self:
        run = self.model_copy()
        run._card = card
        return run

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, what is wrong and what to do); every one is reported."""
        yield from ()


class NamedSection(Section):
    """Settings of one entry of a registry, chosen by `name`. Concrete types narrow `name`."""

    name: str

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (dotted key, what is wrong and what to do), as `Run.problems`."""
        yield from ()


def choice_of(registry: Mapping[str, Any], *, default: str | None = None) -> Any:
    """The field type "settings of one entry of `registry`", chosen by `name`.

    Each entry has its settings type in `Settings`, whose `name` is the entry's key. `default`: the
    entry of a group without a name; None: that of the field's default.
    """
    types = tuple(entry.Settings for entry in registry.values())
    if len(types) == 1:
        return types[0]
    choice: Any = Annotated[Union[types], Field(discriminator="name")]  # noqa: UP007  # made at run time
    return choice if default is None else Annotated[choice, DefaultName(default)]
