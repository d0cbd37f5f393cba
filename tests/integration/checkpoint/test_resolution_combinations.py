"""A change of the image size is exact for every objective and family, LAMB and fine-tuning.

8 steps on one rank: 4 at the smaller image size, 4 at the larger. A save falls on the change and
on the sixth step. No engine of the smaller size may be left when the next is built.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.ranks.fault_runs import FaultRuns, fault, wait_all
from tests.support.ranks.rank_processes import ROOT
from tests.support.ranks.run_states import RunState, differences, read_state

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STEPS, CHANGE, LATER = 8, 4, 6
BASE: dict[str, Any] = {
    "data": {"global_batch": 8, "num_workers": 0},
    "model": {"width": 24, "depth": 1, "num_heads": 2, "mlp_width": 48},
    "engine": {"device": "cpu", "num_threads": 1, "timeout_min": 1, "zero_stage": 0},
    "schedule": {"epochs": None, "steps": STEPS, "warmup_steps": 1},
    "checkpoint": {"every_steps": LATER, "keep": 3},
    "tracking": {"uri": None, "log_every_steps": 3},
    "evaluate": [],
}
SIZES = (8, 16)
KNN = [{"name": "knn", "max_bank_images": 20, "every_steps": 3}]
HYBRID = {"name": "hybrid", "stage_depths": [1], "root_width": 32, "patch_size": 1}
RESNET = {"name": "bit_resnet", "stage_depths": [1], "root_width": 32}
MAE = {"name": "mae", "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
# What each changes in BASE. Not settings: `stage`, the script; `sizes` of the images; `teacher`,
# whether there is one; `only` in `model`, which replaces the section.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "mae": {
        "objective": MAE | {"mask_ratio": 0.5},
        "model": {"positions": "sincos2d_mae"},
        "evaluate": KNN,
    },
    "mae at ZeRO 3": {
        "objective": MAE | {"mask_ratio": 0.5},
        "engine": {"zero_stage": 3},
        "optim": {"ema": {"decay": 0.5}},
    },
    "masked patches": {
        "objective": {"name": "masked_patch_prediction", "target": "color_grid"},
        "evaluate": KNN,
    },
    "distillation": {
        "objective": {"name": "distillation"},
        "model": {"distillation_token": True},
        "evaluate": [{"name": "classification", "every_steps": 3}],
        "optim": {"ema": {"decay": 0.5}},
        "teacher": True,
    },
    "hybrid": {"model": HYBRID, "sizes": (16, 32), "optim": {"ema": {"decay": 0.5}}},
    "resnet": {"model": {"only": RESNET}, "engine": {"zero_stage": 3}},
    "lamb": {"optim": {"name": "lamb", "ema": {"decay": 0.5}}},
    "finetuning": {"stage": "finetune", "sizes": (16, 24), "optim": {"ema": {"decay": 0.5}}},
}


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(base)
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(values.get(name), Mapping)
        values[name] = {**values[name], **value} if both else value
    return values


def train(runs: FaultRuns, folder: Path, combination: Mapping[str, Any], source: Path) -> RunState:
    """source: the run that teaches, or that fine-tuning starts from."""
    changes = dict(combination)
    stage, sizes = changes.pop("stage", "pretrain"), changes.pop("sizes", SIZES)
    values = merged(BASE, {"model": {"image_size": sizes[-1]}})
    if sizes[0] != sizes[-1]:
        first = {"image_size": sizes[0], "until": CHANGE / STEPS}
        resolutions = [first, {"image_size": sizes[-1]}]
        values = merged(values, {"schedule": {"resolutions": resolutions}})
    if "only" in changes.get("model", {}):
        values["model"] = {**changes.pop("model")["only"], "image_size": sizes[-1]}
    if changes.pop("teacher", False):
        changes["objective"] = changes["objective"] | {"teacher": {"weights": str(source)}}
    if stage == "finetune":
        changes["init"] = str(source)
    places = {"output": str(folder / "run"), "data": {"path": str(runs.shards)}}
    values = merged(merged(values, changes), places)
    base = "digits/pretrain" if stage == "pretrain" else "digits/finetune"
    folder.mkdir(exist_ok=True)
    text = yaml.safe_dump({"base": str(ROOT / f"configs/{base}.yaml")} | values)
    (folder / "run.yaml").write_text(text)
    patched = ROOT / "tests/support/ranks/patched_rank.py"
    ranks = runs.starter.start(
        [patched, ROOT / f"{stage}/main.py", "--config", folder / "run.yaml"],
        num_ranks=1,
        folder=folder,
        environment={
            "VITSCALE_FAULTS": json.dumps([fault("start", "every", "no engine")]),
            "VITSCALE_MUTANT": "",
        },
    )
    assert wait_all(ranks) == [0], ranks[0].output()
    return read_state(folder / "run")


@pytest.fixture(scope="module")
def source(fault_runs: FaultRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    train(fault_runs, folder, {"sizes": (16,)}, folder)
    return folder / "run"


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_change_is_exact_for_every_combination(
    fault_runs: FaultRuns, source: Path, tmp_path: Path, name: str
) -> None:
    combination = COMBINATIONS[name]
    whole = train(fault_runs, tmp_path / "whole", combination, source)
    assert whole.step == STEPS
    for step in (CHANGE, LATER) if name == "mae" else (CHANGE,):
        again = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole/run", again / "run")
        for later in (LATER, STEPS):
            if later > step:
                shutil.rmtree(again / f"run/checkpoints/step-{later:08d}")
        resumed = train(fault_runs, again, combination, source)
        assert f"at step {step}\n" in (again / "rank-0.log").read_text()
        assert differences(resumed, whole) == []
