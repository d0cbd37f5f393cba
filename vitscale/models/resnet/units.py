"""The bottleneck units of a residual network, listed with their channels and sizes.

Owns: the depths of the papers' networks, and how channels and feature maps go on from the root.
Needs no torch.
Leaves out: what a list of units costs (`costs`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Units of each stage. Kolesnikov et al. 2020 (BiT), sec. 3.2, and He et al. 2016; R26 is of Steiner
# et al. 2021 (AugReg), R200 of Dosovitskiy et al. 2021, table 6.
DEPTHS = {
    "R26": (2, 2, 2, 2),
    "R50": (3, 4, 6, 3),
    "R101": (3, 4, 23, 3),
    "R152": (3, 8, 36, 3),
    "R200": (3, 24, 36, 3),
}
ROOT_WIDTH = 64
ROOT_STRIDE = 4  # the convolution and the pool halve the sides
EXPANSION = 4  # channels of a unit's output over those of its 3 x 3 convolution
NUM_GROUPS = 32  # of group normalisation
Shape = tuple[int, int]
"""(rows, columns) of an image or a feature map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution:
    """A convolution without bias; sizes in channels and pixels."""

    inputs: int
    outputs: int
    kernel: int
    positions: int
    """Rows times columns of its output."""

    @property
    def num_parameters(self) -> int:
        return self.inputs * self.outputs * self.kernel**2

    @property
    def multiply_adds(self) -> int:
        return self.num_parameters * self.positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """1 x 1, 3 x 3 (with the stride) and 1 x 1 convolution; sizes in channels and pixels."""

    inputs: int
    outputs: int
    shape_in: Shape
    shape_out: Shape
    projects: bool
    """Whether the shortcut is a 1 x 1 convolution: in the first unit of each stage."""

    @property
    def middle(self) -> int:
        return self.outputs // EXPANSION

    def convolutions(self) -> Iterator[Convolution]:
        middle = self.middle
        before, after = area(self.shape_in), area(self.shape_out)
        yield Convolution(inputs=self.inputs, outputs=middle, kernel=1, positions=before)
        yield Convolution(inputs=middle, outputs=middle, kernel=3, positions=after)
        yield Convolution(inputs=middle, outputs=self.outputs, kernel=1, positions=after)
        if self.projects:
            yield Convolution(inputs=self.inputs, outputs=self.outputs, kernel=1, positions=after)


def halved(shape: Shape) -> Shape:
    """Rows and columns after a stride of 2, with the padding of all networks here."""
    return -(-shape[0] // 2), -(-shape[1] // 2)


def area(shape: Shape, *, padding: int = 0) -> int:
    """Positions of a feature map to which `padding` rows and columns were added."""
    return (shape[0] + padding) * (shape[1] + padding)


def root_convolution(root_width: int, image_shape: Shape) -> Convolution:
    positions = area(halved(image_shape))
    return Convolution(inputs=3, outputs=root_width, kernel=7, positions=positions)


def units(stage_depths: tuple[int, ...], *, root_width: int, image_shape: Shape) -> Iterator[Unit]:
    """All units from the root up. Every stage doubles the channels; all but the first halve."""
    inputs, shape = root_width, halved(halved(image_shape))
    for stage, depth in enumerate(stage_depths):
        outputs = EXPANSION * root_width * 2**stage
        for number in range(depth):
            shape_out = halved(shape) if stage and number == 0 else shape
            yield Unit(
                inputs=inputs,
                outputs=outputs,
                shape_in=shape,
                shape_out=shape_out,
                projects=number == 0,
            )
            inputs, shape = outputs, shape_out


def feature_width(stage_depths: tuple[int, ...], *, root_width: int) -> int:
    """Channels of the last feature map."""
    if not stage_depths:
        return root_width
    return int(EXPANSION * root_width * 2 ** (len(stage_depths) - 1))


def feature_stride(stage_depths: tuple[int, ...]) -> int:
    """Pixels of the image a side for each position of the last feature map."""
    return int(ROOT_STRIDE * 2 ** max(0, len(stage_depths) - 1))


def size_problems(stage_depths: tuple[int, ...], *, root_width: int) -> Iterator[tuple[str, str]]:
    """Sizes that no network has, as (dotted key, what is wrong and what to do)."""
    if any(depth < 1 for depth in stage_depths) or len(stage_depths) > 4:
        yield (
            "model.stage_depths",
            f"{list(stage_depths)}: give at most 4 stages with at least 1 unit each",
        )
    if root_width < 1 or root_width % NUM_GROUPS:
        yield (
            "model.root_width",
            f"{root_width} channels do not divide into {NUM_GROUPS} groups; give a multiple",
        )
