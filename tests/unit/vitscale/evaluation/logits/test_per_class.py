"""The mean over classes counts classes, not images."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engine.given_outputs import given_outputs
from vitscale.distributed.world import World
from vitscale.evaluation.logits.per_class import PerClass, PerClassSettings

TABLE = """\
label,class,images,correct,top1
0,"cat, black",3,3,1.000000
1,dog,1,0,0.000000
2,eel,0,0,
"""


def test_the_mean_equals_a_case_by_hand(world: World, tmp_path: Path) -> None:
    logits = torch.eye(3)[[0, 0, 0, 2]]
    classes = ("cat, black", "dog", "eel")
    subject = given_outputs(world, logits, [0, 0, 0, 1], classes=classes, folder=tmp_path)
    assert PerClass(PerClassSettings()).metrics(subject) == {"class_mean_top1": 0.5}
    assert (tmp_path / "per_class.csv").read_text() == TABLE
