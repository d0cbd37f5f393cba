"""Changes refused or reported when a run resumes; none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL
import pytest
import torch
from safetensors.torch import save_file

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from vitscale.checkpoint.folders import Checkpoint
from vitscale.config.errors import UserError
from vitscale.distributed.world import World
from vitscale.evaluation.models.trained_model import starting_weights
from vitscale.optim.registry import OPTIMIZERS
from vitscale.runs.training import training_plan
from vitscale.training import resume as resuming
from vitscale.training.detectors import LossSpikeDetector
from vitscale.training.resume import (
    CHANGES_SHOWN,
    PROVENANCE,
    changes,
    check_resumable,
    compatibility_key,
    provenance,
    restore,
    restore_engine,
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
    "objective": {"objective": "another"},
    "optimizer": {"optim": {"name": "sgd"}},
    "layer_decay": {"optim": {"layer_decay": 0.9}},
    "weight_decay_mode": {"optim": {"weight_decay_mode": "independent"}},
    "ema": {"optim": {"ema": {"decay": 0.9}}},
    "data_fingerprint": {"shards": {"fingerprint": "other"}},
    "only_keys": {"shards": {"key_hashes": ("hash",)}},
    "label_map_sha256": {"shards": {"label_map_sha256": "other"}},
    "order_version": {"version": 2},
    "global_batch": {"data": {"global_batch": 16}},
    "seed": {"seed": 1},
    "resolutions": {
        "schedule": {"resolutions": [{"image_size": 128, "until": 0.5}, {"image_size": 224}]}
    },
}


def run_with(change: Mapping[str, Any]) -> Any:
    values = dict(SECTIONS)
    for key in change.keys() & {"data", "model", "optim", "schedule", "checkpoint"}:
        values[key] = {**SECTIONS.get(key, {}), **change[key]}
    return change.get("type", PretrainRun).model_validate(values | {"seed": change.get("seed", 0)})


def description_of(change: Mapping[str, Any]) -> dict[str, Any]:
    run = run_with(change)
    shards: Any = {"fingerprint": "f", "label_map_sha256": "l", "key_hashes": (None,)}
    shards |= change.get("shards", {})
    arch, data = run.model.architecture(num_classes=10), SimpleNamespace(**shards)
    return compatibility_key(run, arch, data, objective=change.get("objective", "supervised"))


def checkpoint_of(description: dict[str, Any], *, step: int = 20, **progress: int) -> Checkpoint:
    return Checkpoint(
        folder=Path("runs/x/checkpoints/step-20"),
        step=step,
        files=(),
        progress={"samples_seen": step * GLOBAL_BATCH} | progress,
        description=description,
    )


def resume(checkpoint: Checkpoint | None, change: Mapping[str, Any]) -> None:
    run = run_with(change)
    plan = training_plan(run, world_size=1, num_samples=80)
    check_resumable(run, checkpoint, description_of(change), plan)


def test_every_compatibility_key_has_a_change_here() -> None:
    assert CHANGES.keys() == description_of({}).keys()


@pytest.mark.parametrize("key", CHANGES)
def test_incompatible_change_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    saved = checkpoint_of(description_of({}))
    resume(saved, {})
    monkeypatch.setattr(resuming, "ORDER_VERSION", CHANGES[key].get("version", 1))
    with pytest.raises(UserError, match="belongs to another run") as caught:
        resume(saved, CHANGES[key])
    assert f"\n    {key}: checkpoint " in caught.value.what


def test_step_that_does_not_fit_the_run_is_refused() -> None:
    resume(None, {})
    description = description_of({})
    with pytest.raises(UserError, match="152 samples seen by step 20, which are 160 of this run"):
        resume(checkpoint_of(description, samples_seen=152), {})
    with pytest.raises(UserError, match="step 101 is beyond the 100 steps of this run"):
        resume(checkpoint_of(description, step=101), {})
    with pytest.raises(UserError, match="the run folder holds a checkpoint of step 20"):
        resume(checkpoint_of(description), {"checkpoint": {"resume": "never"}})


@pytest.mark.parametrize(("steps", "before", "after"), [(100, 224, 128), (30, 128, 224)])
def test_steps_that_move_a_change_across_are_refused(steps: int, before: int, after: int) -> None:
    """Half of the steps are at 128 px. Step 20 of 100 is, step 20 of 30 is not."""
    sizes = [{"image_size": 128, "until": 0.5}, {"image_size": 224}]
    run = run_with({"schedule": {"resolutions": sizes, "steps": steps}})
    plan = training_plan(run, world_size=1, num_samples=80, step=19)
    data: Any = SimpleNamespace(fingerprint="f", label_map_sha256="l", key_hashes=())
    found = {
        model.image_size: compatibility_key(
            run, model.architecture(num_classes=10), data, objective="x"
        )
        for model in run.models()
    }
    assert plan.image_size == after
    check_resumable(run, checkpoint_of(found[after]), found[after], plan)
    with pytest.raises(UserError, match=f"step 20 was trained at {before} px, but of {steps}") as e:
        check_resumable(run, checkpoint_of(found[before]), found[after], plan)
    assert "\n" not in e.value.what and "undo the change" in str(e.value)


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def facts_of(change: Mapping[str, Any]) -> dict[str, str]:
    world = World(
        rank=0, world_size=2, local_rank=0, local_world_size=2, device=torch.device("cpu")
    )
    return provenance(run_with(change), world, dtype=torch.bfloat16)


def test_provenance_has_the_configuration_and_the_environment() -> None:
    facts = facts_of({})
    config = {f"config {key}" for key in leaves(run_with({}).model_dump())}
    assert len(config) > 100 and config <= facts.keys()
    assert facts.keys() - config == {
        *("number of ranks", "device", "precision", "decoder", "threads per rank", "python"),
        *("torch", "deepspeed", "timm", "numpy", "pillow", "simplejpeg", "vitscale", "git commit"),
    }
    assert (facts["number of ranks"], facts["precision"]) == ("2", "bfloat16")
    assert facts["decoder"] != "auto" and facts["config data.decoder"] == "auto"
    assert facts["pillow"] == PIL.__version__
    lower = facts_of({"optim": {"lr": 5e-4}})
    assert list(changes({PROVENANCE: facts}, lower)) == [
        "changed since the checkpoint:\n    optim.lr: 0.001 -> 0.0005"
    ]


def test_every_difference_is_one_line_and_none_gives_none() -> None:
    saved = {PROVENANCE: {"config optim.lr": "0.001", "torch": "2.11.0", "gone": "1"}}
    now = {"config optim.lr": "0.0005", "torch": "2.11.0", "config new": "2"}
    assert list(changes(saved, now)) == [
        "changed since the checkpoint:\n    new: not set -> 2\n    optim.lr: 0.001 -> 0.0005\n"
        "    gone: 1 -> not set"
    ]
    assert list(changes({PROVENANCE: now}, now)) == []


def test_checkpoint_without_provenance_reports_nothing() -> None:
    assert list(changes({}, {"torch": "2.11.0"})) == []


def test_long_lists_of_changes_are_cut() -> None:
    saved = {PROVENANCE: {f"config {number:03d}": "a" for number in range(CHANGES_SHOWN + 5)}}
    (text,) = changes(saved, {})
    assert text.splitlines()[-1] == "    ... 5 more" and len(text.splitlines()) == CHANGES_SHOWN + 2


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "agree_no_error", lambda error: None)
    monkeypatch.setattr(resuming, "gather_objects", lambda value: [value])


def with_files(
    checkpoint: Checkpoint, folder: Path, tensors: dict[str, torch.Tensor]
) -> Checkpoint:
    save_file(tensors, folder / "rank-00000.safetensors")
    return replace(checkpoint, folder=folder, files=("rank-00000.safetensors",))


@pytest.mark.usefixtures("one_rank")
def test_everything_the_next_step_needs_is_restored(tmp_path: Path) -> None:
    spikes = {"recent": [1.0, 2.0], "num_spikes": 3}
    progress: Any = {"optimizer_steps": 7, "interval": [[3.0, 2]], "engine": {"a": 1}}
    calls: dict[str, Any] = {}
    engine: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, world_size=1),
        import_state=lambda read, **steps: calls.update(
            state=(read("model.a", 1, 2).tolist(), steps)
        ),
        import_counters=lambda counters: calls.update(counters=counters),
    )
    meter: Any = SimpleNamespace(load_state=lambda sums, **place: calls.update(meter=(sums, place)))
    objective: Any = SimpleNamespace(
        load_interval_state=lambda state, world: calls.update(objective=state)
    )
    world: Any = SimpleNamespace(rank=1, world_size=2)
    detector = LossSpikeDetector()
    checkpoint = checkpoint_of({"grid": [2, 2]}, **progress, spikes=spikes, objective=[[[2.0, 3]]])
    checkpoint = with_files(checkpoint, tmp_path, {"model.a": torch.arange(4.0)})
    arch: Any = SimpleNamespace(grid=(2, 2))
    restore(engine, arch, objective, meter, detector, checkpoint=checkpoint, world=world)
    assert detector.state() == spikes
    assert calls == {
        "state": ([1.0, 2.0], {"optimizer_steps": 7}),
        "counters": {"a": 1},
        "meter": ([[3.0, 2]], {"rank": 1, "world_size": 2}),
        "objective": [[[2.0, 3]]],
    }


@pytest.mark.parametrize(
    ("ema", "choice", "prefix"),
    [
        (None, "auto", "model."),
        (None, "model", "model."),
        ({"decay": 0.9}, "auto", "ema."),
        ({"decay": 0.9}, "model", "model."),
        ({"decay": 0.9}, "ema", "ema."),
    ],
)
def test_transfer_starts_from_the_average_if_saved(
    monkeypatch: pytest.MonkeyPatch, ema: dict[str, float] | None, choice: str, prefix: str
) -> None:
    monkeypatch.setattr(Checkpoint, "tensors", lambda self, *, prefix: {prefix: 1})
    assert starting_weights(checkpoint_of({"ema": ema}), choice) == {prefix: 1}


def test_average_that_was_not_saved_is_refused() -> None:
    with pytest.raises(UserError, match="holds no average of the weights"):
        starting_weights(checkpoint_of({}), "ema")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("one_rank")
def test_positions_and_their_states_move_to_the_new_grid(tmp_path: Path, optimizer: str) -> None:
    """All of them are resampled, bilinear where they are a second moment; the rest is kept."""
    kinds = ("model", "ema", *OPTIMIZERS[optimizer].state_names)
    # One patch of four differs from zero: bicubic resampling gives negative values beside it.
    spike = torch.tensor([7.0, 1.0, 0.0, 0.0, 0.0]).view(1, 5, 1)
    state = {f"{kind}.pos_embed": spike * factor for factor, kind in enumerate(kinds, start=1)}
    state["model.norm.weight"] = torch.rand(3)
    restored: dict[str, torch.Tensor] = {}

    def import_state(read: Any, *, optimizer_steps: int) -> None:
        for name, tensor in state.items():
            # In two parts, as two ranks would.
            size = 3 if tensor.dim() == 1 else 17
            parts = [read(name, 0, 2), read(name, 2, size - 2)]
            restored[name] = torch.cat(parts).view(1, -1, 1)

    world = SimpleNamespace(rank=0, world_size=1)
    engine: Any = SimpleNamespace(
        import_state=import_state, import_counters=lambda counters: None, world=world
    )
    arch: Any = SimpleNamespace(grid=(4, 4), name="vit")
    description = {"grid": [2, 2], "optimizer": optimizer}
    checkpoint = checkpoint_of(description, optimizer_steps=7, engine=0)
    restore_engine(engine, arch, with_files(checkpoint, tmp_path, state))
    assert torch.equal(restored["model.norm.weight"].flatten(), state["model.norm.weight"])
    for factor, kind in enumerate(kinds, start=1):
        rows = restored[f"{kind}.pos_embed"] / factor
        assert rows.shape == (1, 17, 1) and rows[0, 0] == 7.0
        # Both keep the mean of the grid; only bilinear keeps it within its range.
        assert rows[0, 1:].mean().item() == pytest.approx(0.25, abs=0.02)
        is_second_moment = kind == "exp_avg_sq"
        assert (rows.min().item() >= 0) == is_second_moment, kind
