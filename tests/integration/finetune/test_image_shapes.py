"""Images that are not square through training, resuming, transfer and evaluation.

Ranks start warm, which gives the same bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.ranks.rank_processes import ROOT
from tests.support.ranks.run_states import differences, read_state
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.waiting import PATIENCE_S
from vitscale.checkpoint.folders import newest_checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SETTINGS = [
    *("schedule.epochs=null", "schedule.steps=6", "schedule.warmup_steps=2"),
    *("checkpoint.every_steps=3", "data.global_batch=16", "engine.max_micro_batch=4"),
    *("data.num_workers=1", "engine.device=cpu", "engine.num_threads=1", "tracking.uri=null"),
    *("tracking.log_every_steps=1", "model.patch_size=4", "model.width=24", "model.depth=2"),
    *("model.num_heads=2", "model.mlp_width=48"),
]
WIDE = "model.image_size=[16,32]"
AUGMENTED = (
    "data.augment={randaugment: {}, erasing: {probability: 0.5}}",
    "data.mixing={mixup_alpha: 0.8, cutmix_alpha: 1.0}",
)


def run(starter: WarmStarter, folder: Path, script: str, config: str, *settings: str) -> str:
    """Run a script on two ranks; returns the output."""
    folder.mkdir(exist_ok=True)
    command: list[str | Path] = [ROOT / script, "--config", ROOT / "configs" / config, *settings]
    ranks = starter.start(command, num_ranks=2, folder=folder)
    codes = [rank.wait(timeout_s=PATIENCE_S) for rank in ranks]
    assert codes == [0, 0], ranks[0].output()
    return ranks[0].output()


def trained(
    starter: WarmStarter, folder: Path, shards: Path, stage: str, config: str, *more: str
) -> str:
    places = (f"data.path={shards}", f"output={folder / 'run'}")
    return run(starter, folder, f"{stage}/main.py", config, *SETTINGS, *places, *more)


def test_wide_images_train_from_a_square_checkpoint_and_resume(
    warm_starter: WarmStarter, digits_shards: Path, tmp_path: Path
) -> None:
    square, wide, again = (tmp_path / name for name in ("square", "wide", "again"))
    trained(warm_starter, square, digits_shards, "pretrain", "digits/pretrain.yaml")
    options = (WIDE, *AUGMENTED, f"init={square / 'run'}", "position_embedding=dinov2")
    tune = ("finetune", "digits/finetune.yaml", *options)
    printed = trained(warm_starter, wide, digits_shards, *tune)
    assert "at 16 x 32 px" in printed and f"starting from {square / 'run'}" in printed
    saved, _ = newest_checkpoint(wide / "run/checkpoints")
    assert saved is not None and saved.description["grid"] == [4, 8]
    assert saved.description["architecture"]["image_size"] == [16, 32]
    assert (wide / "run/pictures/test_predictions.png").stat().st_size > 1000
    shutil.copytree(wide / "run", again / "run")
    shutil.rmtree(again / "run/checkpoints/step-00000006")
    assert "at step 3" in trained(warm_starter, again, digits_shards, *tune)
    assert differences(read_state(again / "run"), read_state(wide / "run")) == []
    applied = (f"init={wide / 'run'}", f"data.path={digits_shards}", "compute.device=cpu")
    applied += (f"output={tmp_path / 'results'}", "data.num_workers=0", "tracking.uri=null")
    script = ("finetune/evaluate_model.py", "eval/demo.yaml", *applied)
    assert "16 x 32 px: " in run(warm_starter, tmp_path / "applied", *script)
    results = json.loads((tmp_path / "results/results.json").read_text())["results"]
    (top1,) = (row["value"] for row in results if row["metric"] == "top1")
    journal = read_state(wide / "run").journal
    assert top1 in [
        pytest.approx(row[key], abs=1e-6) for row in journal for key in row if "top1" in key
    ]


@pytest.mark.parametrize(
    "objective",
    [
        "{name: mae, decoder_width: 24, decoder_depth: 1, decoder_heads: 2}",
        "{name: masked_patch_prediction}",
    ],
)
def test_masked_objectives_train_on_wide_images(
    objective: str, warm_starter: WarmStarter, digits_shards: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "masked"
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(f"base: {ROOT}/configs/digits/pretrain.yaml\nobjective: {objective}\n")
    trained(warm_starter, folder, digits_shards, "pretrain", str(config), WIDE, "evaluate=[]")
    saved, _ = newest_checkpoint(folder / "run/checkpoints")
    assert saved is not None and saved.description["grid"] == [4, 8]
    assert list((folder / "run/pictures").glob("*.png"))
