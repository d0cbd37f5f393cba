"""An image like a photograph: smooth shading, edges, some noise."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw, ImageFilter


def photograph(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    red = 128 + 100 * np.sin(x / 37 + y / 53)
    green = 128 + 90 * np.cos(x / 23 - y / 91)
    blue = 60 + 150 * (x / width) * (y / height)
    pixels = np.stack([red, green, blue], axis=-1)
    pixels += np.random.default_rng(0).normal(0, 8, pixels.shape)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse((width * 0.2, height * 0.3, width * 0.5, height * 0.8), fill=(230, 40, 30))
    draw.rectangle((width * 0.6, height * 0.1, width * 0.9, height * 0.5), fill=(20, 60, 200))
    return image.filter(ImageFilter.GaussianBlur(2))


def jpeg(image: Image.Image, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95, **options)
    return file.getvalue()
