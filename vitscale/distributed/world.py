"""Join the ranks of a job and exchange small values.

Owns: the environment of launchers (deepspeed, SLURM job, plain python), waiting for all ranks to
start, the process groups, and the small collectives every stage needs.
Leaves out: gradient traffic (`engine`), which uses the default group.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from vitscale.config.errors import EXIT_FAILED, PeerLostError, RankError, StorageError, UserError
from vitscale.distributed.exit import end_now
from vitscale.distributed.processes import free_port, node_name, threads_per_rank

# Longest that ranks wait for the others to start: nodes of large jobs differ by minutes.
INIT_TIMEOUT_MIN = 30.0
HERE, LEFT = "vitscale/here", "vitscale/left"
# The group of the threads that save, see `control_group`.
SAVES = "saves"
# Of a planned end: how long ranks may take until all have left.
LEAVE_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among the processes of the job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    store: dist.Store | None = field(default=None, repr=False, compare=False)
    """The watchdog's connection to the store of rank 0; None for one rank."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def _complete_environment() -> None:
    """Set the variables that the launcher did not; all of them for a plain `python`."""
    env = os.environ
    if "RANK" not in env:
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env.setdefault("MASTER_PORT", str(free_port()))
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise UserError(
            f"RANK is set but {', '.join(missing)} is not",
            where="environment",
            next_step="start through deepspeed, vitscale launch or vitscale launch --local",
        )
    env.setdefault("LOCAL_RANK", "0")
    # The deepspeed launcher says LOCAL_SIZE, torchrun and submitit LOCAL_WORLD_SIZE.
    env.setdefault("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", "1"))


def _pick_device(wanted: Literal["auto", "cuda", "cpu"], local_rank: int) -> torch.device:
    if wanted == "cpu":
        return torch.device("cpu")
    num_gpus = _usable_gpus()
    if wanted == "auto" and not num_gpus:
        return torch.device("cpu")
    if num_gpus == 1 and _sees_one_gpu_of_its_own():
        return torch.device("cuda", 0)
    if local_rank >= num_gpus:
        raise UserError(
            f"local rank {local_rank} has no GPU: torch finds {num_gpus} here",
            where="engine.device",
            next_step="start as many processes per node as it has GPUs, or set engine.device=cpu",
        )
    return torch.device("cuda", local_rank)


def _usable_gpus() -> int:
    """GPUs of this node. Raises UserError for a driver too old for torch, which only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*driver.* too old")
        try:
            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        except UserWarning as warning:
            raise UserError(
                f"torch {torch.__version__} cannot use the GPU: {warning}",
                where="engine.device",
                next_step="update the driver, install a torch for older ones (see "
                "docs/troubleshooting.md), or set engine.device=cpu",
            ) from None


def _sees_one_gpu_of_its_own() -> bool:
    """Whether SLURM shows each task one GPU (`--gpu-bind=single`, `--gpus-per-task=1`)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return "SLURM_PROCID" in os.environ and bool(visible) and "," not in visible


def _interface_to(address: str) -> str | None:
    """The network interface from which this machine reaches another one; None if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((address, 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own in [each.address for each in addresses]:
                return name
    return None


def _choose_interface(world: World) -> None:
    """Let gloo use the network of the route to rank 0, not the one of this node's host name."""
    if world.world_size == world.local_world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = _interface_to(os.environ["MASTER_ADDR"])
    if interface not in (None, "lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        if world.is_first:
            print(f"network of gloo: GLOO_SOCKET_IFNAME={interface}", flush=True)


def _connect(*, is_master: bool, timeout_min: float) -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        timeout=timedelta(minutes=timeout_min),
        wait_for_workers=False,
    )


