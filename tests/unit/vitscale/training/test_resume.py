"""Changes refused or reported when a run resumes; none is forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from vitscale.checkpoint.folders import Checkpoint
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.evaluation.trained_model import takes_average
from vitscale.runs.training import training_plan
from vitscale.training import start
from vitscale.training.start import (
    changed_settings,
    check_resumable,
    compatibility_key,
)

GLOBAL_BATCH = 8
SECTIONS: dict[str, Any] = {
    "name": "x",
    "data": {"path": "shards", "global_batch": GLOBAL_BATCH},
    "model": {"preset": "B/16"},
    "optim": {"lr": 1e-3},
    "schedule": {"steps": 100, "warmup_steps": 10},
}
# Key of the description: what changes it. `data`: of the shards; `type`: of the run.
CHANGES: dict[str, dict[str, Any]] = {
    "stage": {"type": FinetuneRun},
    "architecture": {"model": {"width": 192}},
    "grid": {"model": {"image_size": 384}},
    "num_prefix_tokens": {"model": {"num_registers": 4}},
    "objective": {"objective": {"name": "masked_patch_prediction"}},
    "teacher": {"teacher": "other"},
    "optimizer": {"optim": {"name": "sgd"}},
    "layer_decay": {"optim": {"layer_decay": 0.9}},
    "weight_decay_mode": {"optim": {"weight_decay_mode": "independent"}},
    "ema": {"optim": {"ema": {"decay": 0.9}}},
    "data_fingerprint": {"shards": {"fingerprint": "other"}},
    "only_keys": {"shards": {"key_hash": "hash"}},
    "label_map_sha256": {"shards": {"label_map_sha256": "other"}},
    "order_version": {"version": 2},
    "global_batch": {"data": {"global_batch": 16}},
    "seed": {"seed": 1},
}


def run_with(change: Mapping[str, Any]) -> Any:
    values = dict(SECTIONS)
    for key in change.keys() & {"data", "model", "objective", "optim", "schedule"}:
        values[key] = {**SECTIONS.get(key, {}), **change[key]}
    return change.get("type", PretrainRun).model_validate(values | {"seed": change.get("seed", 0)})


def description_of(change: Mapping[str, Any]) -> dict[str, Any]:
    run = run_with(change)
    shards: Any = {"fingerprint": "f", "label_map_sha256": "l", "key_hash": None}
    shards |= change.get("shards", {})
    data: Any = SimpleNamespace(**shards)
    agreed = {"teacher": change.get("teacher", "one")}
    return compatibility_key(run, run.model.resolved(num_classes=10), data, agreed)


def checkpoint_of(description: dict[str, Any], *, step: int = 20, **progress: Any) -> Checkpoint:
    return Checkpoint(
        folder=Path("runs/x/checkpoints/step-20"),
        step=step,
        files=(),
        progress=progress,
        description=description,
    )


def resume(checkpoint: Checkpoint, change: Mapping[str, Any]) -> None:
    plan = training_plan(run_with(change), world_size=1, num_samples=80)
    check_resumable(checkpoint, description_of(change), plan)


@pytest.mark.parametrize("key", CHANGES)
def test_incompatible_change_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    saved = checkpoint_of(description_of({}))
    resume(saved, {})
    monkeypatch.setattr(start, "ORDER_VERSION", CHANGES[key].get("version", 1))
    with pytest.raises(UserError, match="belongs to another run") as caught:
        resume(saved, CHANGES[key])
    assert f"\n    {key}: checkpoint " in caught.value.what


def test_step_that_does_not_fit_the_run_is_refused() -> None:
    description = description_of({})
    with pytest.raises(UserError, match="step 101 is beyond the 100 steps of this run"):
        resume(checkpoint_of(description, step=101), {})


def test_changed_settings_are_listed(tmp_path: Path) -> None:
    assert changed_settings(tmp_path, run_with({})) == []  # no configuration
    (tmp_path / "config.yaml").write_text(run_to_yaml(run_with({})))
    assert changed_settings(tmp_path, run_with({})) == []
    assert changed_settings(tmp_path, run_with({"optim": {"lr": 5e-4}})) == [
        "changed since the last start:",
        "    optim.lr: 0.001 -> 0.0005",
    ]


def test_transfer_starts_from_the_average_if_saved_and_no_longer_random(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0.99 ** 458 is 1.002 %, 0.99 ** 459 is 0.992 %."""
    none = checkpoint_of({"ema": None})
    assert not takes_average(none, "auto") and not takes_average(none, "model")
    ema = {"ema": {"decay": 0.99, "warmup": False}}
    early, late = (checkpoint_of(ema, engine={"num_averaged": n}) for n in (458, 459))
    assert takes_average(early, "ema") and takes_average(late, "auto")
    assert not takes_average(late, "model") and capsys.readouterr().err == ""
    assert not takes_average(early, "auto")
    assert "taking the raw weights, since 1% of their average" in capsys.readouterr().err


def test_average_that_was_not_saved_is_refused() -> None:
    with pytest.raises(UserError, match="holds no average of the weights"):
        takes_average(checkpoint_of({}), "ema")
