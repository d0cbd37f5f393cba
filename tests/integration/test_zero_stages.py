"""Every ZeRO stage against a plain torch loop; state moved between stages; bf16.

One start of two processes (zero_worker.py) makes all figures.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.rank_processes import ROOT, run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = ROOT / "tests/integration/zero_worker.py"
    finished = run_ranks([worker], num_ranks=2, cwd=tmp_path_factory.mktemp("zero"))
    assert [code for code, _ in finished] == [0, 0], finished[0][1] + finished[1][1]
    line = next(row for row in finished[0][1].splitlines() if row.startswith("RESULTS "))
    return json.loads(line.removeprefix("RESULTS "))


@pytest.mark.parametrize("run", ["zero 0 adamw", "zero 1 adamw", "zero 2 adamw", "zero 3 adamw"])
def test_stage_equals_plain_torch_over_50_steps(results: dict[str, Any], run: str) -> None:
    assert len(results[run]) == 50
    assert results[run] == pytest.approx(results["plain adamw"], rel=1e-4)


def test_sgd_under_zero_equals_plain_torch(results: dict[str, Any]) -> None:
    assert results["zero 1 sgd"] == pytest.approx(results["plain sgd"], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_norm_is_the_one_before_clipping(results: dict[str, Any], stage: int) -> None:
    expected = results["plain norm adamw"]
    assert results[f"norm {stage} adamw"] == pytest.approx(expected, rel=1e-2)
    # Otherwise the comparison would not show that clipping acts.
    assert results["plain largest norm adamw"] > 0.5


@pytest.mark.parametrize("source, target", [(0, 3), (3, 1), (1, 2), (2, 0), (1, 1)])
def test_state_moves_between_stages_bit_for_bit(
    results: dict[str, Any], source: int, target: int
) -> None:
    moved = results[f"moved {source} to {target}"]
    assert moved["state_equal"] and moved["tensors"] == 3 * 32
    assert moved["losses"] == pytest.approx(results["plain adamw"], rel=1e-4)


def test_sgd_momentum_moves_between_stages(results: dict[str, Any]) -> None:
    assert results["moved sgd"]["state_equal"] and results["moved sgd"]["tensors"] == 2 * 32
    assert results["moved sgd"]["losses"] == pytest.approx(results["plain sgd"], rel=1e-4)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_keeps_fp32_master_state(results: dict[str, Any], stage: int) -> None:
    run = results[f"bf16 {stage}"]
    assert run["state_equal"]
    assert run["losses"][-1] == pytest.approx(results["plain adamw"][-1], rel=0.1)
