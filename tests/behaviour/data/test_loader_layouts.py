"""The same global batches, pixel for pixel, on every number of ranks and workers.

A resumed run knows one integer only, so its second half does not depend on the layout of the first:
each half runs once per layout, and every pair of a first and a second half is compared.
"""

from itertools import product
from pathlib import Path

import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.loader_runs import GLOBAL_BATCH, Run
from tests.support.tables import every
from vitscale.distributed.random_numbers import CounterRandom, stream_key

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
    return (
        write_shard_folder(base / "a", num_per_class=30, num_shards=5),
        write_shard_folder(base / "b", num_per_class=9, num_shards=2, seed=3),
    )


def run_of(folders: Folders, which: str) -> Run:
    if which == "plain":
        return Run(folders[0])
    more = {
        "repeats": 2,
        "first_percent": 80,
        "mixture": [{"path": str(folders[1]), "share": 0.3}],
        "augment": {
            "randaugment": {"magnitude": 9, "policy": "timm"},
            "erasing": {"probability": 0.5, "mode": "pixel"},
        },
    }
    return Run(folders[0], more)


@pytest.mark.parametrize(
    "layouts",
    [FEW, pytest.param(GRID, marks=pytest.mark.exhaustive)],
    ids=["few", "all"],
)
@every(which=SETS)
def test_a_run_resumed_on_another_layout_is_the_same_run(
    folders: Folders, which, layouts
):
    """Every pair of layouts, with real processes; each layout resumes at another step.

    The first run of each is left while its workers have batches ahead.
    """
    run = run_of(folders, which)
    undisturbed = run.batches(ranks=1, workers=0, start=0, stop=STEPS)
    assert (
        len({image for step in undisturbed for image in step}) == GLOBAL_BATCH * STEPS
    )
    random = CounterRandom(stream_key("layouts", which))
    stops = {layout: 1 + int(random.uniform() * (STEPS - 1)) for layout in layouts}
    heads = {
        (ranks, workers): run.batches(ranks=ranks, workers=workers, start=0, stop=STEPS)
        for ranks, workers in layouts
    }
    tails = {
        layout: run.batches(ranks=layout[0], workers=layout[1], start=stop, stop=STEPS)
        for layout, stop in stops.items()
    }
    for before, after in product(layouts, layouts):
        stop = stops[after]
        assert heads[before][:stop] + tails[after] == undisturbed, (before, after, stop)


def test_accumulation_does_not_change_the_global_batch(folders: Folders):
    run = Run(folders[0])
    whole = run.batches(ranks=2, workers=0, start=0, stop=2)
    for accumulation in (2, 3, 4):
        assert whole == run.batches(
            ranks=2, workers=1, start=0, stop=2, accumulation=accumulation
        )
