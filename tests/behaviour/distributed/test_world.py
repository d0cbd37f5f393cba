"""The device and the signals of one rank; several ranks are in tests/scripts/training."""

import os
import signal
import socket
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml

from tests.support.ranks.thread_ranks import world_of
from tests.support.tables import every, refused, rows
from tests.support.waiting import PATIENCE_S
from vitscale.config.errors import NodeError, UserError
from vitscale.distributed import world as world_module
from vitscale.distributed.processes import LAUNCHER_VARIABLES, free_port, node_name
from vitscale.distributed.world import (
    STOP_SIGNALS,
    PreemptionFlag,
    _choose_interface,
    _join,
    _pick_device,
    _read_environment,
    process_group,
)


def _see_gpus(monkeypatch, visible, *, in_slurm):
    """Pretend a machine with these GPUs, inside a task of SLURM or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if in_slurm:
        monkeypatch.setenv("SLURM_PROCID", "3")


def test_a_rank_takes_its_own_gpu(monkeypatch):
    """`--gpu-bind=single` shows every task another GPU, each as number 0."""
    _see_gpus(monkeypatch, "3", in_slurm=True)
    assert _pick_device("auto", 3) == torch.device("cuda", 0)

    # Every task sees all GPUs of its node: each takes its own.
    _see_gpus(monkeypatch, "0,1,2,3", in_slurm=True)
    assert _pick_device("auto", 3) == torch.device("cuda", 3)

    # Two ranks on one GPU would run, at half the speed.
    _see_gpus(monkeypatch, "0", in_slurm=False)
    with refused("local rank 1 has no GPU: torch finds 1"):
        _pick_device("auto", 1)


def test_a_driver_too_old_for_torch_is_an_error(monkeypatch):
    """torch only warns, and a training on the CPU would go on for weeks."""

    def is_available():
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old",
            stacklevel=1,
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _pick_device("auto", 0).type == "cpu"

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    for device in ("auto", "cuda"):
        with refused("driver on your system is too old"):
            _pick_device(device, 0)  # type: ignore[arg-type]  # a literal
    assert _pick_device("cpu", 0).type == "cpu"


def test_a_gpu_that_slurm_gave_and_torch_does_not_find_is_a_fault_of_the_node(
    monkeypatch,
):
    """Also if all ranks have lost theirs: the node may be the only one of the job."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("RANK", "3")
    message = f"rank 3 on {node_name()}.*gave this task GPU"
    for given in ("0", "0,1", "GPU-8932f937", "MIG-7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        for device in ("auto", "cuda"):
            with pytest.raises(NodeError, match=message):
                _pick_device(device, 0)  # type: ignore[arg-type]  # a literal

        # Who asks for the CPU needs no GPU.
        assert _pick_device("cpu", 0).type == "cpu"
    # Nothing was given, or it is hidden on purpose.
    for given in ("", "NoDevFiles", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert _pick_device("auto", 0).type == "cpu"


# ---- devices of several ranks --------------------------------------------------------------------


def join_all(monkeypatch, devices):
    """The device type or the error of each rank, a thread; None: a rank without its GPU."""

    def pick(_, rank):
        device = devices[rank]
        if device is None:
            raise UserError(f"local rank {rank} has no GPU", where="engine.device")
        return torch.device(device)

    num_ranks = len(devices)

    def join(rank):
        world = world_of(rank, num_ranks)
        try:
            device, store = _join(world, wanted="auto")

            # Rank 0 serves the store until all have their answer, as in a process group.
            world_module._leave_store(store, world)
            return device.type
        except UserError as error:
            return error.with_traceback(None)  # which would keep the store

    monkeypatch.setattr(world_module, "_pick_device", pick)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(join, range(num_ranks)))


@every(devices="[cpu, cpu, cpu], [cuda, cuda]")
def test_ranks_with_devices_of_one_type_join(monkeypatch, devices):
    assert join_all(monkeypatch, devices) == devices


# Which rank is unlike most of the others, and what it says.
@rows("""
- [devices, odd, text]
- [[cuda, cuda, null], 2, local rank 2 has no GPU]
- [[null, cuda, cuda], 0, local rank 0 has no GPU]
- [[cuda, null, null], 1, local rank 1 has no GPU]
- [[cuda, cpu, cuda], 1, engine.device=auto is cpu here]
- [[cpu, cuda, cuda], 0, engine.device=auto is cpu here]
- [[cpu, cpu, cuda], 2, engine.device=auto is cuda here]
# Of as many on both sides, it is the one on the CPU, or without its GPU.
- [[cuda, cpu], 1, engine.device=auto is cpu here]
- [[cuda, null, cuda, null], 1, local rank 1 has no GPU]
- [[null, cpu], 0, local rank 0 has no GPU]
""")
def test_every_rank_names_the_one_whose_device_is_unlike_the_others(
    monkeypatch, devices, odd, text
):
    """One that trained on the CPU would be waited for in the first collective of the GPUs."""
    node = node_name()
    for error in join_all(monkeypatch, devices):
        assert type(error) is NodeError
        assert error.rank == odd
        assert error.node == node
        message = str(error)
        assert f"rank {odd} on {node}: " in message
        assert text in message


def test_a_device_that_no_rank_has_is_bad_input(monkeypatch):
    errors = join_all(monkeypatch, [None] * 3)
    for rank, error in enumerate(errors):
        assert type(error) is UserError
        assert str(error) == f"engine.device: local rank {rank} has no GPU"


@every(rank="0, 5")
def test_a_rank_without_its_gpu_says_so_though_no_other_starts(
    monkeypatch, capfd, rank
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(world_module, "TELL_S", 0.5)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    message = f"rank {rank} on {node_name()}: .*has no GPU"
    with pytest.raises(NodeError, match=message):
        _join(world_of(rank, 8), wanted="cuda")

    # Before it waits for them, in which a launcher may end it.
    assert f"local rank {rank} has no GPU" in capfd.readouterr().err


# ---- what the environment says -------------------------------------------------------------------


# What a shell may still have from another job; the address is one that nobody has (RFC 5737).
STALE = yaml.safe_load("""
MASTER_ADDR: 192.0.2.1
MASTER_PORT: "29511"
WORLD_SIZE: "64"
LOCAL_RANK: "7"
LOCAL_WORLD_SIZE: "8"
LOCAL_SIZE: "8"
GLOO_SOCKET_IFNAME: ib7
NCCL_SOCKET_IFNAME: ib7
NCCL_COMM_ID: "192.0.2.1:29511"
""")


# All of them, one alone, some without the others, and none.
@every(names=[[*STALE], ["MASTER_ADDR"], ["MASTER_PORT", "WORLD_SIZE"], []])
def test_a_process_without_a_launcher_is_alone_whatever_the_shell_says(
    monkeypatch, capsys, names
):
    # A variable that launchers set and this test forgets would stay.
    assert {*STALE} == {*LAUNCHER_VARIABLES}
    environment = {name: STALE[name] for name in names}
    monkeypatch.setattr(os, "environ", environment)
    _read_environment()
    port = int(environment.pop("MASTER_PORT"))
    assert environment == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }

    # The port is free.
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))

    # What was ignored is said, where no program reads it as a result.
    output, messages = capsys.readouterr()
    assert output == ""
    listed = messages.removeprefix("one process without RANK: ")
    listed, _, _ = listed.partition(" of the environment")
    assert sorted(filter(None, listed.split(", "))) == sorted(names)


