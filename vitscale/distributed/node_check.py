"""Find slow and broken ranks before a run starts.

Owns: a matrix product on every rank, an all-reduce over all ranks, and the comparison of the ranks.
Leaves out: hung and dead ranks (`heartbeat`).

Draws no random numbers and returns its GPU memory, so that the run computes the same without it.
Both results are known exactly. A wrong one ends the run; a slow rank is only named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median_high
from typing import Literal

import torch
import torch.distributed as dist

from vitscale.config.errors import DeviceError, UserError
from vitscale.distributed.processes import node_name
from vitscale.distributed.world import World, gather_objects, process_group

# Equal GPUs at equal clocks differ by a few percent; a throttled or shared one by far more.
SLOW_SHARE = 0.8
MAX_NAMED = 8
MATMUL_SIDE = {"cuda": 8192, "cpu": 1024}
REDUCED_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 20}
MATMUL, ALL_REDUCE = "matrix product", "all-reduce"
UNITS = {MATMUL: ("GFLOP/s", 1e9), ALL_REDUCE: ("GB/s", 1e9)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank measured."""

    rank: int
    node: str
    rates: Mapping[str, float]
    """FLOP/s of the matrix product, bytes/s of the all-reduce: means over the time of the check,
    because a rank that loses its cores to other processes is at times fast."""
    wrong: tuple[str, ...] = ()
    """Computations with a wrong result."""


def check_nodes(world: World, *, seconds: float) -> Iterator[str]:
    """Measure for `seconds` on all ranks; yield lines for the log. Collective.

    Raises UserError naming rank and node, on all ranks, if a result is wrong.
    """
    own = measure(world, seconds=seconds)
    reports: list[RankReport] = gather_objects(own)
    check_results(reports)
    yield from summary(reports, seconds=seconds)
    yield from slow_ranks(reports)


def check_alone(*, device: Literal["auto", "cuda", "cpu"], seconds: float) -> list[str]:
    """`check_nodes` in a job that does nothing else."""
    with process_group(device=device, timeout_min=5, num_threads=None) as world:
        return list(check_nodes(world, seconds=seconds))


def measure(world: World, *, seconds: float) -> RankReport:
    """Half of the time for each measurement. Raises DeviceError if the device fails."""
    node = node_name()
    try:
        product, is_right = _matmul(world.device, seconds=seconds / 2)
        reduced, sum_is_right = _all_reduce(world, seconds=seconds / 2)
    except RuntimeError as error:
        raise DeviceError(
            f"the node check failed on {node}: {str(error).splitlines()[0]}",
            where="launch.doctor_seconds",
            next_step=f"check the device; to avoid the node, set launch.exclude={node}",
        ) from error
    finally:
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(world.device)
    checks = {MATMUL: is_right, ALL_REDUCE: sum_is_right}
    return RankReport(
        rank=world.rank,
        node=node,
        rates={MATMUL: product, ALL_REDUCE: reduced},
        wrong=tuple(name for name, right in checks.items() if not right),
    )


def _matmul(device: torch.device, *, seconds: float) -> tuple[float, bool]:
    """(FLOP/s, whether all results were right): bf16 on GPU, fp32 on CPU."""
    side = MATMUL_SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    index = torch.arange(side, device=device)
    rows, columns = (index % 5 - 2).to(dtype), (index % 7 - 3).to(dtype)
    signs = (index * 2654435761 // 65536 % 2 * 2 - 1).to(dtype)
    left, right = rows[:, None] * signs, signs[:, None] * columns
    # Squares of signs are 1: every sum is an integer that bf16 represents exactly.
    expected = side * rows[:, None] * columns
    product = torch.empty_like(expected)
    times: list[float] = []
    is_right, end = True, time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        times.append(_timed(lambda: torch.mm(left, right, out=product), device))
        is_right = is_right and torch.equal(product, expected)
    return 2.0 * side**3 / fmean(times[1:]), is_right  # the first one starts threads


def _all_reduce(world: World, *, seconds: float) -> tuple[float, bool]:
    """(bytes/s, whether all sums were right). All ranks repeat it equally often.

    The rate is that of one link of a ring: each sends 2 (n - 1) / n of the bytes.
    """
    device, num_ranks = world.device, world.world_size
    values = torch.empty(REDUCED_ELEMENTS[device.type], device=device)
    times: list[float] = []
    is_right, all_have_time, end = True, True, time.perf_counter() + seconds
    while len(times) < 2 or all_have_time:
        values.fill_(world.rank + 1)
        values[0] = float(time.perf_counter() < end)
        times.append(_timed(lambda: dist.all_reduce(values), device))
        all_have_time = values[0].item() == num_ranks
        expected = num_ranks * (num_ranks + 1) / 2
        is_right = is_right and bool((values[1:] == expected).all())
    sent = 2 * (num_ranks - 1) / num_ranks * values.nbytes
    return sent / fmean(times[1:]), is_right  # the first one opens connections


def _timed(function: Callable[[], object], device: torch.device) -> float:
    """Seconds that the function takes on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def check_results(reports: Sequence[RankReport]) -> None:
    """Raise UserError if a rank computed wrong results."""
    broken = [report for report in reports if report.wrong]
    if broken:
        named = ", ".join(
            f"rank {each.rank} on {each.node} ({' and '.join(each.wrong)})"
            for each in broken[:MAX_NAMED]
        )
        nodes = ",".join(dict.fromkeys(each.node for each in broken))
        raise UserError(
            f"wrong results on {len(broken)} of {len(reports)} ranks: {named}",
            where="node check",
            next_step=f"report the hardware; to avoid it, set launch.exclude={nodes}",
        )


def summary(reports: Sequence[RankReport], *, seconds: float) -> Iterator[str]:
    """One line: ranks, nodes, and the median rate with its range."""
    nodes = len({report.node for report in reports})
    parts = []
    for name, (unit, factor) in UNITS.items():
        rates = [report.rates[name] / factor for report in reports]
        middle = median_high(rates)
        parts.append(f"{name} {middle:,.4g} {unit} ({min(rates):,.4g} to {max(rates):,.4g})")
    ranks = f"{len(reports)} ranks on {nodes} node(s)"
    yield f"node check of {seconds:g} s, {ranks}: {', '.join(parts)}"


def slow_ranks(reports: Sequence[RankReport]) -> Iterator[str]:
    """One warning for each rank whose matrix product is slower than SLOW_SHARE of the median.

    The median is the higher of the two middle ranks: of two ranks, that of the faster one.
    The all-reduce does not tell: it is as slow as the slowest rank, for which the others wait.
    """
    unit, factor = UNITS[MATMUL]
    middle = median_high([report.rates[MATMUL] for report in reports])
    slow = [report for report in reports if report.rates[MATMUL] < SLOW_SHARE * middle]
    for each in slow[:MAX_NAMED]:
        rate = each.rates[MATMUL]
        yield (
            f"warning: rank {each.rank} on {each.node} is slow: {MATMUL} "
            f"{rate / factor:,.4g} {unit}, {rate / middle:.0%} of the median"
        )
    if slow:
        more = f"{len(slow) - MAX_NAMED} more; " if len(slow) > MAX_NAMED else ""
        exclude = ",".join(dict.fromkeys(each.node for each in slow))
        yield f"  {more}if this persists, set launch.exclude={exclude}"
