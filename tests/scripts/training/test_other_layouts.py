"""Trainings go on elsewhere: on another layout, without what they began with, as a branch.

Left out: resumes on the same layout (test_resume).
"""

import signal
from dataclasses import replace

import pytest
import yaml

from pretrain.run import OBJECTIVES as REGISTERED
from tests.scripts.training.test_resume import OBJECTIVES, way
from tests.support.corpora.image_corpus import encoded, prepare_here, run_of
from tests.support.ranks.fault_runs import (
    INTERVAL,
    STEPS,
    fault,
    micro_step,
    newest_step,
    output,
    wait_and_end_others,
)
from tests.support.ranks.run_states import differences
from tests.support.tables import every

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow


# Dropout is drawn per rank; augmented, mixed and masked images are not.
STILL = ("model.dropout=0",)
AUGMENTED = (
    "data.augment.erasing.probability=0.25",
    "data.mixing.cutmix_alpha=1",
    "data.mixing.mode=pair",
)
# What two ranks at ZeRO 1 began, and who goes on: ranks, ZeRO stage.
LAYOUTS = yaml.safe_load("""
- [supervised, 1, 0]
- [supervised, 4, 3]
- [supervised, 4, 2]
- [timm, 1, 3]
""")
LAYOUTS += [[name, 1, 0] for name in REGISTERED if name != "supervised"]


@slow
@pytest.mark.parametrize("name, num_ranks, stage", LAYOUTS)
def test_another_layout_goes_on_with_the_same_losses(
    fault_runs, tmp_path, name, num_ranks, stage
):
    settings, how = way(fault_runs, name)
    # The model of timm has no such settings.
    if name != "timm":
        settings += STILL
    if "data.mixing=null" not in settings:
        settings += AUGMENTED
    # In step 13; a batch whose images are compared is not accumulated.
    couples = name in REGISTERED and REGISTERED[name].couples
    nth = 13 if couples else micro_step(13)
    planted = {1: [fault("backward", nth, "kill")]}
    world = fault_runs.start(tmp_path, *settings, faults=planted, **how)
    assert wait_and_end_others(world)[1] == -signal.SIGKILL
    assert newest_step(tmp_path) >= INTERVAL
    there = (*settings, f"engine.zero_stage={stage}")
    ours = fault_runs.finish(tmp_path, *there, num_ranks=num_ranks, **how).journal
    expected = fault_runs.uninterrupted(*settings, **how).journal
    for row, right in zip(ours, expected, strict=True):
        assert row.keys() == right.keys()
        # Looser at the last step, whose row has the losses of an evaluation, too.
        rel = 1e-5
        if row["step"] == STEPS:
            rel = 1e-4
        for key, value in row.items():
            # Rounding may move one of 360 images across a border of classes.
            if key.endswith(("loss", "lr", "step", "grad_norm")):
                assert value == pytest.approx(right[key], rel=rel), (key, row)


@slow
@every(stage="finetune, pretrain")
def test_a_run_resumes_without_its_start(fault_runs, killed_copy, stage):
    source = killed_copy / "run"
    folder = killed_copy / "tuned"
    # The newest one is damaged, so the one before it is what is started from.
    newest = source / "checkpoints/step-00000015/rank-00000.safetensors"
    with open(newest, "ab") as file:
        file.write(b"x")
    settings = (f"init={source}", "schedule.steps=7")
    planted = {1: [fault("backward", micro_step(7), "lag and kill")]}
    ranks = fault_runs.start(folder, *settings, faults=planted, stage=stage)
    wait_and_end_others(ranks)
    text = output(folder)
    assert "skipping damaged checkpoint" in text
    start = source / "checkpoints/step-00000012"
    assert f"starting from {start}, step 12 of " in text

    # Its own checkpoint has all that it needs.
    source.rename(killed_copy / "moved")
    fault_runs.finish(folder, *settings, stage=stage)
    text = output(folder)
    assert f"resuming {folder / 'run'} at step 5\n" in text
    assert f": from {source}, resumed at step 5; " in text
    assert text.count("starting from") == 1


@slow
@every(name="supervised, dino")
def test_a_branch_is_the_run_that_never_branched(fault_runs, tmp_path, name):
    settings, how = way(fault_runs, name)
    settings += ("schedule.decay=constant", "schedule.final_lr=0", "checkpoint.keep=9")
    trunk = tmp_path / "trunk"
    fault_runs.finish(trunk, *settings, **how)
    short = (*settings, "schedule.steps=18", "schedule.cooldown_share=0.4")

    # The last step before the cool-down; the branch is killed in it, and its trunk is gone then.
    folder = tmp_path / "branch"
    branch = (*short, f"init={trunk / 'run'}@10")
    nth = 6 if REGISTERED[name].couples else micro_step(6)
    planted = {1: [fault("step", nth, "lag and kill")]}
    wait_and_end_others(fault_runs.start(folder, *branch, faults=planted, **how))
    assert newest_step(folder) >= 15
    trunk.rename(tmp_path / "moved")
    ours = fault_runs.finish(folder, *branch, **how)
    right = fault_runs.uninterrupted(*short, **how)
    first = ours.journal[0]["step"]
    assert first == 12
    later = [row for row in right.journal if row["step"] >= first]
    assert differences(ours, replace(right, journal=later)) == []

    text = output(folder)
    assert "settings other than those of the trunk:\n" in text
    assert f"a branch of {trunk / 'run'} at step 10\n" in text
    assert "no lines of steps" not in text
    # Another batch, and a step that is not kept.
    refused = {
        "data.global_batch=32": "global_batch: checkpoint 16, now 32",
        f"init={tmp_path / 'moved/run'}@11": "kept: 5, 10, ",
    }
    for change, message in refused.items():
        moved = (*short, f"init={tmp_path / 'moved/run'}@10", change)
        assert set(fault_runs.run(tmp_path / message[:4], *moved, **how)) == {2}
        assert message in output(tmp_path / message[:4])


# Objective -> exit code, and what is said. MAE needs none either, but the k-NN that evaluates it.
WITHOUT_LABELS = {
    "masked_patch_prediction": (0, "36 images of {shards}, no classes"),
    "supervised": (2, "supervised needs labels, but the shards of"),
    "mae": (2, "knn needs labels, but the shards of"),
}


@slow
def test_shards_without_labels(fault_runs, tmp_path):
    """They train where no label is needed, and are refused elsewhere."""
    images = tmp_path / "images"
    shards = tmp_path / "shards"
    images.mkdir()
    for number in range(40):
        content = encoded("PNG", seed=number, side=8)
        (images / f"{number}.png").write_bytes(content)
    source = {"holdout_fraction": 0.1}
    labels = {"values": "none"}
    prepare_here(run_of(images, shards, source=source, labels=labels))
    for name, (code, message) in WITHOUT_LABELS.items():
        folder = tmp_path / name
        settings = [*OBJECTIVES[name], "schedule.steps=5"]
        if code == 0:
            settings.append("evaluate=[]")
        ended = fault_runs.run(folder, *settings, shards=shards, num_ranks=1)
        text = output(folder)
        assert ended == [code], text
        assert message.format(shards=shards) in text
        assert "Traceback" not in text