def _rendezvous(world: World, *, timeout_min: float) -> dist.TCPStore:
    """Wait for every rank at the address that the launcher named; rank 0 listens there.

    The last one sets a key for which all wait: if each waited for every other, the store would
    answer O(N^2) requests.
    Raises PeerLostError, which on rank 0 names the ranks that did not start.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if world.is_first:  # two connections of each rank, which may be more than the usual 1,024
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        store = _connect(is_master=world.is_first, timeout_min=timeout_min)
        store.set(f"{HERE}/{world.rank}", node_name())
        if store.add(HERE, 1) == world.world_size:
            store.set(f"{HERE}/all", "")
    except RuntimeError as error:
        if world.is_first:
            what = f"cannot listen at {address}: {str(error).splitlines()[0]}"
            raise RankError(what, where="MASTER_PORT", next_step="choose a free port") from None
        raise PeerLostError(
            f"rank 0 does not answer at {address} ({timeout_min:g} min)",
            next_step="read the output of rank 0; check that MASTER_ADDR is its node",
        ) from None
    try:
        store.wait([f"{HERE}/all"])
    except RuntimeError as error:
        missing = "rank 0 names the missing"
        if world.is_first:
            ranks = [r for r in range(world.world_size) if not store.check([f"{HERE}/{r}"])]
            missing = f"missing: {', '.join(map(str, ranks))}"
        raise PeerLostError(
            f"not all of {world.world_size} ranks started within {timeout_min:g} min; {missing}",
            next_step="read the output of the missing ranks",
        ) from error
    return store


@contextmanager
def process_group(
    *,
    device: Literal["auto", "cuda", "cpu"],
    timeout_min: float,
    num_threads: int | None,
    init_timeout_min: float = INIT_TIMEOUT_MIN,
) -> Iterator[World]:
    """Join the other ranks inside the block. gloo on CPU, NCCL on GPU.

    timeout_min: for collectives; init_timeout_min: for all ranks to start.
    num_threads: CPU threads of every rank; None: see `threads_per_rank`.
    Raises UserError naming the ranks that did not start.
    """
    _complete_environment()
    # Connects ranks when they first talk: to a few neighbours, not to all others.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    env = os.environ
    local_rank, local_world = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    world = World(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=local_rank,
        local_world_size=local_world,
        device=_pick_device(device, local_rank),
    )
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    _choose_interface(world)
    store = _rendezvous(world, timeout_min=init_timeout_min)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(minutes=timeout_min),
        store=store,
    )
    try:
        if world.world_size > 1:
            # torch holds the first connection while a collective starts.
            world = replace(world, store=_connect(is_master=False, timeout_min=init_timeout_min))
        torch.set_num_threads(
            num_threads
            or threads_per_rank(world_size=world.world_size, local_world_size=local_world)
        )
        yield world
    except SystemExit as end:
        _leave(store, world, exit_code=end.code if isinstance(end.code, int) else EXIT_FAILED)
        raise
    except BaseException:
        # Of several ranks, others may be in a collective, for which NCCL's end would wait.
        if world.world_size == 1:
            dist.destroy_process_group()
        raise
    _leave(store, world, exit_code=0)


def _leave(store: dist.Store, world: World, *, exit_code: int) -> None:
    """At a planned end, which all ranks come to; rank 0 serves the store until then.

    A rank ends with `exit_code` if that takes long: it hangs, or rank 0 or a missing rank does.
    """
    late = threading.Timer(LEAVE_S, end_now, [exit_code])
    late.daemon = True
    late.start()
    dist.destroy_process_group()
    with suppress(RuntimeError):  # rank 0 is gone
        if store.add(LEFT, 1) == world.world_size:
            store.set(f"{LEFT}/all", "")
        if world.is_first:
            store.wait([f"{LEFT}/all"])
    late.cancel()


def control_group(purpose: str, *, timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Make a group for small messages of one thread of every rank; None for one rank. Collective.

    Two threads cannot share a group, since the order of their messages differs between ranks.
    """
    if dist.get_world_size() == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=timeout, group_desc=purpose)
    assert isinstance(group, dist.ProcessGroup)
    # Connect now: gloo connects at the first message, through a store that threads cannot share.
    gather_objects(None, group=group)
    dist.all_reduce(torch.zeros(1), group=group)
    return group


@contextmanager
def errors_on_all_ranks(what: str, where: Path | str) -> Iterator[None]:
    """Raise a UserError of the block on every rank, so that none waits for a failed one.

    Collective. An OSError becomes a StorageError, `where: what (No space left on device)`.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    except OSError as caught:
        error = StorageError(f"{what} ({caught.strerror or caught})", where=str(where))
    errors = gather_objects(error)
    for rank, found in enumerate(errors):
        if found is not None:
            raise found if len(errors) == 1 else type(found)(f"rank {rank}: {found}")


def gather_objects(value: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value` on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def broadcast_tensor(tensor: torch.Tensor, *, source: int) -> None:
    """Overwrite a tensor of every rank with that of rank `source`."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, src=source)


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Elementwise sum over ranks, as a new tensor."""
    total = values.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total


def gather_rows(values_BX: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks [ranks * B, X], in rank order; every rank passes the same shape."""
    gathered = [torch.empty_like(values_BX) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values_BX.contiguous())
    return torch.cat(gathered)
