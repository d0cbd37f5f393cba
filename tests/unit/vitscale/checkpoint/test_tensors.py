"""Tensor files: the library reads what was written; slices of any layout restore the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from vitscale.checkpoint.catalogue import slice_name
from vitscale.checkpoint.tensors import DTYPES, HostCopy, read_tensors, whole_tensors
from vitscale.distributed.atomic_files import blake3_of_file, write_new_file

CPU = torch.device("cpu")


def taken(
    tensors: dict[str, torch.Tensor], copy: HostCopy | None = None
) -> list[bytes | memoryview]:
    copy = copy or HostCopy(CPU)
    assert copy.prepare(tensors) is None, "nothing to wait for on a CPU"
    return copy.take(tensors)


def test_library_reads_what_was_copied(tmp_path: Path) -> None:
    tensors = {
        f"{kind}.{dtype}": torch.arange(12).reshape(shape).to(dtype)
        for kind, shape in (("a", (3, 4)), ("b", (12,)), ("c", (2, 1, 6)))
        for dtype in DTYPES
    }
    tensors |= {"scalar": torch.tensor(3.0), "none": torch.empty(0, 5)}
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    size, content = write_new_file(tmp_path / "x", taken(tensors))
    assert (size, content) == ((tmp_path / "x").stat().st_size, blake3_of_file(tmp_path / "x"))
    for found in (load_file(tmp_path / "x"), read_tensors([tmp_path / "x"])):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_host_memory_is_reused_and_does_not_alias() -> None:
    copy, weights = HostCopy(CPU), torch.ones(100)
    header, data = taken({"a": weights}, copy)
    weights.zero_()
    assert bytes(data) == bytes(torch.ones(100).numpy().data)
    assert taken({"a": weights}, copy)[1].obj is not None
    address = copy._buffer.data_ptr()
    assert taken({"b": weights}, copy)[0] != header and copy._buffer.data_ptr() == address


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    cuts=st.lists(st.integers(0, 64), max_size=4),
    order=st.randoms(use_true_random=False),
)
def test_slices_of_any_layout_restore_the_tensor(
    shape: list[int], cuts: list[int], order: object
) -> None:
    whole = torch.randn(shape)
    flat = whole.reshape(-1)
    edges = sorted({0, flat.numel(), *(cut for cut in cuts if cut < flat.numel())})
    pieces = [
        (slice_name("model.x", start=start, shape=whole.shape), flat[start:stop])
        for start, stop in zip(edges, edges[1:], strict=False)
    ]
    order.shuffle(pieces)
    found = whole_tensors([*pieces, ("model.y", flat)])
    assert torch.equal(found["model.x"], whole) and found["model.x"].shape == whole.shape
    assert found["model.y"] is flat
    with pytest.raises(AssertionError, match="do not cover"):
        whole_tensors([(slice_name("x", start=0, shape=(flat.numel() + 1,)), flat)])
