"""Runs without labels that are made to collapse are named in time, and healthy ones are not."""

import re

import pytest

from tests.support.levels import by_level
from tests.support.ranks.fault_runs import output, wait_all
from tests.support.ranks.run_states import journal_rows
from tests.support.ranks.warm_ranks import ROOT

pytestmark = pytest.mark.distributed

STEPS = 120
SETTINGS = (
    *f"""
    schedule.epochs=null schedule.steps={STEPS} schedule.warmup_steps=12 model.width=96
    model.mlp_width=192 engine.zero_stage=0 engine.max_micro_batch=64 engine.device=cpu
    engine.num_threads=1 checkpoint.every_steps={STEPS} tracking.uri=null
    tracking.log_every_steps=4 objective.hidden_width=128
    """.split(),
    "data.views=[{name: global, count: 2}]",
    "evaluate=[{name: knn, every_steps: 12, max_bank_images: 700}]",
)
DINO = (
    *"""
    objective.name=dino objective.num_prototypes=128 objective.bottleneck_width=32
    objective.teacher_temperature=0.04 objective.centering=sinkhorn
    """.split(),
    "optim.ema={decay: 0.9, final_decay: 1}",
)
METHODS = {
    "dino": DINO,
    "lejepa": ("objective.name=lejepa", "objective.num_directions=64"),
    "simclr": ("objective.name=simclr",),
}


# What is wrong with the run, whether it collapses, and whether its neighbours then fall.
HEALTHY = ("dino", "", False, False)
COLLAPSED = (
    "dino",
    "objective.num_prototypes=1024 objective.centering=softmax",
    True,
    True,
)
CASES = [
    HEALTHY,
    COLLAPSED,
    ("lejepa", "", False, False),
    ("simclr", "", False, False),
    ("dino", "objective.teacher_temperature=1", True, False),
    ("lejepa", "objective.sigreg_weight=0.000001", True, True),
]


@pytest.mark.parametrize(
    ("method", "wrong", "collapses", "falls"),
    by_level(CASES, slow=[HEALTHY, COLLAPSED]),
)
def test_a_collapse_is_named_before_neighbours_fall(
    warm_starter, digits_shards, tmp_path, method, wrong, collapses, falls
):
    settings = [*SETTINGS, *METHODS[method], *wrong.split()]
    # SimCLR's head has no width of its own.
    if method == "simclr":
        settings.remove("objective.hidden_width=128")
    config = ["--config", ROOT / "configs/digits/pretrain.yaml"]
    paths = [f"data.path={digits_shards}", f"output={tmp_path / 'run'}"]
    script = [ROOT / "pretrain/main.py", *config, *paths, *settings]
    ranks = warm_starter.start(script, num_ranks=1, folder=tmp_path)
    assert wait_all(ranks) == [0], output(tmp_path)

    named = [
        int(step) for step in re.findall(r"step (\d+): collapsing", output(tmp_path))
    ]
    assert bool(named) == collapses
    if not collapses:
        return
    # Within a tenth of the steps, which is when the first neighbours are looked for.
    assert named[0] <= STEPS / 10
    found = [
        row["val/knn_top1"]
        for row in journal_rows(tmp_path / "run")
        if "val/knn_top1" in row
    ]
    assert len(found) == 10
    fallen = found[0] - min(found[1:])
    assert (fallen > 0.1) == falls, found
