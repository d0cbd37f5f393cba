"""The same global batches, pixel for pixel, on every number of ranks and workers.

A resumed run knows one integer only, so its second half does not depend on the layout of the first:
each half runs once per layout, and every pair of a first and a second half is compared.
"""

from itertools import product
from pathlib import Path

import pytest
import yaml

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.loader_runs import GLOBAL_BATCH, Run
from tests.support.tables import every
from vitscale.distributed.random_numbers import CounterRandom, stream_key

# Enough for every layout to stop and resume somewhere in the middle.
STEPS = 6

# Layouts (ranks, workers) of the fast test and of the exhaustive one.
FEW = [(1, 0), (2, 3), (3, 1)]
GRID = list(product((1, 2, 3, 4, 8), (0, 1, 2, 3)))

# One set; or two, in two views, a part of the one and all of the other, augmented.
SETS = ("plain", "mixed")
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    base = tmp_path_factory.mktemp("layouts")
    first = write_shard_folder(base / "a", num_per_class=30, num_shards=5)
    # Another seed: no image is in both.
    second = write_shard_folder(
        base / "b",
        num_per_class=9,
        num_shards=2,
        seed=3,
    )
    return first, second


def run_of(folders: Folders, which: str) -> Run:
    plain, mixed_in = folders
    if which == "plain":
        return Run(plain)

    # All that could draw from a state of a process: views, mixture, augmentation.
    more = yaml.safe_load("""
    repeats: 2
    first_percent: 80
    augment:
      randaugment: {magnitude: 9, policy: timm}
      erasing: {probability: 0.5, mode: pixel}
    """)
    more["mixture"] = [{"path": str(mixed_in), "share": 0.3}]
    return Run(plain, more)


@pytest.mark.parametrize(
    "layouts",
    [FEW, pytest.param(GRID, marks=pytest.mark.exhaustive)],
    ids=["few", "all"],
)
@every(which=SETS)
def test_a_run_resumed_on_another_layout_is_the_same_run(folders, which, layouts):
    """Every pair of layouts, with real processes; each layout resumes at another step.

    The first run of each is left while its workers have batches ahead.
    """
    run = run_of(folders, which)
    undisturbed = run.batches(
        ranks=1,
        workers=0,
        start=0,
        stop=STEPS,
    )

    # Otherwise equal batches could be equal by chance.
    images = {image for step in undisturbed for image in step}
    assert len(images) == GLOBAL_BATCH * STEPS

    # Each layout resumes after a step that its key draws, the same in every run of the test.
    random = CounterRandom(stream_key("layouts", which))
    heads = []
    tails = []
    for ranks, workers in layouts:
        stop = 1 + int(random.uniform() * (STEPS - 1))
        layout = {"ranks": ranks, "workers": workers, "stop": STEPS}
        heads.append(run.batches(start=0, **layout))
        tails.append((stop, run.batches(start=stop, **layout)))

    # Joined here: a second half does not know which layout ran the first.
    for head, (stop, tail) in product(heads, tails):
        assert head[:stop] + tail == undisturbed, stop


def test_accumulation_does_not_change_the_global_batch(folders):
    run = Run(folders[0])
    layout = {"ranks": 2, "start": 0, "stop": 2}
    whole = run.batches(workers=0, **layout)

    # 24 images on two ranks: micro-batches of 6, 4 and 3.
    for accumulation in (2, 3, 4):
        parts = run.batches(
            workers=1,
            accumulation=accumulation,
            **layout,
        )
        assert parts == whole
