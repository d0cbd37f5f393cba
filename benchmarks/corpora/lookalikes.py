"""Draw pictures that look alike at low resolution and are different: inspection pictures, icons.

Owns: two generated corpora on which a search for duplicates makes mistakes. Each picture is drawn
on its own; no two are copies.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

INSPECTION_SIDE, ICON_SIDE = 200, 96
DEFECTS = ("none", "scratch", "pit", "stain")
TILT, WAVES = 22.0, 0.45
NUM_BADGES = 350


def inspection_picture(seed: int) -> tuple[Image.Image, str]:
    """(a grey surface under one lamp with a small defect or none, the name of the defect)."""
    rng = np.random.default_rng((seed, 1))
    y, x = np.mgrid[:INSPECTION_SIDE, :INSPECTION_SIDE] / INSPECTION_SIDE - 0.5
    # The lamp moves little between pictures, and the grain of the surface is fine.
    tilt_x, tilt_y, waves = rng.normal(0, TILT, 2).tolist() + [rng.normal(0, WAVES, (6, 6))]
    surface = 128 + 6 * rng.normal() - 40 * (x**2 + y**2) + tilt_x * x + tilt_y * y
    surface += np.asarray(Image.fromarray(waves).resize(surface.shape, Image.Resampling.BICUBIC))
    surface += rng.normal(0, 7, surface.shape)
    image = Image.fromarray(surface.clip(0, 255).astype(np.uint8))
    defect = DEFECTS[int(rng.integers(len(DEFECTS)))]
    draw = ImageDraw.Draw(image)
    left, top = rng.uniform(20, INSPECTION_SIDE - 20, 2).tolist()
    if defect == "scratch":
        right, bottom = left + rng.uniform(-16, 16), top + rng.uniform(-16, 16)
        draw.line((left, top, right, bottom), fill=70, width=2)
    elif defect == "pit":
        draw.ellipse((left, top, left + 5, top + 5), fill=50)
    elif defect == "stain":
        draw.ellipse((left, top, left + 12, top + 8), fill=150)
    return image, defect


def icon(seed: int) -> tuple[Image.Image, str]:
    """(one of a few badges with one of many small signs in it, the name of the sign)."""
    rng = np.random.default_rng((seed, 2))
    badge = int(rng.integers(NUM_BADGES))
    shape = np.random.default_rng((badge, 3))
    image = Image.new("RGB", (ICON_SIDE, ICON_SIDE), "white")
    draw = ImageDraw.Draw(image)
    left, top = shape.uniform(4, 30, 2).tolist()
    right, bottom = (ICON_SIDE - shape.uniform(4, 30, 2)).tolist()
    colour = tuple(shape.integers(0, 160, 3).tolist())
    corners = (left, top, right, bottom)
    if badge % 4 == 0:
        draw.ellipse(corners, fill=colour)
    elif badge % 4 == 1:
        draw.rectangle(corners, fill=colour)
    elif badge % 4 == 2:
        draw.chord(corners, *shape.uniform(0, 360, 2).tolist(), fill=colour)
    else:
        draw.polygon([tuple(p) for p in shape.uniform(4, 92, (4, 2)).tolist()], fill=colour)
    cells = rng.integers(0, 2, (5, 3))
    sign = np.concatenate([cells, cells[:, 1::-1]], axis=1)
    for row, column in np.argwhere(sign):
        left, top = 38 + 4 * column, 38 + 4 * row
        draw.rectangle((left, top, left + 3, top + 3), fill=(255, 190, 0))
    return image, "".join(map(str, cells.ravel()))