def test_a_launcher_is_obeyed(monkeypatch, capsys):
    given = {**STALE, "RANK": "9"}
    monkeypatch.setattr(os, "environ", dict(given))
    _read_environment()
    assert os.environ == given
    assert capsys.readouterr().err == ""


# Empty, no number, outside the world, a digit of Unicode; then the address of a service.
@rows("""
- [changes, name]
- [{RANK: ''}, RANK]
- [{RANK: one}, RANK]
- [{RANK: '-1'}, RANK]
- [{RANK: '64'}, RANK]
- [{RANK: ²}, RANK]
- [{WORLD_SIZE: '0'}, WORLD_SIZE]
- [{WORLD_SIZE: ''}, WORLD_SIZE]
- [{LOCAL_RANK: x}, LOCAL_RANK]
- [{MASTER_PORT: 'tcp://10.0.0.1:29500'}, MASTER_PORT]
- [{MASTER_PORT: '65536'}, MASTER_PORT]
""")
def test_variables_that_name_no_rank_are_one_error(monkeypatch, changes, name):
    """A container's orchestrator sets some of them for services of the same name."""
    monkeypatch.setattr(os, "environ", {**STALE, "RANK": "9", **changes})
    with refused(f"(?s)^{name}: is .*unset RANK") as caught:
        _read_environment()
    assert repr(changes[name]) in str(caught.value)


