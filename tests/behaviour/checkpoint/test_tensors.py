"""Tensor files: the library reads them; a rank reads the ranges it needs of any layout."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vitscale.checkpoint.store import (
    DTYPES,
    HostCopy,
    SavedTensors,
    read_header,
    read_tensors,
    slice_name,
)
from vitscale.distributed.atomic_files import blake3_of_file, write_new_file

CPU = torch.device("cpu")
# Three rows of twenty, each element its own number.
WHOLE = torch.arange(60.0).view(3, 20)


def copied(tensors, copy=None):
    """The content of a tensor file: a header, then the copied bytes."""
    copy = copy or HostCopy(CPU)
    copy.prepare(tensors)
    return copy.take(tensors)


def test_library_reads_what_was_copied(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 5),
        # Not contiguous: its bytes are not in the order of its elements.
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    for shape in ((3, 4), (12,), (2, 1, 6)):
        for dtype in DTYPES:
            tensors[f"{shape} {dtype}"] = torch.arange(12).reshape(shape).to(dtype)
    path = tmp_path / "x"
    size, content = write_new_file(path, copied(tensors))
    assert size == path.stat().st_size
    assert content == blake3_of_file(path)

    # The library's reader, and ours.
    for stored in (load_file(path), read_tensors([path])):
        assert stored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert stored[name].dtype == tensor.dtype
            assert torch.equal(stored[name], tensor)


def test_pinned_memory_has_the_size_of_the_copy(monkeypatch):
    """Pinned by the CUDA runtime, as long as the buffer lives."""
    pinned = {}

    def register(address, size, _):
        pinned[address] = size
        return 0

    # A runtime that writes down what it is told.
    stream = SimpleNamespace(record_event=lambda: None)
    replaced = {
        "cudart": SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=pinned.pop,
        ),
        "check_error": None,
        "Stream": stream,
        "current_stream": stream,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    copy = HostCopy(torch.device("cuda"))
    copy.prepare({"a": torch.ones(250)})

    # 250 numbers of four bytes.
    assert pinned == {copy._buffer.data_ptr(): 1000}
    del copy
    assert not pinned


def test_host_memory_is_reused_and_does_not_alias():
    copy = HostCopy(CPU)
    weights = torch.ones(100)
    header, data = copied({"a": weights}, copy)

    # What the update changes now is not in the copy.
    weights.zero_()
    assert bytes(data) == bytes(torch.ones(100).numpy().data)
    _, data = copied({"a": weights}, copy)
    assert data.obj is not None

    # Another tensor of this size needs another header and no other memory.
    address = copy._buffer.data_ptr()
    other_header, _ = copied({"b": weights}, copy)
    assert other_header != header
    assert copy._buffer.data_ptr() == address


def write(folder, cuts):
    """Slices of WHOLE, one file each; the last file also has a whole tensor."""
    edges = sorted({0, *cuts, WHOLE.numel()})
    paths = []
    for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        name = slice_name("model.w", start=start, shape=WHOLE.shape)
        tensors = {name: WHOLE.flatten()[start:stop].clone()}
        if stop == WHOLE.numel():
            tensors["ema.b"] = torch.ones(2, 2)
        path = folder / f"rank-{number:05d}.safetensors"
        save_file(tensors, path)
        paths.append(path)
    return paths


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 59), max_size=8),
    start=st.integers(0, 59),
    count=st.integers(1, 60),
)
def test_any_range_is_read_from_any_layout(tmp_path_factory, cuts, start, count):
    folder = tmp_path_factory.mktemp("layout")
    count = min(count, 60 - start)

    # The files in any order: only their headers say what they hold.
    slices = []
    for path in reversed(write(folder, cuts)):
        slices += read_header(path)

    counts = []
    preadv = os.preadv

    def counted(*arguments):
        num_read = preadv(*arguments)
        counts.append(num_read)
        return num_read

    with SavedTensors(slices) as saved, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", counted)
        part = saved.part("model.w", start, count)
        assert torch.equal(part, WHOLE.flatten()[start : start + count])
        assert sum(counts) == 4 * count, "no byte more than needed"
        assert torch.equal(saved.whole("ema.b"), torch.ones(2, 2))
        assert torch.equal(saved.whole("model.w"), WHOLE)

    # A file is missing: the last two elements alone are no tensor.
    of_tensor = (piece for piece in slices if piece.name == "model.w")
    first = next(piece for piece in of_tensor if piece.start == 0)
    extra = first._replace(start=59, num_elements=2)
    gap = SavedTensors([extra])
    with gap, pytest.raises(AssertionError, match="do not cover"):
        gap.whole("model.w")
