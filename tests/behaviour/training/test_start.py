"""What a run starts from: samples, kernels, random numbers; changes when it resumes."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.engine.small_models import small_model
from tests.support.engine.subjects import WORLD
from tests.support.light_checkpoints import flip, light_save
from tests.support.tables import refused, rows
from vitscale.checkpoint.folders import Checkpoint, newest_checkpoint
from vitscale.config.errors import UserError
from vitscale.config.loader import run_to_yaml
from vitscale.data.settings import DataSettings
from vitscale.engine.engine import is_compiled
from vitscale.engine.settings import EngineSettings
from vitscale.evaluation import trained_model
from vitscale.evaluation.trained_model import takes_average
from vitscale.models.interface import private_folder
from vitscale.models.vit import compile_blocks
from vitscale.runs.training import training_plan
from vitscale.training import session
from vitscale.training.session import (
    TrainingSession,
    changes_since_start,
    check_resumable,
    compatibility_key,
    refuse_other_start,
)

SECTIONS: dict[str, Any] = yaml.safe_load("""
name: x
data: {path: shards, global_batch: 8}
model: {preset: B/16}
optim: {lr: 0.001}
schedule: {steps: 100, warmup_steps: 10}
""")
# Key of the description: what changes it. `data`: of the shards; `type`: of the run.
CHANGES: dict[str, dict[str, Any]] = yaml.safe_load("""
architecture: {model: {width: 192}}
grid: {model: {image_size: 384}}
num_prefix_tokens: {model: {num_registers: 4}}
objective: {objective: {name: masked_patch_prediction}}
teacher: {teacher: other}
optimizer: {optim: {name: sgd}}
layer_decay: {optim: {layer_decay: 0.9}}
weight_decay_mode: {optim: {weight_decay_mode: independent}}
ema: {optim: {ema: {decay: 0.9}}}
data_fingerprint: {shards: {fingerprint: other}}
only_keys: {shards: {key_hash: hash}}
label_map_sha256: {shards: {label_map_sha256: other}}
order_version: {version: 2}
global_batch: {data: {global_batch: 16}}
seed: {seed: 1}
""")
CHANGES["stage"] = {"type": FinetuneRun}


def run_with(change):
    """The run with a row of CHANGES."""
    values = SECTIONS | {"seed": change.get("seed", 0)}
    for key in change.keys() & {"data", "model", "objective", "optim", "schedule"}:
        values[key] = {**SECTIONS.get(key, {}), **change[key]}
    return change.get("type", PretrainRun).model_validate(values)


def description_of(change):
    run = run_with(change)
    shards: Any = {
        "fingerprint": "f",
        "label_map_sha256": "l",
        "key_hash": None,
    }
    shards |= change.get("shards", {})
    data: Any = SimpleNamespace(**shards)
    agreed = {"teacher": change.get("teacher", "one")}
    return compatibility_key(run, run.model.resolved(num_classes=10), data, agreed)


def checkpoint_of(description, *, step=20, **progress):
    return Checkpoint(
        folder=Path("runs/x/checkpoints/step-20"),
        step=step,
        files=(),
        progress=progress,
        description=description,
    )


def resume(checkpoint, change, *, is_branch=False):
    plan = training_plan(run_with(change), world_size=1, num_samples=80)
    check_resumable(checkpoint, description_of(change), plan, is_branch=is_branch)


@pytest.mark.parametrize("key", CHANGES)
def test_incompatible_change_is_refused(monkeypatch, key):
    # The same description is accepted, so that only the change is refused.
    saved = checkpoint_of(description_of({}))
    resume(saved, {})
    monkeypatch.setattr(session, "ORDER_VERSION", CHANGES[key].get("version", 1))
    with pytest.raises(UserError, match="belongs to another run") as caught:
        resume(saved, CHANGES[key])
    assert f"\n    {key}: checkpoint " in caught.value.what
    assert "num_heads" not in caught.value.what  # of an architecture, only what differs


def test_a_branch_takes_all_of_its_trunk():
    branch = run_with({}).model_copy(update={"init": "runs/a@5", "init_weights": "ema"})
    assert branch.trunk == Path("runs/a/checkpoints/step-00000005")
    assert dict(branch.problems())["init_weights"].startswith("a branch has all state")

    # A revision of a repository, and what is fine-tuned, are weights.
    for other in (
        branch.model_copy(update={"init": "hf://a/b@5"}),
        FinetuneRun.model_validate({**SECTIONS, "init": "runs/a@5"}),
    ):
        assert other.trunk is None


def test_step_beyond_the_run_is_refused():
    # As after a user has made a run shorter, which has trained for longer already.
    with refused("step 101 is not before the end of this run, step 100"):
        resume(checkpoint_of(description_of({}), step=101), {})
    # Of a finished run nothing is left to train, but a branch has a step of its own.
    finished = checkpoint_of(description_of({}), step=100)
    resume(finished, {})
    with refused("step 100 is not before(?s:.*)take its weights alone: init=runs/x/"):
        resume(finished, {}, is_branch=True)


def test_changed_settings_are_listed(tmp_path):
    path = tmp_path / "config.yaml"
    before = run_with({})
    assert changes_since_start(tmp_path, before) == []  # no configuration
    path.write_text(run_to_yaml(before))
    assert changes_since_start(tmp_path, before) == []
    assert changes_since_start(tmp_path, run_with({"optim": {"lr": 5e-4}})) == [
        "    optim.lr: 0.001 -> 0.0005",
    ]


def test_a_branch_lists_how_it_differs_from_its_trunk(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(run_to_yaml(run_with({})))
    monkeypatch.setattr(session, "restore_engine", lambda *_: None)
    branch: Any = SimpleNamespace(
        _is_new=True,
        _messages=[],
        folder=tmp_path / "branch",
        engine=None,
        start_step=5,
        run=run_with({"schedule": {"cooldown_share": 0.2}}),
        plan=SimpleNamespace(advice=None),
    )
    folder = tmp_path / "checkpoints/step-00000005"
    TrainingSession._resume(branch, replace(checkpoint_of({}), folder=folder))
    assert branch._messages == [
        "settings other than those of the trunk:",
        "    schedule.cooldown_share: 0.0 -> 0.2",
        f"a branch of {tmp_path} at step 5",
    ]


ONLY_AT_A_START = """
- [init, runs/a, runs/b]
- [init, runs/a, 'hf://a/b']
- [init, null, runs/a]
- [init_weights, model, ema]
- [keep_head, false, true]
- [keep_head, true, slice]
- [init_patch, same, resize]
- [position_embedding, google, timm]
- [model.weight_init, vit, mae]
- [model.head_std, 0.0, 0.01]
- [model.head_bias, 0.0, -10.0]
- [model.layer_scale, 0.1, 0.0001]
"""


@pytest.mark.parametrize(
    ("key", "before", "now"),
    yaml.safe_load(ONLY_AT_A_START),
)
def test_a_resume_refuses_settings_that_only_a_start_reads(tmp_path, key, before, now):
    """They would have no effect, and be recorded as the origin of the weights."""

    def with_value(value):
        change: Any = {key: value}
        section, _, name = key.rpartition(".")
        if section:
            change = {section: {**SECTIONS[section], name: value}}
        return FinetuneRun.model_validate(SECTIONS | change)

    refuse_other_start(tmp_path, with_value(now))  # no configuration
    (tmp_path / "config.yaml").write_text(run_to_yaml(with_value(before)))
    refuse_other_start(tmp_path, with_value(before))
    with pytest.raises(UserError, match="resumes from its own weights") as caught:
        refuse_other_start(tmp_path, with_value(now))
    assert f"\n    {key}: started with " in caught.value.what


def test_a_start_may_be_spelled_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    start = FinetuneRun.model_validate({**SECTIONS, "init": "runs/a"})
    (tmp_path / "config.yaml").write_text(run_to_yaml(start))

    # The same folder in other words is the same start.
    absolute = f"{tmp_path}/runs/a"
    for init in ("runs/a/", "./runs/a", absolute, "~/runs/a", "runs/b/../a"):
        refuse_other_start(tmp_path, start.model_copy(update={"init": init}))


def test_transfer_starts_from_the_average_if_saved_and_no_longer_random(
    capsys,
):
    none = checkpoint_of({"ema": None})
    assert not takes_average(none, "auto")
    assert not takes_average(none, "model")

    # The share of the first, random weights that is left in the average decides.
    ema = {"ema": {"decay": 0.99}}
    early = checkpoint_of(ema, engine={"start_share": 0.01002})
    late = checkpoint_of(ema, engine={"start_share": 0.00992})
    assert takes_average(early, "ema")
    assert takes_average(late, "auto")
    assert not takes_average(late, "model")

    # A line is printed only where the choice was not the user's.
    assert capsys.readouterr().err == ""
    assert not takes_average(early, "auto")
    message = "taking the raw weights, since 1% of their average"
    assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="contains no averaged weights"):
        takes_average(checkpoint_of({}), "ema")


def test_a_dev_cut_or_the_validation_split_is_evaluated(tmp_path):
    shards = write_shard_folder(tmp_path / "a", num_per_class=10, num_shards=2)
    whole = {
        "path": str(shards),
        "global_batch": 8,
        "val_split": None,
    }

    def counts(**data):
        settings = DataSettings.model_validate(whole | data)
        run: Any = SimpleNamespace(data=settings, seed=0, objective=None)
        training_set, evaluated = session._read_index(run, needs_labels=True)
        return training_set.num_samples, evaluated and evaluated.num_samples

    # Without either, nothing is evaluated; a cut takes its images out of the training set.
    assert counts() == (20, None)
    assert counts(val_split="train") == (20, 20)
    assert counts(dev_percent=10.0) == (18, 2)


def test_blocks_are_compiled_on_a_gpu_and_in_a_private_folder(monkeypatch, tmp_path):
    def chosen(device, **engine):
        return is_compiled(EngineSettings.model_validate(engine), torch.device(device))

    # Hooks of ZeRO-3 break the blocks apart, and a CPU needs a compiler of C++ for it.
    assert chosen("cuda")
    assert not chosen("cuda", zero_stage=3)
    assert not chosen("cpu")

    # What a user sets counts.
    assert chosen("cpu", compile=True)
    assert not chosen("cuda", compile=False)

    # torch's own function imports the compiler.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    network: Any = small_model().network
    assert network.blocks[0]._compiled_call_impl is None
    compile_blocks(network)
    assert network.blocks[0]._compiled_call_impl is not None

    # A command compiles where it has images enough for each GPU.
    monkeypatch.setattr(
        trained_model, "InferenceModel", lambda *given, dtype, **_: (*given, dtype)
    )
    for device, images, compiles, dtype in (
        ("cuda", 800_000, True, torch.bfloat16),
        ("cuda", 799_999, False, torch.bfloat16),
        ("cpu", 800_000, False, torch.float32),
    ):
        world = replace(WORLD, device=torch.device(device), world_size=2)
        inference: Any = small_model().for_inference(
            world, precision="auto", num_images=images
        )
        call = inference[0].blocks[0]._compiled_call_impl
        assert (call is not None) == compiles
        assert inference[1] == dtype

    # Compiled code is executed, so nobody else may write there.
    folder = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR")).parent
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    # A folder that the group may write to, and a link that somebody else may have put there.
    folder.chmod(0o770)
    with pytest.raises(UserError, match="not a folder that only you can use"):
        private_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UserError, match="not a folder that only you can use"):
        private_folder()


# The scores of each step, the steps whose checkpoint is damaged, where the resume starts, and the
# best score that it knows there.
@rows("""
- [scores, damaged, start, best]
- [{10: 0.5, 20: 0.4, 30: 0.9}, [], 30, 0.9]
- [{10: 0.5, 20: 0.4, 30: 0.9}, [30], 20, 0.5]
- [{10: 0.5, 20: 0.6, 30: 0.9}, [30], 20, 0.6]
- [{10: 0.5, 20: 0.9, 30: 0.7}, [20, 30], 10, 0.5]
- [{10: null, 20: 0.9}, [20], 10, null]
""")
def test_a_resume_knows_the_best_of_the_steps_that_it_has_reached(
    monkeypatch,
    tmp_path,
    scores,
    damaged,
    start,
    best,
):
    """A later one is damaged, whatever its score: else no better one would be saved again."""
    folder = tmp_path / "checkpoints"
    for step, score in scores.items():
        commit = light_save(
            folder,
            step=step,
            keep=9,
            score=score,
        )
        # The size stays, so that only reading all of it shows the damage.
        if step in damaged:
            flip(commit.folder / "rank-00000.safetensors", -1)

    # The real store and its collectives need ranks, and the choice of a checkpoint does not.
    store = SimpleNamespace(folder=folder, newest=lambda: newest_checkpoint(folder))
    for name, value in {
        "CheckpointStore": lambda *_, **__: nullcontext(store),
        "run_folder_lock": lambda *_, **__: nullcontext(),
        "gather_objects": lambda value: [value],
        "check_resumable": lambda *_, **__: None,
        "refuse_other_start": lambda *_: None,
    }.items():
        monkeypatch.setattr(session, name, value)
    opened: Any = SimpleNamespace(
        folder=tmp_path,
        world=WORLD,
        run=SimpleNamespace(checkpoint=SimpleNamespace(keep=2)),
        objective=SimpleNamespace(messages=[]),
        data=SimpleNamespace(parts=[]),
        plan=None,
        _description=None,
        _messages=[],
        _end_if_finished=lambda: None,
    )
    TrainingSession._open_checkpoints(opened, ExitStack())
    assert opened.start_step == start
    # A damaged checkpoint is skipped with a line.
    assert len(opened._messages) == len(damaged)
    value = opened._best_score and opened._best_score["value"]
    assert value == best
