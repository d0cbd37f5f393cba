"""Hybrids and BiT ResNets on two processes: training, resuming, transfer, and ZeRO 0 and 3 alike.

Ranks start warm, which gives the same bits.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.ranks.rank_processes import ROOT
from tests.support.ranks.run_states import differences, journal_rows, read_state
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.waiting import PATIENCE_S
from vitscale.checkpoint.folders import newest_checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MODELS = {
    "hybrid": "{name: hybrid, stage_depths: [2, 1], root_width: 32, patch_size: 1, width: 48, "
    "depth: 2, num_heads: 2, mlp_width: 96, dropout: 0.1, drop_path: 0.1, image_size: SIZE}",
    "bit_resnet": "{name: bit_resnet, stage_depths: [1, 2], root_width: 32, image_size: SIZE}",
}
SETTINGS = [
    *(
        "schedule.epochs=null",
        "schedule.steps=6",
        "schedule.warmup_steps=2",
        "checkpoint.every_steps=3",
    ),
    *("data.global_batch=16", "engine.max_micro_batch=4", "data.num_workers=0"),
    *("engine.device=cpu", "engine.num_threads=1", "engine.activation_checkpointing=true"),
    *("tracking.uri=null", "tracking.log_every_steps=1", "optim.layer_decay=0.9"),
]


def train(
    starter: WarmStarter, folder: Path, shards: Path, stage: str, model: str, *more: str
) -> str:
    """Run the script of `stage` on two ranks, with its demo's settings; returns the output."""
    base = {"pretrain": "digits/pretrain.yaml", "finetune": "digits/finetune.yaml"}[stage]
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(f"base: {ROOT}/configs/{base}\nmodel: {model}\n")
    places = [f"data.path={shards}", f"output={folder / 'run'}"]
    command = [ROOT / stage / "main.py", "--config", config, *SETTINGS, *places, *more]
    ranks = starter.start(command, num_ranks=2, folder=folder)
    codes = [rank.wait(timeout_s=PATIENCE_S) for rank in ranks]
    assert codes == [0, 0], ranks[0].output()
    return ranks[0].output()


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in journal_rows(folder) if "train/loss" in row]


@pytest.mark.parametrize("name", MODELS)
def test_families_train_resume_and_transfer_under_zero(
    name: str, warm_starter: WarmStarter, digits_shards: Path, tmp_path: Path
) -> None:
    small, large = (MODELS[name].replace("SIZE", str(size)) for size in (16, 32))
    for stage in (0, 3):
        folder, again = tmp_path / f"zero{stage}", tmp_path / f"again{stage}"
        zero = f"engine.zero_stage={stage}"
        train(warm_starter, folder, digits_shards, "pretrain", small, zero)
        shutil.copytree(folder / "run", again / "run")
        shutil.rmtree(again / "run/checkpoints/step-00000006")
        printed = train(warm_starter, again, digits_shards, "pretrain", small, zero)
        assert "at step 3" in printed
        assert differences(read_state(again / "run"), read_state(folder / "run")) == []
    first, second = losses(tmp_path / "zero0/run"), losses(tmp_path / "zero3/run")
    assert len(first) == 6 and first == pytest.approx(second, rel=1e-5)
    assert first[0] == pytest.approx(2.302585, abs=1e-5) and first[-1] != first[0]
    source = tmp_path / "zero3/run"
    printed = train(
        warm_starter, tmp_path / "tuned", digits_shards, "finetune", large, f"init={source}"
    )
    assert f"starting from {source / 'checkpoints/step-00000006'}, step 6" in printed
    tuned, _ = newest_checkpoint(tmp_path / "tuned/run/checkpoints")
    assert tuned is not None and tuned.description["grid"] == {"hybrid": [4, 4]}.get(name, [1, 1])
