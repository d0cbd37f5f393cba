"""benchmarks/scaling_model.py: tables, figure, and one error for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.scaling_model import main, node_counts
from tests.contract.tree import ROOT
from vitscale.config.errors import UserError

CONFIG = str(ROOT / "configs/vit_h14.yaml")


@pytest.mark.slow
def test_tables_and_figure_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--figure", str(tmp_path / "f.png"), "--json", str(tmp_path / "t.json")]
    options = ["--config", CONFIG, "--nodes", "1,2,3", "--set", "mfu=0.4", *files]
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", *options])
    main()
    printed = capsys.readouterr().out
    assert "mfu=0.4 " in printed
    assert "3 node(s): 4096 images do not divide over 24 ranks" in printed
    assert "NeMo ViT-g/14, DGX H100" in printed
    rows = json.loads((tmp_path / "t.json").read_text())
    sizes = [(row["batch"], row["nodes"]) for row in rows]
    assert sizes == [("global", 1), ("global", 2), ("per GPU", 1), ("per GPU", 2), ("per GPU", 3)]
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_inputs_are_listed_with_their_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", "--inputs", "--set", "nic_gbit_s=200.0"])
    main()
    printed = capsys.readouterr().out
    assert "nic_gbit_s = 200.0" in printed and "Kokolis et al. 2025" in printed


def test_unknown_inputs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", "--inputs", "--set", "mfo=0.4"])
    with pytest.raises(UserError, match="mfu"):
        main()


def test_nodes_are_a_doubling_range_or_a_list() -> None:
    assert node_counts("1:512") == [2**power for power in range(10)]
    assert node_counts("3:20") == [3, 6, 12]
    assert node_counts("1,3,9") == [1, 3, 9]
    for text in ("0:4", "4:1", "x", "1,0", ""):
        with pytest.raises(UserError, match="--nodes"):
            node_counts(text)
