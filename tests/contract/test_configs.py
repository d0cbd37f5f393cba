"""Every file under configs/ is a run: it loads, and its header says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.run import FinetuneRun
from pretrain.run import PretrainRun
from tests.contract.tree import ROOT
from vitscale.config.loader import DEFAULT, load_run, load_run_file, run_to_yaml
from vitscale.config.section import Run
from vitscale.runs.data_prep import DataPrepRun

RUN_TYPES: dict[str, type[Run]] = {
    "data_prep": DataPrepRun,
    "pretrain": PretrainRun,
    "finetune": FinetuneRun,
}
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*") if p.suffix in (".yaml", ".yml"))
CARD = ("What", "Command", "Hardware", "Expect", "Source")


def _names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_configs_were_found() -> None:
    names = {_names(path) for path in CONFIGS}
    assert names >= {f"configs/{name}.yaml" for name in ("vit_b16", "vit_l16", "vit_h14")}
    assert {p.suffix for p in CONFIGS} == {".yaml"}


@pytest.mark.parametrize("path", CONFIGS, ids=_names)
def test_config_loads_as_the_run_of_its_stage(path: Path, tmp_path: Path) -> None:
    run = load_run_file(RUN_TYPES, path)
    resolved = tmp_path / "config.yaml"
    resolved.write_text(run_to_yaml(run))
    assert load_run_file(RUN_TYPES, resolved) == run


@pytest.mark.parametrize("path", CONFIGS, ids=_names)
def test_config_or_its_base_names_the_stage(path: Path) -> None:
    assert load_run(RUN_TYPES, path).sources["stage"] != DEFAULT


@pytest.mark.parametrize("path", CONFIGS, ids=_names)
def test_config_begins_with_a_run_card(path: Path) -> None:
    header = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        header.append(line)
    cards = {line[2:].partition(":")[0]: line.partition(":")[2].strip() for line in header}
    assert not [label for label in CARD if not cards.get(label)], "missing run card lines"
    assert _names(path) in "\n".join(header), "the command must name this file"
