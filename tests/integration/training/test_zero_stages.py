"""Every ZeRO stage equals a plain torch loop; state moves between stages; bf16; bad updates.

One start of two processes (zero_worker.py) computes all results.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.ranks.rank_processes import ROOT, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]

# bf16 rounds the losses themselves.
BF16 = (("bf16 1", 1e-2), ("bf16 2", 1e-2))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    worker = ROOT / "tests/support/engine/zero_worker.py"
    finished = run_ranks([worker], num_ranks=2, cwd=tmp_path_factory.mktemp("zero"), timeout_s=1500)
    assert [code for code, _ in finished] == [0, 0], finished[0][1] + finished[1][1]
    assert not [row for _, output in finished for row in output.splitlines() if "deprecated" in row]
    line = next(row for row in finished[0][1].splitlines() if row.startswith("RESULTS "))
    return json.loads(line.removeprefix("RESULTS "))


# R3 requires 1e-5 relative between layouts over 50 steps in fp32.
CLOSE = 1e-5
COMPARED = [f"zero {stage} adamw" for stage in range(4)]
COMPARED += ["zero 1 sgd", "zero 0 lamb", "zero 1 layered", "zero 3 layered"]


@pytest.mark.parametrize("run", COMPARED)
def test_stage_equals_plain_torch_over_50_steps(results: dict[str, Any], run: str) -> None:
    """`layered`: layer decay, decay independent of the rate, and the model's newer options."""
    assert len(results[run]) == 50
    assert results[run] == pytest.approx(results[f"plain {run.split()[2]}"], rel=CLOSE)


@pytest.mark.parametrize("run", COMPARED)
def test_gradient_norm_is_reported_before_clipping(results: dict[str, Any], run: str) -> None:
    norms = results[f"plain norms {run.split()[2]}"]
    assert results[run.replace("zero", "norm")] == pytest.approx(norms[-1], rel=1e-4)
    # Otherwise the comparison would not show that clipping acts.
    assert max(norms) > 0.5


@pytest.mark.parametrize("source, target", [(0, 3), (3, 1), (1, 2), (2, 0), (1, 1)])
def test_state_moves_between_stages_bit_for_bit(
    results: dict[str, Any], source: int, target: int
) -> None:
    moved = results[f"moved {source} to {target}"]
    assert moved["state_equal"] and moved["tensors"] == 4 * 32
    assert moved["times_read"] == 1, "the ranks together read every element once"
    assert moved["losses"] == pytest.approx(results["plain adamw"], rel=CLOSE)


def test_sgd_momentum_moves_between_stages(results: dict[str, Any]) -> None:
    assert results["moved sgd"]["state_equal"] and results["moved sgd"]["tensors"] == 2 * 32
    assert results["moved sgd"]["losses"] == pytest.approx(results["plain sgd"], rel=CLOSE)


def test_bf16_momentum_moves_between_stages(results: dict[str, Any]) -> None:
    """Losses are less close: one bit in fp32 may change how the kept moment rounds."""
    assert results["moved half"]["state_equal"] and results["moved half"]["tensors"] == 4 * 32
    assert results["moved half"]["losses"] == pytest.approx(results["plain half"], rel=1e-3)
    assert results["plain half"] != results["plain adamw"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_keeps_fp32_master_state(results: dict[str, Any], stage: int) -> None:
    run = results[f"bf16 {stage}"]
    assert run["state_equal"]
    assert run["losses"][-1] == pytest.approx(results["plain adamw"][19], rel=0.1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_gradients_are_clipped(results: dict[str, Any], stage: int) -> None:
    """DeepSpeed once did not clip them and reported nothing (its pull request 3790)."""
    found = results[f"clipped {stage}"]
    assert found["norm"] > 10
    assert found["change"] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("run, rel", [*((str(s), CLOSE) for s in range(4)), *BF16])
def test_update_not_finite_on_one_rank_is_skipped_on_all(
    results: dict[str, Any], run: str, rel: float
) -> None:
    """NaN loss on rank 1, then an infinite loss on rank 0, then a NaN gradient on rank 1."""
    found = results[f"left out {run}"]
    assert found["nothing_changed"]
    # A plain loop that skips the same updates and continues with the same rates and samples.
    assert found["losses"] == pytest.approx(results["plain left out"], rel=rel)
    after_two, after_three = found["health"]
    # (skipped, longest row since, last skipped step, micro-steps of this rank with a bad loss)
    assert after_two == [[2, 2, 5, [1]], [2, 2, 5, []]]
    assert after_three == [[3, 1, 9, []], [3, 1, 9, []]]


def test_a_task_that_sees_one_gpu_trains_on_it(results: dict[str, Any]) -> None:
    """DeepSpeed took the local rank for its number: 1 on the second rank, which has GPU 0 alone."""
    assert results["devices"]["chosen"] == [["0", "0", "0", "cpu"]] * 2
    assert results["devices"]["local_rank"] == ["0", "1"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_average_of_weights_equals_a_manual_one(results: dict[str, Any], stage: int) -> None:
    found = results[f"averaged {stage}"]
    assert found["far"] < 1e-3 and found["shown_far"] < 1e-4
    assert found["differ"] > 0.1  # from the weights themselves
    assert found["back"], "weights, moments and logits must be the same bits afterwards"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_features_equal_those_of_plain_torch(results: dict[str, Any], stage: int) -> None:
    """Of the averaged weights and of the weights themselves; then training continues."""
    found = results[f"averaged {stage}"]
    assert found["features_shape"] == [16, 30]
    assert found["features_far"] < 1e-3
    assert found["features_differ"] > 0.1  # from those of the weights that are trained
    assert found["losses_after"] == pytest.approx(results["plain adamw"][15:18], rel=CLOSE)


@pytest.mark.parametrize("run", ["0", "2"])
def test_compiled_blocks_train_equally_without_graph_breaks(
    results: dict[str, Any], run: str
) -> None:
    """All blocks share their graphs: forward and backward passes in training, and one without."""
    found = results[f"compiled {run}"]
    assert found["losses"] == pytest.approx(results["plain adamw"][:8], rel=CLOSE)
    assert found["breaks"] == [] and 1 <= found["graphs"] <= 4


def test_fp16_resumes_its_loss_scale_bit_for_bit(results: dict[str, Any]) -> None:
    found = results["fp16"]
    assert found["alike"]
    # It did overflow, the skips are counted, and the scale halved for all but the first.
    assert found["skipped"] >= 2 and found["scale"] == 2.0 ** (17 - found["skipped"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_in_bf16_starts_from_the_fp32_weights(results: dict[str, Any], stage: int) -> None:
    assert results[f"full {stage}"]["start_is_exact"]
    assert results[f"full {stage}"]["rounding"] > 1e-4, "rounding would show"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_head_has_fp32_weights_and_logits_in_bf16(results: dict[str, Any], stage: int) -> None:
    """bf16 has steps of 0.0625 between -8 and -16."""
    found = results[f"full {stage}"]
    assert found["dtype"] == "torch.float32" and -11 < found["near"] < -9
    assert found["far"] < 1e-4 and found["far_averaged"] < 1e-4
    assert found["smallest_gap"] < 0.0625 / 32
