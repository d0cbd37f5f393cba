"""Join the ranks of a job, whatever launcher started them; exchange small values; stop together."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist

from vitscale.config.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    NodeError,
    PeerLostError,
    RankError,
    StorageError,
    UserError,
    on_node,
    print_note,
    raise_alike,
)
from vitscale.distributed.processes import (
    end_now,
    environment_number,
    free_port,
    launcher_variables,
    node_name,
    threads_per_rank,
)

# Longest that ranks wait for the others to start: nodes of large jobs differ by minutes.
INIT_TIMEOUT_MIN = 30.0
# A rank without a device ends by itself if the others do not start as soon as this.
TELL_S = 20.0
HERE = "vitscale/here"
LEFT = "vitscale/left"
# Keys for the word of each rank about its device, and for the rank that is unlike the others.
DEVICE = "vitscale/device"
ODD_RANK = "vitscale/odd rank"
# The words of a rank that has a device; another one says why it has none.
DEVICE_TYPES = ("cpu", "cuda")
# The group of the threads that save, see `control_group`.
SAVES = "saves"
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
# How long ranks may take at a planned end until all have left. With the seconds that a launcher
# waits before it kills a stopped rank, this must stay well below 20 s.
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


def _read_environment() -> World:
    """This rank, whose device is not chosen yet, as the environment names it.

    Sets the variables that the launcher did not, all of them for a plain `python`.
    Raises UserError for variables that name no rank of a job.
    """
    env = os.environ
    if "RANK" not in env:
        _be_alone()
    missing = [
        name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env
    ]
    if missing:
        raise UserError(
            f"RANK is set but {', '.join(missing)} is not",
            where="environment",
            next_step="start through deepspeed, vitscale launch or vitscale launch --local; for "
            "one process alone: unset RANK",
        )

    env.setdefault("LOCAL_RANK", "0")
    # The deepspeed launcher says LOCAL_SIZE, torchrun and submitit LOCAL_WORLD_SIZE.
    env.setdefault("LOCAL_WORLD_SIZE", env.get("LOCAL_SIZE", "1"))
    environment_number("MASTER_PORT", least=0, most=(1 << 16) - 1)

    world_size = environment_number("WORLD_SIZE", least=1)
    return World(
        rank=environment_number("RANK", least=0, most=world_size - 1),
        world_size=world_size,
        local_rank=environment_number("LOCAL_RANK", least=0),
        local_world_size=environment_number("LOCAL_WORLD_SIZE", least=1),
        device=torch.device("cpu"),
    )


def _be_alone() -> None:
    """Make this process the only rank of its job, and say which variables have no effect."""
    dropped = launcher_variables()
    if dropped:
        text = f"one process without RANK: {', '.join(dropped)} of the environment not used"
        print_note(text)
    for name in dropped:
        del os.environ[name]
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )


def _pick_device(
    wanted: Literal["auto", "cuda", "cpu"], local_rank: int
) -> torch.device:
    if wanted == "cpu":
        return torch.device("cpu")
    # A driver that is too old is only a warning of torch, which would silently use the CPU.
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
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    is_task = "SLURM_PROCID" in os.environ
    # SLURM gave this task GPUs, and torch finds none.
    if not num_gpus and is_task and re.match(r"\d|GPU-|MIG-", given):
        lost = UserError(
            f"SLURM gave this task GPU {given}, and torch finds none",
            where="engine.device",
            next_step="run nvidia-smi on this node",
        )
        raise on_node(lost, rank=int(os.environ.get("RANK", "0")), node=node_name())

    if wanted == "auto" and not num_gpus:
        return torch.device("cpu")
    if num_gpus == 1 and is_task:
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

    # Connecting a datagram socket only looks up the route, and shows this node's address on it.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        own = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if name != "lo" and own in [each.address for each in addresses]:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                if world.is_first:
                    print(f"network of gloo: GLOO_SOCKET_IFNAME={name}", flush=True)


def _connect(
    *, is_master: bool, timeout_s: float = INIT_TIMEOUT_MIN * 60
) -> dist.TCPStore:
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        # Ranks are waited for by keys, since this wait would not say who is missing.
        wait_for_workers=False,
    )


def _join(
    world: World, *, wanted: Literal["auto", "cuda", "cpu"]
) -> tuple[torch.device, dist.TCPStore]:
    """Pick the device of this rank; wait for the others, which must have one of the same type.

    Raises UserError if no rank has the device, and NodeError on all ranks if one is unlike them.
    """
    problem: UserError | None = None
    fault: NodeError | None = None
    device = torch.device("cpu")
    try:
        device = _pick_device(wanted, world.local_rank)
        word = device.type
    except UserError as error:
        if world.world_size == 1:
            raise
        problem = error
        fault = on_node(problem, rank=world.rank, node=node_name())
        word = str(fault)
        # Now, since a launcher may end this rank before the others answer.
        print_note(f"asking the other ranks: {fault}")

    try:
        timeout_s = INIT_TIMEOUT_MIN * 60 if fault is None else TELL_S
        store = _rendezvous(world, word=word, timeout_s=timeout_s)
        odd = _odd_rank_of_all(store, world)
    except RankError:
        if fault is None:
            raise
        # Unless all ranks lack it, another node may help.
        raise fault from None

    raised = odd or problem
    if raised is not None:
        # Rank 0 keeps the store until all ranks have read the answer.
        _leave_store(store, world)
        raise raised
    return device, store


def _odd_rank_of_all(store: dist.TCPStore, world: World) -> NodeError | None:
    """The error about the first rank whose device is unlike that of the others. Collective.

    Rank 0 alone reads what all say: else the store would answer O(N^2) requests.
    """
    try:
        if world.is_first:
            words = store.multi_get(
                [f"{DEVICE}/{rank}" for rank in range(world.world_size)]
            )
            odd = odd_rank([word.decode() for word in words])
            store.set(ODD_RANK, "" if odd is None else str(odd))
        answer = store.get(ODD_RANK).decode()
        if not answer:
            return None
        rank = int(answer)
        word = store.get(f"{DEVICE}/{rank}").decode()
        node = store.get(f"{HERE}/{rank}").decode()
    except RuntimeError as error:
        raise PeerLostError("rank 0 has ended at its start") from error

    if word in DEVICE_TYPES:
        word = (
            f"rank {rank} on {node}: engine.device=auto is {word} here, and not on all ranks\n"
            f"  next: run nvidia-smi on {node}"
        )
    return NodeError(word, rank=rank, node=node)


def odd_rank(words: Sequence[str]) -> int | None:
    """The first rank without a device, or of the rarer type; None if all ranks are alike.

    words: of each rank, one of DEVICE_TYPES, or why it has no device.
    """
    without = [rank for rank, word in enumerate(words) if word not in DEVICE_TYPES]
    if without:
        if len(without) < len(words):
            return without[0]
        return None
    counts = Counter(words)
    # If both are equally many, those without a GPU are odd: cpu comes before cuda.
    rarest = min(counts, key=lambda word: (counts[word], word))
    if len(counts) > 1:
        return words.index(rarest)
    return None


def _rendezvous(world: World, *, word: str, timeout_s: float) -> dist.TCPStore:
    """Wait for every rank at the address that the launcher named; rank 0 listens there.

    word: what this rank says of its device.
    The last one sets a key for which all wait: if each waited for every other, the store would
    answer O(N^2) requests.
    Raises PeerLostError, which on rank 0 names the ranks that did not start.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = f"{timeout_s / 60:g} min"

    # Rank 0 has two connections of each rank, and any rank may open the checkpoint files of all.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        store = _connect(is_master=world.is_first, timeout_s=timeout_s)
        store.set(f"{HERE}/{world.rank}", node_name())
        store.set(f"{DEVICE}/{world.rank}", word)
        # The last rank to come opens the door for all.
        if store.add(HERE, 1) == world.world_size:
            store.set(f"{HERE}/all", "")
    except RuntimeError as error:
        if world.is_first:
            what = f"cannot listen at {address}: {str(error).splitlines()[0]}"
            step = "choose a free port"
            raise RankError(what, where="MASTER_PORT", next_step=step) from None
        raise PeerLostError(
            f"rank 0 does not answer at {address} ({limit})",
            next_step="read the output of rank 0; check that MASTER_ADDR is its node",
        ) from None

    try:
        store.wait([f"{HERE}/all"])
    except RuntimeError as error:
        missing = "rank 0 names the missing"
        if world.is_first:
            # Rank 0 alone looks for the missing ranks: all ranks would send O(N^2) requests.
            ranks = map(str, range(world.world_size))
            absent = [rank for rank in ranks if not store.check([f"{HERE}/{rank}"])]
            missing = f"missing: {', '.join(absent)}"
        raise PeerLostError(
            f"not all of {world.world_size} ranks started within {limit}; {missing}",
            next_step="read the output of the missing ranks",
        ) from error
    return store


