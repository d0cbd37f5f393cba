"""Draw photographs, and below each what a model says of its patches.

Shapes: B images, R and C rows and columns of patches, P pixels a side of a photograph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from finetune.inspection.visualized import Visualized
from vitscale.evaluation.sheet import sheet

OPACITY = 0.55
SIDE = 3.1  # inches
COLUMNS = 4
COLORS = "inferno"


def draw_colors(subject: Visualized, text: str, colors_B3XX: torch.Tensor) -> Figure:
    """colors: in [0, 1], of each patch, or of each pixel of the photographs."""
    titles, images_B3SS, photos_B3PP = subject.drawn
    captions = subject.captions(titles, images_B3SS)
    above = [
        (caption, is_wrong, photo)
        for (caption, is_wrong), photo in zip(captions, photos_B3PP, strict=True)
    ]
    below = [("", False, colors_3XX) for colors_3XX in colors_B3XX]
    rows = []
    for start in range(0, len(titles), COLUMNS):
        rows.append(above[start : start + COLUMNS])
        rows.append(below[start : start + COLUMNS])
    return sheet(f"{subject.name}\n{text}", rows, width=SIDE)


def draw_heat(
    subject: Visualized,
    text: str,
    values_BRC: torch.Tensor,
    *,
    label: str,
    marked: tuple[int, int] | None = None,
) -> Figure:
    """Values from 0 to 1 on the photographs in grey. label: what they are. marked: row and column
    of a patch with a frame."""
    _, _, photos_B3PP = subject.drawn

    # One value a patch, smoothly between their centres.
    values_B1PP = F.interpolate(
        values_BRC[:, None], size=photos_B3PP.shape[2:], mode="bilinear"
    )

    # The colours of the heat would mix with those of the photograph, so that one is grey.
    greys_B1PP = photos_B3PP.double().mean(dim=1, keepdim=True) / 255
    colors_BPP4 = colormaps[COLORS](values_B1PP[:, 0].numpy())
    colors_B3PP = torch.from_numpy(colors_BPP4[..., :3]).permute(0, 3, 1, 2)
    heats_B3PP = torch.lerp(greys_B1PP, colors_B3PP, OPACITY)

    # The frame shows the patch that all others are compared with.
    figure = draw_colors(subject, text, heats_B3PP)
    if marked is not None:
        side = photos_B3PP.shape[2] // values_BRC.shape[1]
        row, column = marked
        for axes in figure.axes:
            corner = (column * side, row * side)
            axes.add_patch(
                Rectangle(corner, side, side, fill=False, color="lime", lw=2)
            )
    figure.colorbar(
        ScalarMappable(cmap=COLORS),
        ax=figure.axes,
        label=label,
        shrink=0.5,
        pad=0.01,
    )
    return figure
