"""Predict start-up, checkpoints and failures: which share of the time trains.

Owns: the time from start to first step, the cost of a checkpoint, the best interval between
checkpoints, and goodput. Leaves out: the time of a step (`steps`). Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.planning.scaling.cluster import Cluster
from launch.planning.scaling.collectives import Ranks
from launch.planning.scaling.steps import Work

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """What failures cost a job."""

    start: dict[str, float]
    """Seconds from start to first step, by cause."""
    stall: float
    """Seconds that training loses for one checkpoint."""
    write: float
    """Seconds until a checkpoint is committed; a failure before loses it."""
    mtbf: float
    """Seconds between failures of the job."""
    lost: float
    """Seconds that a failure costs beyond repeated steps: detection, requeueing, start."""

    @property
    def best_interval(self) -> float:
        """Seconds of training between checkpoints with the least loss; never shorter than a write.

        Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps;
        its first term is that of Young 1974.
        """
        ratio = self.stall / (2 * self.mtbf)
        if ratio >= 1:
            return self.mtbf
        factor = 1 + math.sqrt(ratio) / 3 + ratio / 9
        return max(self.write, math.sqrt(2 * self.stall * self.mtbf) * factor - self.stall)

    def goodput(self, interval: float) -> float:
        """Share of the time in which training advances, with a checkpoint every `interval` seconds.

        Failures are exponentially distributed. Work of `interval` seconds then takes
        e^(R/M) M (e^((interval + stall)/M) - 1) on average (Daly 2006), R: what a failure costs
        with the checkpoint that was not committed yet, M: the MTBF.
        """
        restart = self.lost + min(self.write, interval)
        exponent = (interval + self.stall) / self.mtbf
        if exponent + restart / self.mtbf > 500:
            return 0.0
        wall = math.exp(restart / self.mtbf) * self.mtbf * math.expm1(exponent)
        return interval / wall


def recovery(work: Work, *, ranks: Ranks, cluster: Cluster, check_s: float) -> Recovery:
    """check_s: the check of the nodes at the start."""
    start = start_seconds(work, ranks=ranks, cluster=cluster, check_s=check_s)
    rate = min(cluster.file_system_write_gb_s, ranks.nodes * cluster.node_write_gb_s) * 1e9
    write = work.state_bytes / rate
    copy = work.state_bytes / ranks.world / (cluster.device_to_host_gb_s * 1e9)
    per_node = SECONDS_PER_DAY * 1000 / cluster.failures_per_1000_node_days
    return Recovery(
        start=start,
        stall=cluster.save_s + copy + cluster.write_slowdown * write,
        write=write,
        mtbf=per_node / ranks.nodes,
        lost=cluster.detection_s + cluster.requeue_s + sum(start.values()),
    )


def start_seconds(
    work: Work, *, ranks: Ranks, cluster: Cluster, check_s: float
) -> dict[str, float]:
    """Seconds of each part of a restart, in order."""
    imports = max(cluster.import_s, ranks.world * cluster.import_ops / cluster.metadata_ops_s)
    rate = min(cluster.file_system_read_gb_s, ranks.nodes * cluster.node_read_gb_s) * 1e9
    return {
        "scheduler": cluster.scheduler_s,
        "imports": imports,
        "rendezvous": ranks.world * cluster.rendezvous_ms_per_rank / 1e3,
        "groups": ranks.world * cluster.communicator_ms_per_rank / 1e3,
        "node check": check_s if ranks.world > 1 else 0.0,
        "restore": work.state_bytes / rate,
        "compile": cluster.compile_s,
    }
