"""Tensor files: the library reads them; a rank reads the ranges it needs of any layout."""

import os
from pathlib import Path
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
WHOLE = torch.arange(60.0).view(3, 20)


def taken(
    tensors: dict[str, torch.Tensor], copy: HostCopy | None = None
) -> list[bytes | memoryview]:
    copy = copy or HostCopy(CPU)
    copy.prepare(tensors)
    return copy.take(tensors)


def test_library_reads_what_was_copied(tmp_path):
    tensors = {
        f"{kind}.{dtype}": torch.arange(12).reshape(shape).to(dtype)
        for kind, shape in (("a", (3, 4)), ("b", (12,)), ("c", (2, 1, 6)))
        for dtype in DTYPES
    }
    tensors |= {"scalar": torch.tensor(3.0), "none": torch.empty(0, 5)}
    tensors["turned"] = torch.arange(6.0).reshape(2, 3).T
    size, content = write_new_file(tmp_path / "x", taken(tensors))
    assert size == (tmp_path / "x").stat().st_size
    assert content == blake3_of_file(tmp_path / "x")
    for found in (load_file(tmp_path / "x"), read_tensors([tmp_path / "x"])):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


def test_pinned_memory_has_the_size_of_the_copy(monkeypatch):
    """Pinned by the CUDA runtime, as long as the buffer lives."""
    pinned = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: pinned.update({address: size}) or 0,
        cudaHostUnregister=pinned.pop,
    )
    stream = SimpleNamespace(record_event=lambda: None)
    given = {
        "cudart": runtime,
        "check_error": None,
        "Stream": stream,
        "current_stream": stream,
    }
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    copy = HostCopy(torch.device("cuda"))
    copy.prepare({"a": torch.ones(250)})
    assert pinned == {copy._buffer.data_ptr(): 1000}
    del copy
    assert not pinned


def test_host_memory_is_reused_and_does_not_alias():
    copy = HostCopy(CPU)
    weights = torch.ones(100)
    header, data = taken({"a": weights}, copy)
    weights.zero_()
    assert bytes(data) == bytes(torch.ones(100).numpy().data)
    assert taken({"a": weights}, copy)[1].obj is not None
    address = copy._buffer.data_ptr()
    assert taken({"b": weights}, copy)[0] != header
    assert copy._buffer.data_ptr() == address


def write(folder: Path, cuts: list[int]) -> list[Path]:
    """Slices of WHOLE, one file each; the last file also has a whole tensor."""
    edges = sorted({0, *cuts, WHOLE.numel()})
    paths = []
    for number, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        paths.append(folder / f"rank-{number:05d}.safetensors")
        name = slice_name("model.w", start=start, shape=WHOLE.shape)
        tensors = {name: WHOLE.flatten()[start:stop].clone()}
        save_file(
            tensors | ({"ema.b": torch.ones(2, 2)} if stop == 60 else {}), paths[-1]
        )
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
    slices = [
        each for path in reversed(write(folder, cuts)) for each in read_header(path)
    ]
    counts = []
    preadv = os.preadv
    with SavedTensors(slices) as saved, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            os, "preadv", lambda *values: counts.append(preadv(*values)) or counts[-1]
        )
        part = saved.part("model.w", start, count)
        assert torch.equal(part, WHOLE.flatten()[start : start + count])
        assert sum(counts) == 4 * count, "no byte more than needed"
        assert torch.equal(saved.whole("ema.b"), torch.ones(2, 2))
        assert torch.equal(saved.whole("model.w"), WHOLE)
    first = next(each for each in slices if each.name == "model.w" and each.start == 0)
    extra = first._replace(start=59, num_elements=2)
    with (
        SavedTensors([extra]) as gap,
        pytest.raises(AssertionError, match="do not cover"),
    ):
        gap.whole("model.w")
