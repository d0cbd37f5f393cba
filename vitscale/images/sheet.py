"""Draw rows of small images, each below a line of text, into one PNG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from vitscale.config.errors import not_written
from vitscale.distributed.atomic_files import atomic_file, make_folders
from vitscale.images.plain import PILLOW_ERRORS, SUFFIXES, open_picture

SIDE = 96
TEXT = 18
DAMAGE = (OSError, ValueError, *PILLOW_ERRORS)


@contextmanager
def writing(folder: Path, *, where: str) -> Iterator[None]:
    """Create a folder for what the block writes. Raises UserError if that is not possible."""
    try:
        make_folders(folder)
        yield
    except OSError as error:
        raise not_written(error, f"{where}={folder}") from None


def draw_rows(path: Path, rows: Sequence[tuple[str, Sequence[bytes]]]) -> None:
    """Write the sheet. rows: text, and encoded images; damaged ones stay blank."""
    # Imported late: it takes half a second, and most commands draw nothing.
    from matplotlib import get_data_path

    height = SIDE + TEXT
    width = max(len(images) for _, images in rows) * SIDE
    sheet = Image.new("RGB", (width, len(rows) * height), "white")
    draw = ImageDraw.Draw(sheet)
    # Pillow's own font has no umlauts; matplotlib brings one that has most scripts.
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf", 12)
    for y, (text, images) in enumerate(rows):
        draw.text((2, y * height + 1), text, "black", font)
        for x, content in enumerate(images):
            # A damaged image leaves its place blank, since the sheet is there to find such images.
            with (
                suppress(*DAMAGE),
                open_picture(content, formats=(*SUFFIXES,)) as image,
            ):
                # JPEG decoders scale down cheaply; twice the size is enough for a clean resize.
                image.draft("RGB", (2 * SIDE, 2 * SIDE))
                small = ImageOps.contain(image.convert("RGB"), (SIDE - 2, SIDE - 2))
                sheet.paste(small, (x * SIDE, y * height + TEXT))

    # Written at once, so that an interrupted command leaves no half of a sheet.
    with atomic_file(path) as file:
        sheet.save(file, "PNG")
