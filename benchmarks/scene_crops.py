"""Write grey crops of scikit-image's photographs as a folder of images, {train,test}/PHOTO/N.png.

    pip install scikit-image
    python benchmarks/scene_crops.py runs/scenes/images

A class is a photograph: training has crops of its left 60 %, the test those of the rest, so pixels
say little about it and textures much. Prints how many test images 20 nearest neighbours classify by
raw pixels: what features that were learned without labels are to be compared with.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from sklearn.neighbors import KNeighborsClassifier

PHOTOS = """
astronaut.png brick.png camera.png cell.png chelsea.png coffee.png coins.png grass.png gravel.png
hubble_deep_field.jpg ihc.png moon.png motorcycle_left.png page.png retina.jpg rocket.jpg text.png
""".split()
NUM_CROPS = {"train": 400, "test": 100}
TRAIN_SHARE = 0.6
CROP_PX = 40
# Of the smaller side; smaller photographs are enlarged.
LEAST_PX = 160
PIXELS_PX = 24
NUM_NEIGHBOURS = 20


def crops(photo: Image.Image, split: str, seed: int) -> Iterator[Image.Image]:
    """Random crops of one part of a photograph."""
    scale = max(1.0, LEAST_PX / min(photo.size))
    photo = photo.resize((round(photo.width * scale), round(photo.height * scale)))
    border = round(photo.width * TRAIN_SHARE)
    first, stop = 0, border
    if split == "test":
        first, stop = border, photo.width

    random = np.random.default_rng([seed, len(split)])
    for _ in range(NUM_CROPS[split]):
        left = int(random.integers(first, stop - CROP_PX))
        top = int(random.integers(0, photo.height - CROP_PX))
        crop = photo.crop((left, top, left + CROP_PX, top + CROP_PX))
        # Brightness and contrast would tell photographs apart.
        yield ImageOps.equalize(crop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder

    pixels: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for label, name in enumerate(PHOTOS):
        with (files("skimage.data") / name).open("rb") as file:
            photo = Image.open(file, formats=["JPEG", "PNG"]).convert("L")
        for split in NUM_CROPS:
            target = folder / split / Path(name).stem
            target.mkdir(parents=True)
            for number, crop in enumerate(crops(photo, split, seed=label)):
                crop.convert("RGB").save(target / f"{number:03}.png")
                small = np.asarray(crop.resize((PIXELS_PX, PIXELS_PX)), dtype=float)
                pixels[split].append(small.ravel())
                labels[split].append(label)

    neighbours = KNeighborsClassifier(NUM_NEIGHBOURS, metric="cosine")
    neighbours.fit(np.stack(pixels["train"]), labels["train"])
    accuracy = neighbours.score(np.stack(pixels["test"]), labels["test"])
    print(f"{folder}: {len(PHOTOS)} classes, {len(labels['test'])} test images")
    print(f"{NUM_NEIGHBOURS} nearest neighbours by raw pixels: {accuracy:.1%}")


if __name__ == "__main__":
    main()