@contextmanager
def process_group(
    *,
    device: Literal["auto", "cuda", "cpu"],
    timeout_min: float,
    num_threads: int | None,
) -> Iterator[World]:
    """Join the other ranks inside the block. gloo on CPU, NCCL on GPU.

    timeout_min: for collectives. num_threads: CPU threads of a rank; None: `threads_per_rank`.
    Raises UserError for a device that no rank has, NodeError for one that not all have, and
    PeerLostError naming the ranks that did not start.
    """
    world = _read_environment()
    # Connects ranks when they first talk: to a few neighbours, not to all others.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _choose_interface(world)
    own_device, store = _join(world, wanted=device)

    world = replace(world, device=own_device)
    backend = "gloo"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "cpu:gloo,cuda:nccl"

    dist.init_process_group(
        backend,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(minutes=timeout_min),
        store=store,
    )
    try:
        if world.world_size > 1:
            # torch holds the first connection while a collective starts.
            world = replace(world, store=_connect(is_master=False))
        if num_threads is None:
            num_threads = threads_per_rank(
                world_size=world.world_size, local_world_size=world.local_world_size
            )
        torch.set_num_threads(num_threads)
        yield world
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_FAILED
        _leave(store, world, exit_code=code)
        raise
    except BaseException:
        # Other ranks may be in a collective, for which NCCL's end would wait.
        if world.world_size == 1:
            dist.destroy_process_group()
        raise
    _leave(store, world, exit_code=0)


