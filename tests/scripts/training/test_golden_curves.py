"""Losses, learning rates and gradient norms of short trainings are those of the golden files."""

from pathlib import Path

import pytest

from tests.support.engine.engine_checks import CHECKS
from tests.support.golden import Golden
from tests.support.ranks.fault_runs import wait_all
from tests.support.ranks.warm_ranks import ROOT
from tests.support.runs import CURVES, MIXED, REL, journal, run
from tests.support.tables import every

pytestmark = pytest.mark.distributed

OBJECTIVES = {
    "mae": (
        "objective.name=mae",
        "objective.decoder_width=8",
        "objective.decoder_depth=1",
        "objective.decoder_heads=2",
        "model.positions=sincos2d_mae",
    ),
    "masked_patch_prediction": ("objective.name=masked_patch_prediction",),
}


def check_curves(golden: Golden, name: str, folder: Path):
    """Of every step: a change of the last digits shows in the first, a drift in the last ones."""
    golden.json(f"training/curves/{name}.json", journal(folder, *CURVES), rel=REL)


@pytest.fixture(scope="module")
def supervised(warm_starter, tmp_path_factory) -> Path:
    """A finished run, two ranks at ZeRO 1."""
    folder = tmp_path_factory.mktemp("supervised")
    run(warm_starter, "pretrain/main.py", folder, *MIXED, num_ranks=2)
    return folder / "run"


def test_supervised(supervised, golden):
    check_curves(golden, "supervised", supervised)


@every(name=OBJECTIVES)
def test_objectives_without_labels(warm_starter, tmp_path, golden, name):
    run(warm_starter, "pretrain/main.py", tmp_path, *OBJECTIVES[name])
    check_curves(golden, name, tmp_path / "run")
    # Drawn at the end; an empty picture is smaller.
    assert (tmp_path / "run/pictures/reconstructions.png").stat().st_size > 1000


def test_distillation(warm_starter, supervised, tmp_path, golden):
    run(
        warm_starter,
        "pretrain/main.py",
        tmp_path,
        "objective.name=distillation",
        f"objective.teacher.weights={supervised}",
        "model.distillation_token=true",
    )
    check_curves(golden, "distillation", tmp_path / "run")


def test_finetuning_at_a_higher_resolution(warm_starter, supervised, tmp_path, golden):
    run(
        warm_starter,
        "finetune/main.py",
        tmp_path,
        f"init={supervised}",
        # Twice as large: the positions are resampled.
        "model.image_size=16",
        # The classes are the same, for which it is kept otherwise.
        "keep_head=false",
    )
    check_curves(golden, "finetune", tmp_path / "run")


@pytest.fixture(scope="module")
def printed(warm_starter, tmp_path_factory) -> list[str]:
    """The output of two ranks that ran all checks."""
    worker = [ROOT / "tests/support/engine/engine_checks.py"]
    folder = tmp_path_factory.mktemp("zero")
    # All in one start, which takes longer than most checks; the first that fails ends it.
    ranks = warm_starter.start(worker, num_ranks=2, folder=folder)
    wait_all(ranks)
    return [rank.output() for rank in ranks]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every(check=CHECKS)
def test_the_engine_on_two_ranks(printed, check):
    whole = "\n".join(printed)
    assert all(f"passed: {check}\n" in output for output in printed), whole
    # What torch or DeepSpeed will remove is replaced before they do.
    assert "deprecated" not in whole
