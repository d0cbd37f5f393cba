"""The number of CPU threads of a rank, over every combination of its limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from vitscale.distributed.threads import AFFINITY, RankCpus, rank_cpus, thread_count

MASKS = ((0,), (0, 1), (1, 2), (2, 3), (0, 1, 2, 3))
IN_TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}


def every_node() -> Iterator[list[RankCpus]]:
    """One to three ranks of one node; SLURM: none, one task for each rank, one task for all."""
    for num_ranks in (1, 2, 3):
        for masks in product(MASKS, repeat=num_ranks):
            for cpus, shared, omp in product((None, 1, 2, 4), (False, True), (None, 1, 3)):
                yield [
                    RankCpus(
                        node="a",
                        cores=mask,
                        slurm_cpus=cpus,
                        slurm_source="SLURM",
                        slurm_scope=("7", "0", "0" if shared else str(rank)),
                        omp_threads=omp,
                    )
                    for rank, mask in enumerate(masks)
                ]


def test_every_limit_holds_and_is_divided_once() -> None:
    for ranks in every_node():
        num_ranks = len(ranks)
        counts = [thread_count(ranks, rank=rank) for rank in range(num_ranks)]
        tasks = len({each.slurm_scope for each in ranks})
        for each, (number, source) in zip(ranks, counts, strict=True):
            limits = {AFFINITY: len(each.cores)}
            if each.slurm_cpus is not None:
                limits["SLURM"] = max(1, each.slurm_cpus // (num_ranks // tasks))
            if each.omp_threads is not None:
                limits["OMP_NUM_THREADS"] = each.omp_threads
            assert 1 <= number <= min(limits.values()), ranks
            others = [o.cores for o in ranks if o is not each]
            sharing = [mask for mask in others if set(mask) & set(each.cores)]
            if not sharing:
                assert number == min(limits.values()), ranks
            if all(mask == each.cores for mask in others):
                limits[AFFINITY] = max(1, len(each.cores) // num_ranks)
                assert number == min(limits.values()), ranks
            assert source == AFFINITY or number == limits[source], ranks
        used = {core for each in ranks for core in each.cores}
        # A rank always has one thread, even where there are fewer cores than ranks.
        above_one = sum(number - 1 for number, _ in counts)
        assert above_one <= max(0, len(used) - 1), ranks


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ([range(8), range(8)], [4, 4]),  # shared by the whole node
        ([range(4), range(4, 8)], [4, 4]),  # bound by the launcher
        ([range(8), range(2)], [7, 1]),  # only two cores are shared
        ([range(3)] * 3, [1, 1, 1]),
        ([range(2)] * 5, [1] * 5),
    ],
)
def test_only_shared_cores_are_divided(masks: list[range], expected: list[int]) -> None:
    ranks = [RankCpus(node="a", cores=tuple(mask)) for mask in masks]
    # The same core numbers on another node are other cores.
    ranks += [replace(each, node="b") for each in ranks]
    found = [thread_count(ranks, rank=rank) for rank in range(len(ranks))]
    assert found == [(number, AFFINITY) for number in expected * 2]


@pytest.mark.parametrize(
    ("environment", "cpus", "omp"),
    [
        (IN_TASK | {"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "12"}, 3, None),
        # The batch script itself: the ranks share what the job has on the node.
        (
            {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "12"},
            12,
            None,
        ),
        (IN_TASK, None, None),
        ({"SLURM_CPUS_PER_TASK": "3"}, None, None),
        ({"OMP_NUM_THREADS": "4,2"}, None, 4),
        ({"OMP_NUM_THREADS": " 2 "}, None, 2),
        *(({"OMP_NUM_THREADS": text}, None, None) for text in ("", "0", "-1", "many", "²")),
    ],
)
def test_limits_are_read_from_the_environment(
    environment: dict[str, str], cpus: int | None, omp: int | None
) -> None:
    found = rank_cpus(environment)
    assert (found.slurm_cpus, found.omp_threads) == (cpus, omp)
    assert found.cores == tuple(sorted(os.sched_getaffinity(0)))


def test_ranks_of_one_srun_task_share_its_cores() -> None:
    """A launcher that starts its ranks inside one task of srun."""
    environment = IN_TASK | {"SLURM_CPUS_PER_TASK": "8"}
    cores = tuple(range(16))
    one_task = [replace(rank_cpus(environment), cores=cores)] * 4
    assert thread_count(one_task, rank=2) == (2, "SLURM_CPUS_PER_TASK")
    tasks = [
        replace(rank_cpus(environment | {"SLURM_PROCID": str(task)}), cores=cores)
        for task in range(2)
    ]
    assert thread_count(tasks, rank=1) == (8, "SLURM_CPUS_PER_TASK")
