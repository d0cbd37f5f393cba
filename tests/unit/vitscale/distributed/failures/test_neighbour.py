"""A neighbour that ends before it is looked at for the first time."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vitscale.distributed.failures import neighbour
from vitscale.distributed.failures.neighbour import KEY, Neighbour, _address


class Store:
    def __init__(self, address: str) -> None:
        self.address = address

    def check(self, keys: list[str]) -> bool:
        return keys == [f"{KEY}/1"]

    def get(self, key: str) -> bytes:
        return self.address.encode()


def neighbour_at(address: str) -> Neighbour:
    world: Any = SimpleNamespace(store=Store(address), rank=0, local_rank=0, local_world_size=2)
    found = Neighbour(world)
    assert found.needs_address and not found.is_gone()
    found.read_address()
    assert not found.needs_address
    return found


@pytest.fixture
def process() -> Any:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_it_is_gone_whenever_it_ended(process: Any) -> None:
    address = _address(process.pid)
    watched = neighbour_at(address)
    assert not watched.is_gone()
    process.kill()
    process.wait()
    assert watched.is_gone()
    late = neighbour_at(address)
    assert late.is_gone()
    for each in (watched, late):
        each.forget()
        assert not each.is_gone()


def test_a_process_elsewhere_is_not_gone(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address = _address(process.pid)
    process.kill()
    process.wait()
    monkeypatch.setattr(neighbour, "node_identity", lambda: "another node")
    assert not neighbour_at(address).is_gone()
