"""Measure how gradients reach the optimiser: bytes sent, collectives, memory, and errors.

Run on every rank by zero_worker.py. Bytes are those that the kernel counts on this process's
sockets; gloo sends half of a buffer to reduce-scatter or gather it between two ranks.
"""

from __future__ import annotations

import gc
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from engine_training import whole_state  # type: ignore[import-not-found]  # beside this file
from host_waits import cuda_branches  # type: ignore[import-not-found]  # beside this file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitscale.distributed.world import World, gather_objects
from vitscale.engine.configuration import deepspeed_config
from vitscale.engine.engine import Engine
from vitscale.engine.settings import EngineSettings
from vitscale.models.costs import memory_estimate, num_parameters
from vitscale.models.vit.model import build_model, decayed, layers_above
from vitscale.models.vit.settings import ViTSettings
from vitscale.optim.optimizer import build_optimizer, optimizer_groups
from vitscale.optim.settings import EmaSettings, OptimSettings

TCP_INFO, BYTES_SENT = 11, 200  # linux/tcp.h: tcpi_bytes_sent, tcpi_bytes_retrans
NUM_CLASSES, MICRO_BATCH = 50, 4
BUCKET_ELEMENTS = 100_000
MODEL = ViTSettings(
    image_size=16, patch_size=4, width=96, depth=3, num_heads=4, mlp_width=384,
    num_classes=NUM_CLASSES, head_bias=-10.0, head_std=0.05,
)  # fmt: skip
COLLECTIVES = (
    "all_reduce reduce reduce_scatter_tensor all_gather_into_tensor all_gather broadcast".split()
)


