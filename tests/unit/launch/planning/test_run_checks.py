"""What is found in broken shard folders and in runs that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.run import FinetuneRun
from launch.planning.checks import Check, as_table, failed, ok, refuse_or_warn, warning
from launch.planning.run_checks import checkpoint_bytes, run_checks
from pretrain.run import PretrainRun
from tests.support.corpora.shard_folders import write_shard_folder
from vitscale.config.errors import UserError, UserErrors
from vitscale.data.index import read_split


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_shard_folder(tmp_path / "shards", num_per_class=8, num_shards=4)


def checked(**changes: Any) -> dict[str, Check]:
    sections: dict[str, Any] = {
        "data": {},
        "model": {"preset": "Ti/16"},
        "optim": {"lr": 1e-3},
        "schedule": {"steps": 100, "warmup_steps": 10},
        "launch": {"cpus_per_task": 3},
        **changes,
    }
    data = {"path": "shards", "global_batch": 4, "val_split": None} | sections["data"]
    run = PretrainRun.model_validate({"name": "x", **sections, "data": data})
    return {check.name: check for check in run_checks(run)}


def test_a_run_that_fits_has_no_finding(folder: Path) -> None:
    found = checked()
    assert {check.result for check in found.values()} == {"ok"}, found
    assert list(found) == ["configuration", "data", "loader", "cores", "disk"]
    assert found["data"].detail == "train: 16 samples in 4 shards; as in the manifest"
    assert found["loader"].detail.startswith("2.0 shards and 8 samples for each of 1 rank(s) x 2")


def change_manifest(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest))

    return apply


def tar_of(folder: Path) -> Path:
    return sorted(folder.glob("*.tar"))[1]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: tar_of(folder).unlink(), "tar: missing (No such file"),
        (
            lambda folder: tar_of(folder).write_bytes(tar_of(folder).read_bytes()[:-512]),
            "bytes, but the manifest says",
        ),
        (lambda folder: tar_of(folder).rename(folder / "other.tar"), "tar: missing"),
        (lambda folder: (folder / "index.parquet").unlink(), "index.parquet: missing"),
        (
            change_manifest(lambda m: m["splits"]["train"]["shards"][0].update(samples=5)),
            "disagrees with manifest.json",
        ),
        (
            change_manifest(lambda m: m["splits"]["train"].update(num_samples=17)),
            "disagrees with manifest.json",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is not a valid manifest"),
        (lambda folder: (folder / "manifest.json").unlink(), "no shards in shards"),
        (change_manifest(lambda m: m["splits"].clear()), "no split 'train'"),
    ],
)
def test_damaged_shards_are_named(
    folder: Path, damage: Callable[[Path], object], expected: str
) -> None:
    damage(folder)
    data = checked()["data"]
    assert data.result == "error" and data.error is not None
    found = checked_details()
    assert any(expected in detail for detail in found), found


def checked_details() -> list[str]:
    """All rows: one name can have several."""
    run = PretrainRun.model_validate(
        {
            "name": "x",
            "data": {"path": "shards", "global_batch": 4, "val_split": None},
            "model": {"preset": "Ti/16"},
            "optim": {"lr": 1e-3},
            "schedule": {"steps": 100, "warmup_steps": 10},
        }
    )
    return [check.detail for check in run_checks(run) if check.result == "error"]


def test_every_configuration_error_is_a_row(folder: Path) -> None:
    found = checked(
        data={"global_batch": 6, "val_split": "test"},
        engine={"device": "cuda"},
        launch={"nodes": 4},
    )
    assert found["configuration"].result == "error"
    assert "no split 'test'" in found["data"].detail


@pytest.mark.parametrize(
    ("changes", "row", "expected"),
    [
        ({"launch": {"nodes": 4, "cpus_per_task": 3}}, "loader", "4 shards for 4 rank(s) x 2"),
        ({"data": {"global_batch": 32}}, "loader", "16 samples are less than one batch of 32"),
        ({"launch": {}}, "cores", "1 core(s) per task for 1 training and 2 loader"),
    ],
)
def test_what_runs_badly_is_a_warning(
    folder: Path, changes: dict[str, object], row: str, expected: str
) -> None:
    check = checked(**changes)[row]
    assert check.result == "warning" and expected in check.detail
    assert check.next_step


# 10^12 parameters.
HUGE = {"image_size": 32, "patch_size": 16, "width": 98304, "depth": 9, "num_heads": 8}


def test_what_cannot_run_is_an_error(folder: Path) -> None:
    disk = checked(model=HUGE | {"mlp_width": 4 * 98304})["disk"]
    assert disk.result == "error" and "GiB needed" in disk.detail
    (folder.parent / "file").touch()
    disk = checked(output="file/run")["disk"]
    assert disk.result == "error" and f"cannot write to {folder.parent / 'file'}" in disk.detail


def test_a_checkpoint_of_the_folder_needs_no_second_place(folder: Path) -> None:
    run = PretrainRun.model_validate(
        {
            "name": "x",
            "data": {"path": "shards", "global_batch": 4},
            "model": {"preset": "Ti/16", "num_classes": 2},
            "optim": {"lr": 1e-3, "ema": {"decay": 0.9}},
            "schedule": {"steps": 100, "warmup_steps": 10},
        }
    )
    num_bytes = checkpoint_bytes(run, num_classes=2)
    parameters = run.make_objective().num_parameters(run.model.resolved(num_classes=2))
    # fp32 weights, two moments, and the average.
    assert num_bytes == 16 * parameters


def test_missing_data_may_be_planned_and_weights_written_later(folder: Path) -> None:
    found = checked(data={"path": "elsewhere", "planned_num_samples": 1000})
    assert found["data"].result == "warning"
    assert "1,000 samples" in found["data"].detail
    assert found["loader"].detail.startswith("500 samples for each")
    run = FinetuneRun.model_validate(
        {
            "name": "x",
            "init": "runs/later",
            "data": {"path": "shards", "global_batch": 4, "val_split": None},
            "model": {"preset": "Ti/16"},
            "optim": {"lr": 1e-3},
            "schedule": {"steps": 100, "warmup_steps": 10},
        }
    )
    rows = {check.name: check for check in run_checks(run)}
    assert rows["weights"].result == "warning"
    assert "runs/later does not exist here" in rows["weights"].detail


def test_the_table_names_each_check_once(capsys: pytest.CaptureFixture[str]) -> None:
    error = UserErrors(
        [
            UserError("missing", where="a.tar", allowed="x", next_step="copy it"),
            UserError("two\nlines"),
        ]
    )
    checks = [
        ok("configuration", "pretrain"),
        *failed("data", error),
        warning("cores", "too few", next_step="ask for more"),
    ]
    assert as_table(checks) == (
        "check          result   detail\n"
        "configuration  ok       pretrain\n"
        "data           error    a.tar: missing; allowed: x\n"
        "                        next: copy it\n"
        "               error    two\n"
        "                        lines\n"
        "cores          warning  too few\n"
        "                        next: ask for more"
    )
    with pytest.raises(UserErrors) as raised:
        refuse_or_warn(checks)
    assert raised.value.errors == error.errors
    refuse_or_warn([checks[0], checks[-1]])
    assert capsys.readouterr().err == "warning: cores: too few\n  next: ask for more\n"


def test_shards_sorted_by_class_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = [str(number) for number in range(20)]
    path = write_shard_folder(tmp_path / "s", num_per_class=20, num_shards=20, classes=classes)
    monkeypatch.setattr("vitscale.data.order.BLOCK_SHARDS", 1)
    assert checked(data={"path": str(path)})["data"].result == "ok"
    index = read_split(path, split="train")
    sorted_index = replace(index, label=np.sort(index.label))
    monkeypatch.setattr("launch.planning.run_checks.read_split", lambda *_, **__: sorted_index)
    assert "sorted by class" in checked(data={"path": str(path)})["data"].detail
