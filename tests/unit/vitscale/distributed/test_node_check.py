"""The comparison of ranks at injected rates, and one real measurement on a single rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from vitscale.config.errors import RankError, UserError
from vitscale.distributed import node_check
from vitscale.distributed.node_check import (
    ALL_REDUCE,
    MATMUL,
    RankReport,
    check_nodes,
    check_results,
    slow_ranks,
    summary,
)
from vitscale.distributed.world import World

WORLD = World(rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"))


def reports(*products: float, reduced: float = 1e9, per_node: int = 2) -> list[RankReport]:
    return [
        RankReport(
            rank=rank, node=f"n{rank // per_node}", rates={MATMUL: rate, ALL_REDUCE: reduced}
        )
        for rank, rate in enumerate(products)
    ]


@pytest.mark.parametrize(
    ("products", "named"),
    [
        ([100, 100, 100, 100], []),
        ([100, 81, 100, 100], []),
        ([100, 79, 100, 100], [1]),
        ([100, 50], [1]),  # of two, the faster one is the median
        ([100, 100, 40, 40], [2, 3]),
        ([300, 100, 100, 100], []),
        ([0, 100, 100], [0]),
    ],
)
def test_a_rank_far_below_the_median_is_named(products: list[float], named: list[int]) -> None:
    lines = list(slow_ranks(reports(*products)))
    assert len(lines) == len(named) + bool(named)
    for line, rank in zip(lines, named, strict=False):
        assert f"rank {rank} on n{rank // 2} is slow: matrix product" in line
    if named:
        nodes = ",".join(dict.fromkeys(f"n{rank // 2}" for rank in named))
        assert lines[-1].endswith(f"launch.exclude={nodes}")


def test_at_most_eight_ranks_are_named() -> None:
    lines = list(slow_ranks(reports(*[1.0] * 10, *[100.0] * 20)))
    assert len(lines) == 9 and "2 more" in lines[-1]


def test_the_summary_has_medians_and_ranges() -> None:
    line = "".join(summary(reports(1e9, 2e9, 4e9, reduced=5e9), seconds=10))
    assert line == (
        "node check of 10 s, 3 ranks on 2 node(s): matrix product 2 GFLOP/s (1 to 4), "
        "all-reduce 5 GB/s (5 to 5)"
    )


def test_a_wrong_result_names_rank_and_node() -> None:
    found = reports(1, 1, 1)
    found[2] = RankReport(rank=2, node="n1", rates=found[2].rates, wrong=(MATMUL,))
    with pytest.raises(UserError, match=r"1 of 3 ranks: rank 2 on n1 \(matrix product\)") as error:
        check_results(found)
    assert "launch.exclude=n1" in str(error.value)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_check_leaves_no_trace(one_rank: None) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    threads = torch.get_num_threads()
    lines = list(check_nodes(WORLD, seconds=0.01))
    assert lines[0].startswith("node check of 0.01 s, 1 ranks on 1 node(s): matrix product ")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert torch.get_num_threads() == threads


def test_wrong_results_and_errors_end_the_run(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    real = torch.mm

    def flips_one(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> None:
        real(left, right, out=out)
        out[5, 6] += 1

    monkeypatch.setattr(node_check.torch, "mm", flips_one)
    with pytest.raises(UserError, match=r"rank 0 on n7 \(matrix product\)"):
        list(check_nodes(WORLD, seconds=0.01))

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error\nmore")

    monkeypatch.setattr(node_check.torch, "mm", fails)
    with pytest.raises(RankError, match="failed on n7: CUDA error: uncorrectable ECC error\n"):
        list(check_nodes(WORLD, seconds=0.01))
    monkeypatch.undo()
    monkeypatch.setattr(node_check.dist, "all_reduce", lambda values: values.mul_(3))
    with pytest.raises(UserError, match=r"\(all-reduce\)"):
        list(check_nodes(WORLD, seconds=0.01))
