"""Time training steps on a device, compare loops, measure the rate of matrix products.

Owns: clocks, running loops in turn, bootstrap intervals, the reference rate of model FLOP/s, and
the state of the GPU.
Leaves out: the loops (`steps`).
"""

from __future__ import annotations

import gc
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from vitscale.models.vit.architecture import ViTArchitecture
from vitscale.training.meters import peak_flops

MATMUL_SIDE = 8192
MAX_DRIFT = 0.05
CARD_FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
Step = Callable[[int], torch.Tensor]
Clock = Callable[[Callable[[], object]], float]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that the device needs for what `work` enqueues; synchronises at both ends only."""
    synchronize(device)
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def start_afresh(device: torch.device) -> None:
    """Free the memory of the previous loops, and their compiled code.

    torch keeps few compiled variants per function: without this, later models would run uncompiled.
    """
    gc.collect()
    if device.type == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def no_waits(device: torch.device, *, bounds_memory: bool = False) -> Iterator[None]:
    """On a GPU raise RuntimeError where anything inside waits for it.

    bounds_memory: allow waiting for events, by which ZeRO 3 limits what it fetches ahead.
    """
    if device.type != "cuda":
        yield
        return

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("synchronizes the device")

    mode = torch.cuda.get_sync_debug_mode()
    with ExitStack() as stack:
        # The debug mode finds reading and copying, not explicit calls.
        stack.enter_context(patch.object(torch.cuda, "synchronize", refuse))
        kinds: tuple[type, ...] = (torch.cuda.Event, torch.cuda.Stream)
        for kind in kinds[bounds_memory:]:
            stack.enter_context(patch.object(kind, "synchronize", refuse))
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def warm_up(
    step: Step, *, steps: int, device: torch.device, deadline: float | None = None
) -> tuple[float, float]:
    """Run `steps` steps. Seconds of the first, which compiles, and the first loss.

    Ends early once `deadline` (time.monotonic) is passed.
    """
    start = time.perf_counter()
    first = float(step(0))
    first_s = time.perf_counter() - start
    for number in range(1, steps):
        step(number)
        if deadline is not None:
            synchronize(device)
            if time.monotonic() > deadline:
                break
    synchronize(device)
    return first_s, first


def interleaved(
    steps: Mapping[str, Step],
    *,
    blocks: int,
    steps_per_block: int,
    device: torch.device,
    start: int,
    deadline: float | None = None,
    clock: Clock | None = None,
) -> dict[str, list[float]]:
    """Seconds per step of each loop and block: A B C, C B A, A B C, ...

    Ends after the block in which `deadline` (time.monotonic) is passed. clock: another way to
    take the time of the steps than `seconds_of`.
    """
    clock = clock or (lambda work: seconds_of(work, device))
    found: dict[str, list[float]] = {name: [] for name in steps}
    numbers = dict.fromkeys(steps, start)
    for block in range(blocks):
        for name in sorted(steps, reverse=block % 2 == 1):

            def several(name: str = name) -> None:
                for _ in range(steps_per_block):
                    steps[name](numbers[name])
                    numbers[name] += 1

            found[name].append(clock(several) / steps_per_block)
        if deadline is not None and time.monotonic() > deadline:
            break
    return found


def ratio(over: Sequence[float], under: Sequence[float], *, draws: int = 2000) -> dict[str, float]:
    """Median of the blocks' ratios over / under, with a 95 % bootstrap interval over blocks."""
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    rng = random.Random(0)
    medians = sorted(median(rng.choices(pairs, k=len(pairs))) for _ in range(draws))
    low, high = medians[int(0.025 * draws)], medians[int(0.975 * draws)]
    return {"median": median(pairs), "low": low, "high": high, "blocks": len(pairs)}


