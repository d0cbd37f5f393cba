"""Start-up, checkpoints and failures."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.collectives import Ranks
from launch.planning.scaling.published import VIT_G14
from launch.planning.scaling.recovery import Recovery, recovery

WORK = replace(VIT_G14, state_bytes=12 * VIT_G14.parameters)


def predicted(nodes: int, **inputs: object) -> Recovery:
    cluster = Cluster.model_validate(inputs)
    return recovery(WORK, ranks=Ranks(nodes=nodes, per_node=8), cluster=cluster, check_s=10)


def simulated(found: Recovery, interval: float, *, num_failures: int) -> float:
    """Share of useful time until so many failures, drawn one by one."""
    draw = random.Random(0)
    useful = wall = 0.0
    for _ in range(num_failures):
        alive = draw.expovariate(1 / found.mtbf)
        wall += alive
        # Time until training runs again; the last checkpoint counts once it is written.
        ready = found.lost
        done = int(max(0.0, alive - ready - found.write) / (interval + found.stall))
        useful += done * interval
    return useful / wall


@pytest.mark.parametrize("nodes", [128, 512, 2048])
def test_goodput_agrees_with_a_simulation(nodes: int) -> None:
    found = predicted(nodes)
    for interval in (found.best_interval, 20 * found.best_interval):
        simulation = simulated(found, interval, num_failures=3_000)
        assert found.goodput(interval) == pytest.approx(simulation, abs=0.02)


def test_the_best_interval_loses_least() -> None:
    found = predicted(256, write_slowdown=0.0, save_s=30.0)
    best = found.goodput(found.best_interval)
    assert best > found.goodput(found.best_interval / 1.5)
    assert best > found.goodput(found.best_interval * 1.5)


def test_no_interval_is_shorter_than_a_write() -> None:
    found = predicted(512, save_s=0.0, file_system_write_gb_s=0.01)
    assert found.best_interval >= found.write == pytest.approx(WORK.state_bytes / 0.01e9)


def test_the_published_rate_gives_the_published_mtbf() -> None:
    """Kokolis et al. 2025 project 1.8 hours for 16,384 GPUs of RSC-1."""
    assert predicted(2048).mtbf / 3600 == pytest.approx(1.8, abs=0.01)


def test_imports_are_by_rank_and_the_checkpoint_is_read_once() -> None:
    assert predicted(64).start["restore"] == pytest.approx(WORK.state_bytes / 50e9)
    assert predicted(64).start["imports"] == pytest.approx(512 * 30_000 / 100_000)
    assert predicted(64, import_ops=0).start["imports"] == 15
    assert predicted(64, compile_s=120.0).start["compile"] == 120


def test_failures_that_never_let_it_work_have_no_goodput() -> None:
    assert predicted(512, detection_s=1e9).goodput(60.0) == 0
