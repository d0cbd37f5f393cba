"""Join the ranks of a job, whatever launcher started them; exchange small values; stop together."""

from __future__ import annotations

import os
import resource
import signal
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
from vitscale.distributed.processes import end_now, free_port, node_name, threads_per_rank

# Longest that ranks wait for the others to start: nodes of large jobs differ by minutes.
INIT_TIMEOUT_MIN = 30.0
HERE, LEFT = "vitscale/here", "vitscale/left"
# The group of the threads that save, see `control_group`.
SAVES = "saves"
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
# Of a planned end: how long ranks may take until all have left. With the seconds that a launcher
# waits before it kills a rank that was stopped, well below 20 s.
LEAVE_S = 10.0


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
    """Set the variables that the launcher did not, all of them for a plain `python`."""
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
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*driver.* too old")
        try:
            num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except UserWarning as warning:
            raise UserError(
                f"torch {torch.__version__} cannot use the GPU: {warning}",
                where="engine.device",
                next_step="update the driver, install a torch for older ones (see "
                "docs/troubleshooting.md), or set engine.device=cpu",
            ) from None
    if wanted == "auto" and not num_gpus:
        return torch.device("cpu")
    if num_gpus == 1 and "SLURM_PROCID" in os.environ:
        return torch.device("cuda", 0)  # each task sees its own (`--gpu-bind=single`)
    if local_rank >= num_gpus:
        raise UserError(
            f"local rank {local_rank} has no GPU: torch finds {num_gpus} here",
            where="engine.device",
            next_step="start as many processes per node as it has GPUs, or set engine.device=cpu",
        )
    return torch.device("cuda", local_rank)


def _choose_interface(world: World) -> None:
    """Let gloo use the network of the route to rank 0, not the one of this node's host name."""
    if world.world_size == world.local_world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if name != "lo" and own in [each.address for each in addresses]:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                if world.is_first:
                    print(f"network of gloo: GLOO_SOCKET_IFNAME={name}", flush=True)


def _connect(*, is_master: bool) -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        timeout=timedelta(minutes=INIT_TIMEOUT_MIN),
        wait_for_workers=False,
    )


def _rendezvous(world: World) -> dist.TCPStore:
    """Wait for every rank at the address that the launcher named; rank 0 listens there.

    The last one sets a key for which all wait: if each waited for every other, the store would
    answer O(N^2) requests.
    Raises PeerLostError, which on rank 0 names the ranks that did not start.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # Rank 0 has two connections of each rank, and any rank may open the checkpoint files of all.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        store = _connect(is_master=world.is_first)
        store.set(f"{HERE}/{world.rank}", node_name())
        if store.add(HERE, 1) == world.world_size:
            store.set(f"{HERE}/all", "")
    except RuntimeError as error:
        if world.is_first:
            what = f"cannot listen at {address}: {str(error).splitlines()[0]}"
            raise RankError(what, where="MASTER_PORT", next_step="choose a free port") from None
        raise PeerLostError(
            f"rank 0 does not answer at {address} ({INIT_TIMEOUT_MIN:g} min)",
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
            f"not all of {world.world_size} ranks started within {INIT_TIMEOUT_MIN:g} min; "
            f"{missing}",
            next_step="read the output of the missing ranks",
        ) from error
    return store


@contextmanager
def process_group(
    *, device: Literal["auto", "cuda", "cpu"], timeout_min: float, num_threads: int | None
) -> Iterator[World]:
    """Join the other ranks inside the block. gloo on CPU, NCCL on GPU.

    timeout_min: for collectives. num_threads: CPU threads of a rank; None: `threads_per_rank`.
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
    store = _rendezvous(world)
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
            world = replace(world, store=_connect(is_master=False))
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


class PreemptionFlag:
    """Stop all ranks at the same step after SIGUSR2 (SLURM's warning) or SIGTERM to any of them.

    When step S ends, the ranks begin to reduce one byte, in the background; they read it when step
    S + 1 ends. So all read the same at the same step, and none waits for another in between.

    Inside the block the signals only set a flag. Once the ranks stop, they stay ignored after it:
    they would kill a rank whose checkpoint is committed while it closes its files.
    """

    def __init__(self) -> None:
        """Collective."""
        self._received = self._stops = False
        self._group = control_group("stop")
        self._flag = torch.zeros(1, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def __enter__(self) -> PreemptionFlag:
        self._previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._received or self._stops else handler)

    def _remember(self, *_: object) -> None:
        self._received = True

    def set_on_any_rank(self) -> bool:
        """Whether all ranks stop now. To be called once a step on every rank.

        Set one or two calls after a signal; a single rank stops at once.
        """
        if self._group is None:
            self._stops = self._stops or self._received
            return self._stops
        if self._work is not None:
            self._work.wait()
            self._stops = self._stops or bool(self._flag)
        self._flag = torch.tensor([self._received], dtype=torch.uint8)
        self._work = dist.all_reduce(
            self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return self._stops


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
