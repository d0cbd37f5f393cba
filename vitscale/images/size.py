"""The size of a model's images: one number for a square, rows and columns otherwise."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

ImageSize = int | tuple[int, int]
"""Pixels a side, or (rows, columns) of images that are not square."""


def image_size(value: Any) -> Any:
    """Two equal numbers as one, so that a square has one spelling; two others as a tuple.

    Values of another form are returned as they are.
    """
    if not isinstance(value, list | tuple) or len(value) != 2:
        return value
    rows, columns = value
    return rows if rows == columns else (rows, columns)


def rows_and_columns(size: ImageSize) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def sides_of(size: ImageSize) -> tuple[int, ...]:
    """The different lengths of the sides."""
    return (size,) if isinstance(size, int) else size


def show_size(size: ImageSize) -> str:
    """`224` or `192 x 384`."""
    return str(size) if isinstance(size, int) else f"{size[0]} x {size[1]}"


Pixels = Annotated[int, Field(gt=0)]
ImageSizeSetting = Annotated[Pixels | tuple[Pixels, Pixels], BeforeValidator(image_size)]
"""The type of a setting."""
