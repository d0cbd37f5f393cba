"""The list of settings in --help and in the documentation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vitscale.config.reference import as_markdown, as_text, settings_reference
from vitscale.config.section import Run, Section


class Supervised(Section):
    """Classes from labels."""

    name: Literal["supervised"] = "supervised"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target."""


class Mae(Section):
    name: Literal["mae"] = "mae"
    """Hidden patches."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target."""
    mask_ratio: float = 0.75
    """Share of patches
    that are hidden."""


class Shared(Section):
    """Both stages have it."""

    retries: int | None = None
    """Attempts; null: no limit."""


class Part(Section):
    """One of several."""

    share: float = Field(gt=0)
    """Of all samples."""


class First(Run):
    """The first stage."""

    stage: Literal["first"] = "first"
    """First."""
    objective: Annotated[Supervised | Mae, Field(discriminator="name")] = Supervised()
    shared: Shared = Shared()
    parts: tuple[Part, ...] = Field(default=(), strict=False)
    """Several."""


class Second(Run):
    """The second stage."""

    path: str
    """Where to write."""
    parts: tuple[Part, ...] = Field(default=(), strict=False)
    """Several."""
    shared: Shared = Shared()


BOTH = settings_reference({"first": First, "second": Second})
TEXT = """
[stage: first] The first stage.
  stage: first; default first
      First.
  objective: a group with the key name: supervised, mae; default supervised
      `name` chooses the group.
  parts: a list of groups, see below; default []
      Several.

[stage: second] The second stage. As with stage: first: parts.
  path: text; required
      Where to write.

[objective with name: supervised (first)] Classes from labels.
  objective.label_smoothing: a number at least 0 and below 1; default 0.0
      Share of the target.

[objective with name: mae (first)] Hidden patches. As with name: supervised: label_smoothing.
  objective.mask_ratio: a number; default 0.75
      Share of patches that are hidden.

[shared] Both stages have it.
  shared.retries: a whole number, or null; default null
      Attempts; null: no limit.

[parts, each item] One of several.
  share: a number above 0; required
      Of all samples."""


def test_text_lists_every_setting_once() -> None:
    assert as_text(BOTH) == TEXT


def test_markdown_has_what_the_text_has() -> None:
    page = as_markdown(BOTH)
    assert "## objective with name: mae (first)\nHidden patches. As with name: " in page
    assert "label_smoothing.\n\n- **`objective.mask_ratio`** (a number; default 0.75)" in page
    assert "- **`path`** (text; required). Where to write.\n" in page
    assert page.count("\n- **`") == TEXT.count("; default") + TEXT.count("; required")


def test_one_stage_is_not_named_at_its_groups() -> None:
    titles = [group.title for group in settings_reference({"second": Second})]
    assert titles == ["stage: second", "parts, each item", "shared"]