def test_gloo_takes_the_network_of_the_route_to_the_first_rank(monkeypatch):
    # Two interfaces with this address: the loopback is not the network of other nodes.
    address = SimpleNamespace(address="127.0.0.1")
    interfaces = {"lo": [address], "ib0": [address]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    world = world_of(1, 2, per_node=1)
    for host, interface in (("nowhere.invalid", None), ("127.0.0.1", "ib0")):
        monkeypatch.setattr(os, "environ", {"MASTER_ADDR": host})
        _choose_interface(world)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_a_stop_that_hangs_keeps_its_exit_code(monkeypatch):
    """With 0, the job would count as done."""
    ended = threading.Event()
    codes = []
    leave = dist.destroy_process_group

    def end(code):
        codes.append(code)
        ended.set()

    # Leaving waits for a peer that is gone.
    def hang():
        ended.wait(PATIENCE_S)
        leave()

    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(world_module, "LEAVE_S", 0.1)
    monkeypatch.setattr(world_module, "end_now", end)
    monkeypatch.setattr(dist, "destroy_process_group", hang)
    with pytest.raises(SystemExit):
        with process_group(device="cpu", timeout_min=1, num_threads=1):
            raise SystemExit(75)
    assert codes == [75]


# One rank, and the signal handlers of pytest again afterwards.
@pytest.fixture
def handlers(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_handlers_are_restored_without_a_stop():
    previous = [signal.getsignal(number) for number in STOP_SIGNALS]
    with PreemptionFlag() as stop:
        assert not stop.set_on_any_rank()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == previous


@pytest.mark.usefixtures("handlers")
@every(number=STOP_SIGNALS)
def test_repeated_stop_signal_is_ignored(number):
    with PreemptionFlag() as stop:
        os.kill(os.getpid(), number)
        assert stop.set_on_any_rank()

    # While the checkpoint is written, SLURM may send another one.
    for again in (signal.SIGTERM, signal.SIGUSR2):
        assert signal.getsignal(again) is signal.SIG_IGN
        os.kill(os.getpid(), again)


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_ends_the_rank(monkeypatch):
    """Also while it closes its files; a background job ignores all of them."""
    ended = []
    monkeypatch.setattr(world_module, "end_now", ended.append)
    with PreemptionFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.set_on_any_rank()
        assert not ended
    os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]

    # Started in the background, where the shell has the signal ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with PreemptionFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert not stop.set_on_any_rank()


@pytest.mark.usefixtures("handlers")
def test_a_late_signal_is_ignored_where_another_rank_had_the_first(monkeypatch):
    """SLURM sends them to one rank after the other; all stop by the first."""

    def reduced(flag, *_, **__):
        flag.fill_(1)  # of the other rank
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", reduced)
    with PreemptionFlag() as stop:
        stop._group = SimpleNamespace()  # type: ignore[assignment]  # of two ranks
        answers = [stop.set_on_any_rank() for _ in range(2)]

    # The sum is asked for without waiting, so the answer comes a step later.
    assert answers == [False, True]
    for number in (signal.SIGTERM, signal.SIGUSR2):
        assert signal.getsignal(number) is signal.SIG_IGN
