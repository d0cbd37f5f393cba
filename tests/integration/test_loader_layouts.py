"""The same global batches, pixel for pixel, on every number of ranks and workers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.shard_folders import write_shard_folder
from vitscale.data.loader import open_loader, training_batches
from vitscale.data.order import CounterRandom, stream_key
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set

GLOBAL_BATCH, STEPS = 24, 6
RANKS, WORKERS = (1, 2, 3, 4, 8), (0, 1, 2, 3)
# One set; or two, in two views, a part of the one and a class of the other, augmented.
SETS = {
    "plain": {},
    "mixed": {"views": 2, "first_percent": 80, "share": 0.3, "only_classes": ["dog"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("layouts")
    return (
        write_shard_folder(base / "a", num_per_class=30, num_shards=5),
        write_shard_folder(base / "b", num_per_class=9, num_shards=2, seed=3),
    )


def settings(folders: tuple[Path, Path], which: str, *, num_workers: int) -> DataSettings:
    values = {"path": str(folders[0]), "global_batch": GLOBAL_BATCH, "num_workers": num_workers}
    if which == "mixed":
        options = SETS["mixed"]
        values |= {name: options[name] for name in ("views", "first_percent")}
        second = {name: options[name] for name in ("share", "only_classes")}
        values["mixture"] = [{"path": str(folders[1]), **second}]
        values["augment"] = {
            "randaugment": {"magnitude": 9, "policy": "timm"},
            "erasing": {"probability": 0.5, "mode": "pixel"},
        }
    return DataSettings.model_validate(values)


def global_batches(
    folders: tuple[Path, Path],
    which: str,
    *,
    ranks: int,
    workers: int,
    start: int,
    stop: int,
    accumulation: int = 1,
) -> list[list[bytes]]:
    """Per step the hash of each image with its label, in the order of positions."""
    data = settings(folders, which, num_workers=workers)
    micro_batch = GLOBAL_BATCH // ranks // accumulation
    per_rank = []
    for rank in range(ranks):
        loader = training_batches(
            open_training_set(data, seed=7),
            settings=data,
            image_size=16,
            seed=7,
            start=start * GLOBAL_BATCH,
            stop=stop * GLOBAL_BATCH,
            rank=rank,
            world_size=ranks,
            micro_batch=micro_batch,
            pin_memory=False,
        )
        with open_loader(loader) as batches:
            per_rank.append(
                [
                    [
                        hashlib.sha256(image.numpy().tobytes() + bytes([label])).digest()
                        for image, label in zip(batch.images, batch.labels.tolist(), strict=True)
                    ]
                    for batch in batches
                ]
            )
    assert {len(own) for own in per_rank} == {(stop - start) * accumulation}
    micro_steps = [
        [image for own in per_rank for image in own[number]]
        for number in range((stop - start) * accumulation)
    ]
    return [
        [image for micro in micro_steps[i : i + accumulation] for image in micro]
        for i in range(0, len(micro_steps), accumulation)
    ]


@pytest.mark.parametrize("which", SETS)
def test_stopped_anywhere_and_resumed_on_any_layout_it_is_the_same_run(
    folders: tuple[Path, Path], which: str
) -> None:
    undisturbed = global_batches(folders, which, ranks=1, workers=0, start=0, stop=STEPS)
    assert len({image for step in undisturbed for image in step}) == GLOBAL_BATCH * STEPS
    layouts = [(ranks, workers) for ranks in RANKS for workers in WORKERS]
    random = CounterRandom(stream_key("layouts", which))
    for before, after in zip(layouts, layouts[7:] + layouts[:7], strict=True):
        stop = 1 + int(random.uniform() * (STEPS - 1))
        first = global_batches(
            folders, which, ranks=before[0], workers=before[1], start=0, stop=stop
        )
        # Only the first half-run starts at 0; the second starts where the first was stopped.
        rest = global_batches(
            folders, which, ranks=after[0], workers=after[1], start=stop, stop=STEPS
        )
        assert first + rest == undisturbed, (before, after, stop)


def test_accumulation_does_not_change_the_global_batch(folders: tuple[Path, Path]) -> None:
    whole = global_batches(folders, "plain", ranks=2, workers=0, start=0, stop=2)
    for accumulation in (2, 3, 4):
        assert whole == global_batches(
            folders, "plain", ranks=2, workers=1, start=0, stop=2, accumulation=accumulation
        )
