"""Choose the number of CPU threads of each rank; read what the kernel tells of threads.

Owns: reading the limits (CPU affinity, SLURM, OMP_NUM_THREADS) and dividing shared cores once.
Needs no torch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

AFFINITY = "the CPU affinity mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCpus:
    """What limits the CPU threads of one rank."""

    node: str
    cores: tuple[int, ...]
    """Core numbers of the affinity mask."""
    slurm_cpus: int | None = None
    """CPUs that SLURM gave to `slurm_scope`."""
    slurm_source: str = ""
    """Variable that `slurm_cpus` comes from."""
    slurm_scope: tuple[str, ...] = ()
    """The task of srun, or without srun the job. Ranks of the same scope share its CPUs."""
    omp_threads: int | None = None
    """OMP_NUM_THREADS: a limit of each process, not shared."""
    gpu_numa_node: int | None = None
    """NUMA node of the rank's GPU, if known."""


def rank_cpus(environment: Mapping[str, str] | None = None) -> RankCpus:
    """The limits of this process. Values that are no number above 0 are ignored."""
    env = os.environ if environment is None else environment
    job, step, task = (env.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "PROCID"))
    source = "SLURM_CPUS_PER_TASK" if step else "SLURM_CPUS_ON_NODE"
    return RankCpus(
        node=socket.gethostname(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        slurm_cpus=_count(env.get(source)) if job else None,
        slurm_source=source,
        slurm_scope=(job, step, task) if step else (job,),
        # A list has one number for each level of nested regions.
        omp_threads=_count(env.get("OMP_NUM_THREADS", "").partition(",")[0]),
    )


def thread_count(ranks: Sequence[RankCpus], *, rank: int) -> tuple[int, str]:
    """(CPU threads of one rank, name of the limit that decides): the smallest of its limits.

    - Affinity: a core that several ranks of the node may use is divided among them. Where each
      rank is bound to cores of its own, nothing is divided.
    - SLURM: the CPUs of a task, divided among the ranks of this task; srun starts one rank in each.
    - OMP_NUM_THREADS, undivided.
    """
    own = ranks[rank]
    neighbours = [each for each in ranks if each.node == own.node]
    share = sum(Fraction(1, sum(core in each.cores for each in neighbours)) for core in own.cores)
    limits = [(int(share), AFFINITY)]
    if own.slurm_cpus is not None:
        num_sharing = sum(each.slurm_scope == own.slurm_scope for each in neighbours)
        limits.append((own.slurm_cpus // num_sharing, own.slurm_source))
    if own.omp_threads is not None:
        limits.append((own.omp_threads, "OMP_NUM_THREADS"))
    # Of equal limits the one set on purpose is named.
    number, source = min(reversed(limits), key=lambda limit: limit[0])
    return max(1, number), source


def facts_of_threads(pid: int, fact: str) -> dict[int, str]:
    """What the kernel tells of each thread of a process of this machine, by thread: see proc(5).

    Threads that end meanwhile are left out.
    """
    found = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found[int(thread)] = Path(f"/proc/{pid}/task/{thread}/{fact}").read_text().strip()
    return found


def _count(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else None
