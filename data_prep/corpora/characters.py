"""Make the characters corpus: letters rendered from the fonts in matplotlib's wheel.

Images of one letter differ in font, size, position, rotation, shear, stroke and grey levels, all
drawn from the seed. The test images are rendered from fonts that no training image has.

The bytes depend on the fonts (matplotlib's version) and on Pillow's version, whose wheel holds
FreeType and zlib; equal versions give equal bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from PIL import Image, ImageDraw

from data_prep.corpora.letters import FONTS, TEST_FONTS, choose_letters, class_name, open_font
from vitscale.distributed.random_numbers import CounterRandom, stream_key

# Letters are drawn large, then transformed at twice the size of the image, then halved.
OVERSAMPLING = 2
MAX_EM = 0.66  # em per side of the image, leaves room for accents on capitals
MIN_EM = 0.54
MAX_WIDTH = 0.8  # of the image
BASELINE = 0.72  # below the upper border
JITTER = 0.04
ROTATION_DEGREES = 8.0
SHEAR = 0.12
MAX_STROKE = 0.02  # added to either side of a line, per side of the image
MIN_CONTRAST = 80

# fixed: white letters on black.
GreyLevels = Literal["random", "fixed"]
GREY_LEVELS: tuple[GreyLevels, ...] = get_args(GreyLevels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Characters:
    """What the corpus holds. Numbers of images are per letter."""

    sets: Sequence[str] = ("latin",)
    num_train: int = 60
    num_test: int = 8
    side_px: int = 48
    grey_levels: GreyLevels = "random"
    seed: int = 0


def character_files(corpus: Characters) -> Iterator[tuple[str, bytes]]:
    """{train,test}/LETTER/FONT-NNN.png and contents. The fonts of a letter take turns."""
    trained = [font for font in FONTS if font not in TEST_FONTS]
    parts = (("train", trained, corpus.num_train), ("test", TEST_FONTS, corpus.num_test))
    for letter in choose_letters(corpus.sets):
        for split, choice, num_images in parts:
            for i in range(num_images):
                font = choice[i % len(choice)]
                key = stream_key("characters", corpus.seed, letter, font, i)
                png = render(letter, font, corpus, random=CounterRandom(key))
                yield f"{split}/{class_name(letter)}/{font}-{i:03d}.png", png


def render(letter: str, font: str, corpus: Characters, *, random: CounterRandom) -> bytes:
    """One RGB PNG of `corpus.side_px` pixels a side."""
    em = random.uniform(MIN_EM, MAX_EM)
    angle = math.radians(random.uniform(-ROTATION_DEGREES, ROTATION_DEGREES))
    shear = random.uniform(-SHEAR, SHEAR)
    shift = random.uniform(-JITTER, JITTER), random.uniform(-JITTER, JITTER)
    stroke = random.uniform(-MAX_STROKE, MAX_STROKE)  # half of the letters keep their own
    paper, ink = _random_levels(random) if corpus.grey_levels == "random" else (0, 255)

    large_px = OVERSAMPLING * corpus.side_px
    em_px = round(MAX_EM * large_px)
    stroke_px = round(max(0.0, stroke) * large_px)
    canvas = Image.new("L", (4 * em_px, 3 * em_px))
    ImageDraw.Draw(canvas).text(
        (em_px, 2 * em_px),
        letter,
        fill=255,
        font=open_font(font, em_px),
        anchor="ls",
        stroke_width=stroke_px,
    )
    left, _, right, _ = canvas.getbbox() or (0, 0, 1, 1)
    scale = min(em / MAX_EM, MAX_WIDTH * large_px / (right - left))
    # The middle of the letter's baseline on the canvas and in the image.
    source = (left + right) / 2, 2.0 * em_px
    target = (0.5 + shift[0]) * large_px, (BASELINE + shift[1]) * large_px
    mask = canvas.transform(
        (large_px, large_px),
        Image.Transform.AFFINE,
        _inverse_affine(scale, angle, shear, source=source, target=target),
        resample=Image.Resampling.BICUBIC,
    ).reduce(OVERSAMPLING)
    table = [round(paper + (ink - paper) * level / 255) for level in range(256)]
    file = io.BytesIO()
    mask.point(table).convert("RGB").save(file, format="PNG")
    return file.getvalue()


def _random_levels(random: CounterRandom) -> tuple[int, int]:
    """(paper, ink), at least MIN_CONTRAST apart; either may be the lighter one."""
    paper, ink = sorted(
        (int(random.uniform(0, 256 - MIN_CONTRAST)), int(random.uniform(0, 256 - MIN_CONTRAST)))
    )
    ink += MIN_CONTRAST
    return (paper, ink) if random.uniform() < 0.5 else (ink, paper)


def _inverse_affine(
    scale: float,
    angle: float,
    shear: float,
    *,
    source: tuple[float, float],
    target: tuple[float, float],
) -> tuple[float, float, float, float, float, float]:
    """Coefficients that take a point of the image to a point of the canvas, as Pillow wants them.

    The letter is scaled, sheared and rotated, in this order, about `source`, which comes to lie on
    `target`.
    """
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    # The inverse of rotation @ [[1, shear], [0, 1]] * scale.
    a, b, d, e = cos + shear * sin, sin - shear * cos, -sin, cos
    # Rounded, since the last digit of a sine differs between C libraries.
    a, b, d, e = (round(value, 6) for value in (a, b, d, e))
    c = round(source[0] - a * target[0] - b * target[1], 6)
    f = round(source[1] - d * target[0] - e * target[1], 6)
    return a, b, c, d, e, f
