"""Trainings on a GPU as their users start them, and what their steps wait for."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.runs import TRAININGS, journal
from tests.support.tables import every
from tests.support.waiting import PATIENCE_S, ROOT

# A script in which it is an error when the host waits for the GPU, from the third step to the one
# before the last. The first step measures, the last one logs and saves.
NOTHING_WAITS = """
import runpy, sys, torch
from vitscale.training.session import TrainingSession

steps = TrainingSession.steps

def watched(session):
    for step in steps(session):
        is_inner = 1 < step < session.plan.total_steps - 1
        torch.cuda.set_sync_debug_mode("error" if is_inner else "default")
        yield step

TrainingSession.steps = watched
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(script: str, folder: Path, *words: str, before: tuple[str, ...] = ()) -> str:
    """Run a script as its user does; returns its output. before: what Python gets before it."""
    config = ()
    if script in TRAININGS:
        (folder / "tiny.yaml").write_text(yaml.safe_dump(TRAININGS[script]))
        config = (
            "--config",
            "tiny.yaml",
            "engine.compile=false",
            "engine.timeout_min=10",
        )
    words = (*config, "evaluate=[{name: classification}]", *words)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *before, str(ROOT / script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@every(stage="0, 1")
def test_no_step_waits_for_the_device(device, tmp_path, stage):
    """With loader, mixing, clipping and an average; DeepSpeed's own code waits at ZeRO 2 and 3."""
    output = start(
        "pretrain/main.py",
        tmp_path,
        f"engine.device={device}",
        "engine.precision=bf16",
        f"engine.zero_stage={stage}",
        "data.num_workers=1",
        "data.mixing={mixup_alpha: 0.8, cutmix_alpha: 1.0, mode: pair}",
        "optim.ema.decay=0.9",
        "tracking.log_every_steps=100",
        "output=run",
        before=("-c", NOTHING_WAITS),
    )
    assert f"; {device}, bfloat16, ZeRO {stage}" in output


def test_a_model_is_trained_resumed_finetuned_and_evaluated(device, tmp_path):
    on = f"engine.device={device}"
    start("pretrain/main.py", tmp_path, on, "output=whole", "checkpoint.every_steps=10")

    # A copy of the run that has lost its last checkpoint is trained from the one before.
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step-00000020")
    output = start("pretrain/main.py", tmp_path, on, "output=again")
    assert f"; {device}, " in output
    assert "resuming again at step 10" in output

    whole, again = (
        journal(tmp_path / name, "train/loss")["train/loss"]
        for name in ("whole", "again")
    )
    assert len(again) == 20
    assert again == pytest.approx(whole, rel=1e-3)

    start(
        "finetune/main.py",
        tmp_path,
        on,
        "output=fine",
        "init=whole",
        "model.image_size=16",
    )
    start(
        "finetune/evaluate_model.py",
        tmp_path,
        "init=fine",
        f"compute.device={device}",
        "output=evaluated",
        "tracking.uri=null",
    )

    # The evaluation of a checkpoint is that of the training at its end, to the last image.
    results = json.loads((tmp_path / "evaluated/results.json").read_text())["results"]
    (top1,) = (row["value"] for row in results if row["metric"] == "top1")
    assert top1 == journal(tmp_path / "fine", "val/top1")["val/top1"][-1]
