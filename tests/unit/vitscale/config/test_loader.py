"""Precedence, the site file, one report of all errors, and what is written is read back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.run import FinetuneRun
from finetune.settings import VisualizeRun
from pretrain.run import PretrainRun
from tests.support.run_files import VALID, errors_of
from vitscale.config.errors import UserErrors
from vitscale.config.fields import known_keys
from vitscale.config.loader import OTHER_NAMES, load_run, load_run_file, run_leaves, run_to_yaml
from vitscale.config.section import Run
from vitscale.config.source import yaml_flow

STAGES: dict[str, type[Run]] = {"pretrain": PretrainRun, "finetune": FinetuneRun}


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


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "optim.lr"),
        ("optim.learning_rate", "optim.lr"),
        ("data.batch_size", "data.global_batch"),
        ("data.globalbatch", "data.global_batch"),
        ("model.img_size", "model.image_size"),
        ("schedul.epochs", "schedule"),
        ("optim.warmup_steps", "schedule.warmup_steps"),
        ("zero_stage", "engine.zero_stage"),
        ("tracking.url", "tracking.uri"),
        ("model.heads", "model.num_heads"),
    ],
)
def test_typo_suggests_the_nearest_key(here: Path, typed: str, meant: str) -> None:
    (found,) = errors_of("a.yaml", f"{typed}=1")
    assert found.endswith(f"next: did you mean {meant}?")


def test_suggested_keys_exist() -> None:
    assert {tuple(key.split(".")) for key in OTHER_NAMES.values()} <= {*known_keys(PretrainRun, {})}


def test_stage_chooses_the_run_type(here: Path) -> None:
    (here / "b.yaml").write_text(VALID.replace("pretrain", "finetune") + "init: x\n")
    assert isinstance(load_run_file(STAGES, "b.yaml"), FinetuneRun)


# ---- the site file ----------------------------------------------------------------------------

SITE = """\
launch:
  partition: gpu
  setup: [module load cuda]
  sbatch: {mail-type: END}
tracking:
  uri: http://mlflow:5000
"""


@pytest.fixture
def site(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = here / "site.yaml"
    path.write_text(SITE)
    monkeypatch.setenv("VITSCALE_SITE", str(path))
    return path


def test_the_site_file_is_above_defaults_and_below_files(here: Path, site: Path) -> None:
    (here / "b.yaml").write_text("base: a.yaml\nlaunch: {partition: low}\n")
    loaded = load_run(PretrainRun, "b.yaml", overrides=["launch.sbatch.exclusive=true"])
    launch, sources = loaded.run.launch, loaded.sources
    assert (launch.partition, sources["launch.partition"]) == ("low", "b.yaml:2")
    assert launch.setup == ("module load cuda",)
    assert (sources["launch.setup"], sources["launch.account"]) == ("site.yaml:3", "default")
    assert launch.sbatch == {"mail-type": "END", "exclusive": True}
    assert loaded.run.tracking.uri == "http://mlflow:5000"
    assert load_run_file(PretrainRun, "a.yaml").launch.sbatch == {}  # a resolved file ignores it


def test_the_site_file_has_a_usual_place(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITSCALE_SITE", raising=False)
    monkeypatch.setenv("HOME", str(here))
    assert load_run(PretrainRun, "a.yaml").run.launch.partition is None
    place = here / ".config/vitscale/site.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(SITE)
    assert load_run(PretrainRun, "a.yaml").run.launch.partition == "gpu"
    monkeypatch.setenv("VITSCALE_SITE", "")
    assert load_run(PretrainRun, "a.yaml").run.launch.partition is None


def test_mistakes_in_the_site_file_are_reported_with_their_place(here: Path, site: Path) -> None:
    site.write_text(
        "launch:\n  partitoin: gpu\n  cpus_per_task: many\n"
        "data: {num_workers: 4}\ntraking: {uri: null}\ntracking: http://mlflow\n"
    )
    (here / "b.yaml").write_text("base: a.yaml\nsede: 1\n")
    found = [text.splitlines()[0] for text in errors_of("b.yaml")]
    assert sorted(found) == [
        "b.yaml:2: sede: unknown key sede",
        "site.yaml:2: launch.partitoin: unknown key launch.partitoin",
        "site.yaml:3: launch.cpus_per_task: 'many' was read as text",
        "site.yaml:4: data: data cannot be set in a site file",
        "site.yaml:5: traking: traking cannot be set in a site file",
        "site.yaml:6: tracking: tracking is text instead of keys and values",
    ]
    # A run without these groups ignores them.
    site.write_text("launch: {partitoin: gpu}\n")
    assert load_run(VisualizeRun, None, overrides=["init=runs/a"]).run.init == "runs/a"
    site.unlink()
    (error,) = errors_of("a.yaml")
    assert error.startswith("VITSCALE_SITE: there is no file site.yaml")


# ---- writing, and anything at all -------------------------------------------------------------


def test_resolved_run_is_read_back_unchanged(here: Path) -> None:
    awkward = {"a b": "x: y # z", "on": "on", "1": "1e5", "q": 'é"\\\n\u2028\U0001f600', "e": ""}
    raw = {"fp16": {"y": [1, 2.0, {"z": None}], "empty": {}, "none": []}, "dump_state": True}
    overrides = [f"tracking.tags={yaml_flow(awkward)}", f"deepspeed={yaml_flow(raw)}"]
    run = load_run(PretrainRun, "a.yaml", overrides=overrides).run
    assert run.tracking.tags == awkward and run.deepspeed == raw
    (here / "resolved.yaml").write_text(run_to_yaml(run))
    again = load_run_file(PretrainRun, "resolved.yaml")
    assert again == run and run_to_yaml(again) == run_to_yaml(run)


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
