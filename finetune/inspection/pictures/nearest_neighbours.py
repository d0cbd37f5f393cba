"""Nearest neighbours of images in feature space, by cosine, from a bank of other images.

Shapes: Q queries, N images of the bank, D width, K neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from finetune.inference.prediction.inputs import Shards
from finetune.inspection.images import ImageBatch, ImageReader
from finetune.inspection.subject import Inspected
from vitscale.config.errors import UserError
from vitscale.images.sheet import caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_NEIGHBOURS = 7
SAME, OTHER = "#2e8b57", "#c0392b"


def missing(subject: Inspected) -> str | None:
    try:
        subject.bank  # noqa: B018  # opens it
    except UserError as error:
        return f"no bank of images to search: {error.what}; {error.next_step}"
    return None


def nearest(
    queries_QD: torch.Tensor, bank_ND: torch.Tensor, *, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and rows of the nearest images of the bank, nearest first: [Q, K] each.

    K is `count`, or N where that is less.
    """
    cosines_QN = F.normalize(queries_QD.float(), dim=1) @ F.normalize(bank_ND.float(), dim=1).T
    cosines_QK, rows_QK = cosines_QN.topk(min(count, len(bank_ND)), dim=1)
    return cosines_QK, rows_QK


def features(
    subject: Inspected, reader: ImageReader, *, count: int, leave_out: set[int]
) -> tuple[torch.Tensor, list[int]]:
    """Features [N, D] of evenly spaced images on the CPU, and the images' numbers."""
    rows, numbers = [], []
    for batch in reader.spaced(count, batch=subject.batch):
        found_BD = subject.model.features(batch.pixels_B3SS.to(subject.device)).cpu()
        for number, row_D in zip(batch.numbers, found_BD, strict=True):
            if number not in leave_out:
                rows.append(row_D)
                numbers.append(number)
    if not rows:
        raise UserError(
            "holds no readable image besides the queries",
            where=f"bank_split={subject.run.bank_split}",
            next_step="choose other shards with bank= and bank_split=",
        )
    return torch.stack(rows), numbers


def draw(subject: Inspected) -> Figure:
    queries = subject.images.sheet(subject.run.num_images)
    queries_QD = torch.cat(
        [
            subject.model.features(some_B3SS.to(subject.device)).cpu()
            for some_B3SS in queries.pixels_B3SS.split(subject.batch)
        ]
    )
    # An image is no neighbour of itself.
    same = _is_same_split(subject.images, subject.bank)
    bank_ND, numbers = features(
        subject,
        subject.bank,
        count=subject.run.max_bank_images,
        leave_out=set(queries.numbers) if same else set(),
    )
    cosines_QK, rows_QK = nearest(queries_QD, bank_ND, count=NUM_NEIGHBOURS)
    found = [subject.bank.batch_of([numbers[row] for row in rows_K]) for rows_K in rows_QK.tolist()]
    figure = _sheet(queries, found, cosines_QK)
    text = (
        f"Left: queries. Right: the nearest of {len(bank_ND):,} images of "
        f"{subject.run.bank_split}, with the cosine of their features"
    )
    figure.suptitle(f"{subject.name}\n{text}", fontsize=9, parse_math=False)
    return figure


def _is_same_split(queries: ImageReader, bank: ImageReader) -> bool:
    one, other = queries.inputs, bank.inputs
    return (
        isinstance(one, Shards)
        and isinstance(other, Shards)
        and one.index.fingerprint == other.index.fingerprint
    )


def _sheet(queries: ImageBatch, found: list[ImageBatch], cosines_QK: torch.Tensor) -> Figure:
    from matplotlib.figure import Figure

    columns = 1 + cosines_QK.shape[1]
    figure = Figure(figsize=(columns * 1.15, len(queries) * 1.32 + 0.5), layout="constrained")
    axes = figure.subplots(len(queries), columns, squeeze=False)
    for row, neighbours in enumerate(found):
        wanted = queries.classes[row]
        title = caption(queries.titles[row], width=14)
        _show(axes[row, 0], queries.pixels_B3SS[row], title, color="black")
        for column in range(len(neighbours)):
            name = neighbours.classes[column]
            color = "black"
            if wanted is not None and name is not None:
                color = SAME if name == wanted else OTHER
            cosine = f"{float(cosines_QK[row, column]):.2f}"
            title = cosine if name is None else f"{caption(name, width=9)}: {cosine}"
            _show(axes[row, column + 1], neighbours.pixels_B3SS[column], title, color=color)
    return figure


def _show(axes: Axes, image_3SS: torch.Tensor, title: str, *, color: str) -> None:
    axes.imshow(image_3SS.permute(1, 2, 0).numpy(), interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(color)
    axes.spines[:].set_linewidth(1.5)
    axes.set_title(title, fontsize=8, color=color, pad=2, parse_math=False)