def _leave(store: dist.Store, world: World, *, exit_code: int) -> None:
    """At a planned end, which all ranks come to.

    A rank ends with `exit_code` if that takes long: it hangs, or rank 0 or a missing rank does.
    """
    late = threading.Timer(LEAVE_S, end_now, [exit_code])
    # A daemon, so that the timer itself does not keep the process.
    late.daemon = True
    late.start()
    dist.destroy_process_group()
    _leave_store(store, world)
    late.cancel()


def _leave_store(store: dist.Store, world: World) -> None:
    """Say that this rank needs the store no more; rank 0 serves it until all have said so."""
    with suppress(RuntimeError):  # rank 0 is gone, or another rank will not come
        if store.add(LEFT, 1) == world.world_size:
            store.set(f"{LEFT}/all", "")
        if world.is_first:
            store.wait([f"{LEFT}/all"], timedelta(seconds=LEAVE_S))


def control_group(
    purpose: str, *, timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
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
    """Stop all ranks at the same step after SIGUSR2 (SLURM's warning), SIGTERM or Ctrl-C to any of
    them. A second Ctrl-C ends its rank at once.

    When step S ends, the ranks begin to reduce one byte, in the background; they read it when step
    S + 1 ends. So all read the same at the same step, and none waits for another in between.

    Inside the block the signals only set a flag. Once the ranks stop, they stay ignored after it:
    they would kill a rank whose checkpoint is committed while it closes its files.
    """

    def __init__(self) -> None:
        """Collective."""
        self._received = self._interrupted = self._stops = False
        self._group = control_group("stop")
        self._flag = torch.zeros(1, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def __enter__(self) -> PreemptionFlag:
        self._previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in self._previous.items():
            # Background jobs of a shell ignore Ctrl-C.
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        stops = self._received or self._stops
        for number, handler in self._previous.items():
            if not stops:
                signal.signal(number, handler)
            elif number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)

    def _remember(self, number: int, _: object) -> None:
        if number == signal.SIGINT:
            # The first one asks for an orderly stop; the second means that it takes too long.
            if self._interrupted:
                end_now(EXIT_INTERRUPTED)
            self._interrupted = True
        self._received = True

    def set_on_any_rank(self) -> bool:
        """Whether all ranks stop now. To be called once a step on every rank.

        Set one or two calls after a signal; a single rank stops at once.
        """
        # No other rank needs to agree.
        if self._group is None:
            self._stops = self._stops or self._received
            return self._stops
        if self._work is not None:
            # The last step's reduction has had a whole step to finish, so this wait is short.
            self._work.wait()
            self._stops = self._stops or bool(self._flag)

        self._flag = torch.tensor([self._received], dtype=torch.uint8)
        self._work = dist.all_reduce(
            self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return self._stops


@contextmanager
def errors_on_all_ranks(
    what: str, where: Path | str, *, tried: bool = True
) -> Iterator[None]:
    """Raise an error of the block on every rank, so that none waits for a failed one.

    tried: whether the block does anything on this rank. A UserError of all ranks that tried stays
    one; that of some becomes a NodeError.
    Collective. An OSError becomes a StorageError, `where: what (No space left on device)`.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as caught:
        error = caught
    except OSError as caught:
        error = StorageError(f"{what} ({caught.strerror or caught})", where=where)

    reports = gather_objects((node_name(), tried, error))
    nodes, tries, errors = zip(*reports, strict=True)
    raise_alike(errors, nodes=nodes, num_tried=sum(tries))


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


def max_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum over ranks, as a new tensor."""
    largest = value.clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        # The losses of all ranks depend on the values of this one.
        return sum_over_ranks(gradients[0])


def sum_with_gradients(values: torch.Tensor) -> torch.Tensor:
    """Elementwise sum over ranks; the gradient of a value is that of the sum of all ranks' losses.

    Collective, and so is its backward pass. torch's own counterpart is deprecated.
    """
    total: torch.Tensor = _Sum.apply(values)
    return total


def gather_with_gradients(own_NE: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks [ranks * N, E], in rank order; gradients as in `sum_with_gradients`.

    Every rank must have N rows.
    """
    rows_RNE = own_NE.new_zeros(dist.get_world_size(), *own_NE.shape)
    # Each row is one rank's and zero on all others, so the sum is exact.
    rows_RNE[dist.get_rank()] = own_NE
    return sum_with_gradients(rows_RNE).flatten(0, 1)
