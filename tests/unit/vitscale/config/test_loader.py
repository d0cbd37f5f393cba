"""Inheritance, precedence, and the exact text of every kind of error."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from tests.support.run_files import VALID, errors_of
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import (
    load_run,
    load_run_file,
    run_leaves,
    run_to_yaml,
    yaml_flow,
)
from vitscale.config.schema import known_keys
from vitscale.config.section import Run
from vitscale.config.validation_errors import OTHER_NAMES, nearest_key
from vitscale.runs.data_prep import DataPrepRun

STAGES: dict[str, type[Run]] = {
    "data_prep": DataPrepRun,
    "pretrain": PretrainRun,
    "finetune": FinetuneRun,
}


def test_valid_file_loads(here: Path) -> None:
    run = load_run_file(PretrainRun, "a.yaml")
    assert (run.optim.lr, run.model.preset, run.data.crop_area) == (1e-3, "B/16", (0.05, 1.0))


def test_command_line_beats_file_beats_base_beats_default(here: Path) -> None:
    (here / "sub").mkdir()
    (here / "sub/b.yaml").write_text("base: ../a.yaml\noptim:\n  lr: 2e-3\ndata: {path: b}\n")
    loaded = load_run(PretrainRun, "sub/b.yaml", overrides=["data.path=c"])
    run, sources = loaded.run, loaded.sources
    assert (run.data.path, run.optim.lr, run.data.global_batch, run.seed) == ("c", 2e-3, 64, 0)
    assert sources["data.path"] == "command line"
    assert sources["optim.lr"] == "sub/b.yaml:3"
    assert sources["data.global_batch"] == "a.yaml:5"
    assert sources["seed"] == "default"
    assert sources["optim.eps"] == "default"  # although its group is in the file


def test_lists_are_replaced_and_groups_merged(here: Path) -> None:
    text = VALID + "launch: {setup: [a, b], sbatch: {x: 1}}\n"
    (here / "a.yaml").write_text(text)
    overrides = ["launch.setup=[c]", "launch.sbatch={y: 2}", "launch.sbatch.z=3"]
    launch = load_run(PretrainRun, "a.yaml", overrides=overrides).run.launch
    assert launch.setup == ("c",) and launch.sbatch == {"x": 1, "y": 2, "z": 3}


def test_all_errors_are_in_one_report_with_their_lines(here: Path) -> None:
    (here / "b.yaml").write_text(
        "base: a.yaml\noptim:\n  lr: fast\n  lr: 3\nmodel:\n  image_size: 225\nseeed: 1\n"
        "data: {path: null}\nschedule: {final_lr: .inf}\n"
    )
    found = errors_of("b.yaml", "oops", "engine.precision=fp8")
    places = [text.splitlines()[0] for text in found]
    for start in (
        "b.yaml:4: optim.lr: key 'lr' is given twice; first on line 3",
        "b.yaml:3: optim.lr: 'fast' was read as text",
        "b.yaml:6: model.image_size: 225 px is not a multiple",
        "b.yaml:7: seeed: unknown key seeed",
        "b.yaml:8: data.path: null was read as null",
        "b.yaml:9: schedule.final_lr: .inf is not a finite number",
        "command line: 'oops' is not key=value",
        "command line: engine.precision: 'fp8' is not allowed",
    ):
        assert [place for place in places if place.startswith(start)], (start, places)
    assert len(found) == 8


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("data.globalbatch", "data.global_batch"),
        ("model.img_size", "model.image_size"),
        ("schedul.epochs", "schedule.epochs"),
        ("optim.warmup_steps", "schedule.warmup_steps"),
        ("zero_stage", "engine.zero_stage"),
        ("tracking.url", "tracking.uri"),
        ("global_batch", "data.global_batch"),
        ("model.heads", "model.num_heads"),
    ],
)
def test_typo_suggests_the_nearest_key(here: Path, typed: str, meant: str) -> None:
    (found,) = errors_of("a.yaml", f"{typed}=1")
    if typed == "optim.learning_rate":  # too far from any name: the group's keys are listed
        assert "lr" in found and "next:" in found
    else:
        assert f"did you mean {meant}?" in found or f"did you mean {meant.split('.')[0]}?" in found


def test_stage_chooses_the_run_type(here: Path) -> None:
    (here / "b.yaml").write_text(VALID.replace("pretrain", "finetune") + "init: x\n")
    assert isinstance(load_run_file(STAGES, "b.yaml"), FinetuneRun)
    (here / "c.yaml").write_text(VALID.replace("stage: pretrain\n", ""))
    with pytest.raises(UserError, match="stage is missing\n  allowed: data_prep, pretrain, finet"):
        load_run_file(STAGES, "c.yaml")


def test_errors_are_in_the_order_of_lines(here: Path) -> None:
    """A missing stage hides none of them: they are those of the stage that fits best."""
    text = VALID.replace("stage: pretrain\n", "").replace("lr: 1e-3", "lr: -1")
    (here / "b.yaml").write_text(text.replace("name: demo", "name: [1]") + "unknown: 1\n")
    with pytest.raises(UserErrors) as caught:
        load_run(STAGES, "b.yaml", overrides=["engine.zero_stage=7"])
    places = [str(error.where) for error in caught.value.errors]
    assert places[:2] == ["b.yaml: stage", "b.yaml:1: name"] and len(places) == 5
    lines = [int(place.split(":")[1]) for place in places[1:4]]
    assert lines == sorted(lines) and places[3].endswith(": unknown")
    assert places[4] == "command line: engine.zero_stage"
    # Of keys that all stages have, none is told which are missing.
    (here / "c.yaml").write_text("output: x\n")
    with pytest.raises(UserErrors) as caught:
        load_run(STAGES, "c.yaml")
    assert len(caught.value.errors) == 1


# ---- writing ----------------------------------------------------------------------------------


def test_resolved_run_is_read_back_unchanged(here: Path) -> None:
    awkward = {"a b": "x: y # z", "on": "on", "1": "1e5", "q": 'é"\\\n\u2028\U0001f600', "e": ""}
    raw = {"fp16": {"y": [1, 2.0, {"z": None}], "empty": {}, "none": []}, "dump_state": True}
    overrides = [f"tracking.tags={yaml_flow(awkward)}", f"deepspeed={yaml_flow(raw)}"]
    run = load_run(PretrainRun, "a.yaml", overrides=overrides).run
    assert run.tracking.tags == awkward and run.deepspeed == raw
    (here / "resolved.yaml").write_text(run_to_yaml(run))
    again = load_run_file(PretrainRun, "resolved.yaml")
    assert again == run and run_to_yaml(again) == run_to_yaml(run)


# ---- anything at all --------------------------------------------------------------------------

EXTREMES: list[Any] = [
    None, True, 0, -1, 2**63 - 1, 1e308, 5e-324, -0.0, "", "on", "x" * 200, "a/b/c", "\U0001f600",
    [], [0], [None, None], [1e308, -1e308], {}, {"a": 1}, {"": 1}, "0/0", "B/0", "B/999999999999",
]  # fmt: skip
TREE = {
    "stage": "pretrain",
    "name": "demo",
    "data": {"path": "s", "global_batch": 64, "crop_area": [0.2, 1], "std": [1, 1, 1]},
    "model": {"preset": "B/16", "image_size": 224, "num_heads": 12},
    "optim": {"lr": 1e-3, "betas": [0.9, 0.99]},
    "schedule": {"epochs": 3, "warmup_steps": 5},
    "engine": {"zero_stage": 1},
    "deepspeed": {"a": {"b": 1}},
    "launch": {"sbatch": {"x": 1}, "setup": ["a"]},
}
KNOWN = [path for path, _ in run_leaves(PretrainRun.model_validate(copy.deepcopy(TREE)))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A valid configuration after up to four drops, typos, type changes or extreme values."""
    tree = copy.deepcopy(TREE)
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(KNOWN))
        path = path[: draw(st.integers(1, len(path)))]
        group: Any = tree
        for part in path[:-1]:
            group = group.setdefault(part, {}) if isinstance(group, dict) else {}
        if not isinstance(group, dict):
            continue
        kind = draw(st.sampled_from(["drop", "set", "set", "text", "typo"]))
        old = group.pop(path[-1], None)
        if kind in ("set", "text"):
            values = st.sampled_from(EXTREMES) if kind == "set" else st.text(max_size=8)
            group[path[-1]] = copy.deepcopy(draw(values))
        elif kind == "typo":
            position = draw(st.integers(0, len(path[-1]) - 1))
            group[path[-1][:position] + "_" + path[-1][position + 1 :]] = old
    return tree


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=mutated())
def test_any_configuration_is_a_valid_run_or_a_user_error(here: Path, tree: dict[str, Any]) -> None:
    (here / "m.yaml").write_text(yaml_flow(tree))
    try:
        run = load_run(STAGES, "m.yaml").run
    except UserErrors as errors:
        assert all(error.where for error in errors.errors)
        return
    assert not list(run.problems())
    (here / "resolved.yaml").write_text(run_to_yaml(run))
    assert load_run_file(STAGES, "resolved.yaml") == run


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(KNOWN), data=st.data())
def test_one_wrong_letter_is_recognised(here: Path, path: tuple[str, ...], data: Any) -> None:
    if path[0] in ("deepspeed",) or path[:2] == ("launch", "sbatch") or len(path[-1]) < 5:
        return
    position = data.draw(st.integers(1, len(path[-1]) - 1))
    typo = path[-1][:position] + "0" + path[-1][position + 1 :]
    text = errors_of("a.yaml", f"{'.'.join((*path[:-1], typo))}=1")[0]
    # cooldown_shape and cooldown_share are one letter apart themselves.
    near = [
        key
        for key in KNOWN
        if key[:-1] == path[:-1] and key[-1][:position] + "0" + key[-1][position + 1 :] == typo
    ]
    assert any(f"did you mean {'.'.join(key)}?" in text for key in near)


@pytest.mark.parametrize(
    "written, meant",
    [("optim.learning_rate", "optim.lr"), ("data.batch_size", "data.global_batch")],
)
def test_names_of_other_trainers_suggest_our_keys(written: str, meant: str) -> None:
    assert nearest_key(tuple(written.split(".")), run_type=PretrainRun) == meant


@pytest.mark.parametrize("meant", sorted(set(OTHER_NAMES.values())))
def test_suggested_keys_exist(meant: str) -> None:
    assert tuple(meant.split(".")) in set(known_keys(PretrainRun))