def bytes_sent() -> int:
    """By all TCP sockets of this process so far, without what they had to send again."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as one:
                if one.type == socket.SOCK_STREAM and one.family != socket.AF_UNIX:
                    info = one.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
                    sent, sent_again = struct.unpack_from("<QQ", info, BYTES_SENT)
                    total += sent - sent_again
        except OSError:  # closed meanwhile
            continue
    return total


@contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, int]]]:
    """(name, elements of its largest tensor) of every collective inside the block."""
    found: list[tuple[str, int]] = []

    def recording(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            tensors = [t for t in (*args, *options.values()) if isinstance(t, torch.Tensor)]
            found.append((name, max((t.numel() for t in tensors), default=0)))
            return own(*args, **options)

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, recording(name, getattr(dist, name))))
        yield found


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that are made inside the block and live, each storage once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was made elsewhere, too."""
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if size and key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._remove(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def _remove(self, key: int, size: int) -> None:
        if self._seen.pop(key, None) is not None:
            self.live -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.add(each)
        return result


def build(
    world: World,
    *,
    stage: int,
    accumulation: int,
    optim: OptimSettings,
    dtype: torch.dtype = torch.bfloat16,
    raw: dict[str, Any] | None = None,
    model: ViTSettings = MODEL,
    **settings: Any,
) -> tuple[Engine, dict[str, torch.Tensor]]:
    """An engine, and the fp32 weights it was given."""
    arch = model.architecture(num_classes=NUM_CLASSES)
    vit = build_model(model, arch, seed=0)
    given = {f"model.{name}": value.detach().clone() for name, value in vit.named_parameters()}
    groups = optimizer_groups(
        vit.named_parameters(),
        settings=optim,
        decayed=decayed,
        layers_above=lambda name: layers_above(name, arch),
    )
    settings.setdefault("reduce_bucket_elements", BUCKET_ELEMENTS)
    config = deepspeed_config(
        EngineSettings(zero_stage=stage, **settings),  # type: ignore[arg-type]  # 0 to 3
        micro_batch=MICRO_BATCH,
        accumulation=accumulation,
        world_size=world.world_size,
        largest_parameter=max(each.numel() for each in vit.parameters()),
        clip_norm=None,
        dtype=dtype,
        raw=raw or {},
    )
    optimizer = build_optimizer(groups, settings=optim, device=torch.device("cpu"))
    engine = Engine(
        vit, optimizer=optimizer, optimizer_name=optim.name, config=config, world=world,
        dtype=dtype, mean=(0.5,) * 3, std=(0.5,) * 3, ema=optim.ema,
    )  # fmt: skip
    return engine, given


def gradient_path(
    world: World,
    *,
    stage: int,
    accumulation: int,
    raw: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """One update of SGD at a rate of 1, which is the gradient itself."""
    optim = OptimSettings(name="sgd", lr=1.0, weight_decay=0.0)
    engine, given = build(
        world, stage=stage, accumulation=accumulation, optim=optim, raw=raw, **settings
    )
    before = whole_state(engine)
    count = sum(value.numel() for value in given.values())
    exact: dict[str, torch.Tensor] = {}

    def summing(name: str) -> Callable[[torch.Tensor], None]:
        def add(gradient: torch.Tensor) -> None:
            exact[name] = exact.get(name, torch.zeros(())) + gradient.double()

        return add

    parameters = list(engine._parameters())
    for name, parameter in parameters:
        parameter.register_hook(summing(f"model.{name}"))
    engine.set_learning_rate(1.0)
    random = torch.Generator().manual_seed(world.rank)
    gather_objects(None)
    sent = bytes_sent()
    with recorded_collectives() as collectives:
        for _ in range(accumulation):
            shape = (MICRO_BATCH, 3, 16, 16)
            images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
            labels = torch.randint(0, NUM_CLASSES, (MICRO_BATCH,), generator=random)
            engine.backward(torch.nn.functional.cross_entropy(engine.logits(images), labels))
            engine.step()
    sent = bytes_sent() - sent
    after = whole_state(engine)
    shares = gather_objects(exact)
    errors, sizes = [], []
    for name in given:
        wanted = sum(share[name] for share in shares) / world.world_size
        found = (before[name] - after[name]).double()
        errors.append(found - wanted.view_as(found))
        sizes.append(wanted)
    path = engine.gradient_path
    large = [size for _, size in collectives if size > 1000]
    result = {
        "path": path,
        "sent": [each / count / 2 for each in gather_objects(sent)],
        "collectives": sorted({name for name, size in collectives if size > 1000}),
        "num_collectives": len(large),
        "error": float(_norm(errors) / _norm(sizes)),
    }
    engine.close()
    return result


# Weights outweigh activations.
LARGE = ViTSettings(
    image_size=16, patch_size=8, width=192, depth=4, num_heads=4, mlp_width=768,
    num_classes=NUM_CLASSES,
)  # fmt: skip


def peak_memory(
    world: World,
    *,
    stage: int,
    accumulation: int,
    overlap: bool,
    precision: str = "bf16",
    **settings: Any,
) -> dict[str, float]:
    """Bytes of all tensors in an update, and their estimate, per parameter of the LARGE model."""
    optim, bucket = OptimSettings(lr=1e-3), 400_000
    live = LiveBytes()
    raw = {"zero_optimization": {"overlap_comm": True}} if overlap else {}
    random = torch.Generator().manual_seed(world.rank)
    with cuda_branches() if overlap else nullcontext():
        gc.collect()
        with live:
            engine, _ = build(
                world, stage=stage, accumulation=accumulation, optim=optim, raw=raw, model=LARGE,
                dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
                reduce_bucket_elements=bucket, **settings,
            )  # fmt: skip
            gc.collect()
            for _ in range(2):
                live.peak = live.live
                for _ in range(accumulation):
                    images = torch.randint(0, 256, (1, 3, 16, 16), generator=random)
                    labels = torch.randint(0, NUM_CLASSES, (1,), generator=random)
                    logits = engine.logits(images.to(torch.uint8))
                    engine.backward(torch.nn.functional.cross_entropy(logits, labels))
                    del logits
                    engine.step()
                gc.collect()
    engine.close()
    arch = LARGE.architecture(num_classes=NUM_CLASSES)
    count = num_parameters(arch)
    estimate = memory_estimate(
        arch,
        zero_stage=stage,
        world_size=world.world_size,
        precision=precision,
        micro_batch=1,
        activation_checkpointing=False,
        optimizer_bytes=optim.state_bytes_per_parameter,
        accumulation=accumulation,
        reduces_in_fp32=settings.get("reduce_precision") == "fp32",
        bucket_elements=bucket,
        overlaps=overlap,
    )
    return {"peak": max(gather_objects(live.peak)) / count, "estimate": estimate.total / count}


def full_precision(world: World, *, stage: int) -> dict[str, Any]:
    """bf16: original weights from the start, and the head after a few updates."""
    optim = OptimSettings(lr=1e-3, ema=EmaSettings(decay=0.5))
    engine, given = build(world, stage=stage, accumulation=1, optim=optim)
    started = whole_state(engine)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (MICRO_BATCH, 3, 16, 16), dtype=torch.uint8, generator=random)
    labels = torch.arange(MICRO_BATCH) % NUM_CLASSES
    engine.set_learning_rate(1e-3)
    for _ in range(3):
        logits = engine.logits(images)
        engine.backward(torch.nn.functional.cross_entropy(logits, labels))
        engine.step()
    result: dict[str, Any] = {
        "start_is_exact": all(torch.equal(started[name], given[name]) for name in given),
        "rounding": max(
            (value - value.bfloat16().float()).abs().max().item() for value in given.values()
        ),
        "dtype": str(logits.dtype),
    }
    engine.eval()
    with torch.no_grad():
        result["far"], values = _distance_of_logits(engine, images)
        with engine.averaged():
            result["far_averaged"], _ = _distance_of_logits(engine, images)
    gaps = values.flatten().sort().values.diff()
    result["near"] = values.mean().item()
    result["smallest_gap"] = gaps[gaps > 0].min().item()
    engine.close()
    return result


def _distance_of_logits(engine: Engine, images: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(largest distance from a product with the fp32 weights, logits)."""
    logits, features = engine.logits(images), engine.features(images)
    state = whole_state(engine)  # inside `averaged` the average is in `model`
    wanted = features.float() @ state["model.head.weight"].T + state["model.head.bias"]
    return (logits - wanted).abs().max().item(), logits


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.norm() for tensor in tensors]).norm()