def product_rate(m: int, k: int, n: int, *, device: torch.device, seconds: float = 0.2) -> float:
    """FLOP/s of [m, k] x [k, n] on random numbers: bf16 on a GPU, fp32 on a CPU.

    Five groups of products, the median of them; as many products as take about `seconds`.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=dtype, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    products(3)
    one = seconds_of(lambda: products(3), device) / 3
    count = max(1, int(seconds / 5 / one))
    groups = [seconds_of(lambda: products(count), device) / count for _ in range(5)]
    return 2 * m * k * n / median(groups)


def matmul_rate(device: torch.device, *, side: int = MATMUL_SIDE) -> float:
    """Rate of a square product, on a GPU that has worked for a second: a cool one is faster."""
    if device.type == "cuda":
        product_rate(side, side, side, device=device, seconds=1.0)
    return product_rate(side, side, side, device=device)


def drift(before: float, after: float) -> dict[str, Any]:
    """Two readings of one rate. `rejected`: too far apart for what was measured between them."""
    change = after / before - 1
    return {
        "before": before,
        "after": after,
        "drift": change,
        "rejected": abs(change) > MAX_DRIFT,
        "rate": (before + after) / 2,
    }


def product_shapes(arch: ViTArchitecture, *, batch: int) -> dict[str, tuple[int, int, int]]:
    """(m, k, n) of a block's products: QKV, projection, MLP; each forward and both gradients."""
    rows, d, a, m = batch * arch.num_train_tokens, arch.width, arch.attention_width, arch.mlp_width
    shapes = {}
    for name, (inner, outer) in {
        "qkv": (d, 3 * a),
        "projection": (a, d),
        "mlp in": (d, m),
        "mlp out": (m, d),
    }.items():
        shapes[f"{name} forward"] = (rows, inner, outer)
        shapes[f"{name} input gradient"] = (rows, outer, inner)
        shapes[f"{name} weight gradient"] = (outer, rows, inner)
    return shapes


def shape_rates(
    arch: ViTArchitecture,
    *,
    batch: int,
    device: torch.device,
    seconds: float,
    deadline: float | None = None,
) -> dict[str, float]:
    """FLOP/s of each product of a block, and of `all`: their FLOPs over the sum of their times.

    Without `all` if `deadline` (time.monotonic) was passed.
    """
    found: dict[str, float] = {}
    flops = spent = 0.0
    shapes = product_shapes(arch, batch=batch)
    for name, (m, k, n) in shapes.items():
        if deadline is not None and time.monotonic() > deadline:
            return found
        found[name] = product_rate(m, k, n, device=device, seconds=seconds / len(shapes))
        flops += 2.0 * m * k * n
        spent += 2.0 * m * k * n / found[name]
    return found | {"all": flops / spent}


def copy_rates(device: torch.device, *, mib: int) -> dict[str, float]:
    """Bytes/s: within the device (read and written counted), from it to pinned memory, and back."""
    num = mib * 2**20
    a, b = (torch.empty(num, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.empty(num, dtype=torch.uint8, pin_memory=device.type == "cuda")
    found = {}
    for name, target, source, times in (
        ("device", a, b, 2),
        ("to_host", host, a, 1),
        ("from_host", a, host, 1),
    ):
        target.copy_(source)
        best = min(seconds_of(lambda: target.copy_(source), device) for _ in range(5))  # noqa: B023  # runs at once
        found[name] = times * num / best
    return found


def card_state() -> dict[str, str] | None:
    """Clocks, power and temperature by the driver; None without a driver."""
    command = ["nvidia-smi", f"--query-gpu={CARD_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [value.strip() for value in done.stdout.splitlines()[:1] for value in value.split(",")]
    if done.returncode or len(values) != len(CARD_FIELDS.split(",")):
        return None
    return dict(zip(CARD_FIELDS.split(","), values, strict=True))


def utilisation(
    *, images_per_s: float, flops_per_image: int, rate: float, device: torch.device
) -> dict[str, float | None]:
    """Model FLOP/s over the measured rate and over the datasheet's."""
    flops, datasheet = images_per_s * flops_per_image, peak_flops(device)
    return {
        "model_tflops": flops / 1e12,
        "of_matmul": flops / rate,
        "of_datasheet": None if datasheet is None else flops / datasheet,
    }


def falls(losses: Iterable[float], first: float) -> bool:
    """Whether the last losses are below the first one."""
    tail = list(losses)[-5:]
    return median(tail) < first
