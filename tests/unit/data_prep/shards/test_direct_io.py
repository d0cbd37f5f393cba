"""Bytes on their way to the disk: whole, in order, seen once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.shards import direct_io
from data_prep.shards.direct_io import BlockFile

BUFFER = 16 << 10
PIECES = st.lists(st.tuples(st.integers(0, BUFFER), st.booleans()), max_size=30)


def write(path: Path, pieces: list[tuple[int, bool]]) -> tuple[bytes, bytes]:
    """(what was given, what was seen); pieces are appended, or filled in place."""
    given_bytes, seen = bytearray(), bytearray()
    file = BlockFile(path, observe=lambda view: seen.extend(view))
    try:
        for i, (size, in_place) in enumerate(pieces):
            piece = bytes([i % 251 + 1]) * size
            assert file.num_bytes == len(given_bytes)
            if in_place:
                file.reserve(size)[:] = piece
                file.advance(size)
            else:
                file.append(piece)
            given_bytes += piece
        file.finish()
    finally:
        file.close()
    return bytes(given_bytes), bytes(seen)


@settings(deadline=None, max_examples=50)
@given(PIECES)
def test_the_file_holds_the_pieces_and_each_byte_was_seen_once(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("file") / "file"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "BUFFER_BYTES", BUFFER)
        expected, seen = write(path, pieces)
    assert path.read_bytes() == expected == seen


def test_without_direct_writing_the_bytes_are_the_same(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "BUFFER_BYTES", BUFFER)
    pieces = [(5000, True), (BUFFER, False), (700, True)] * 9
    expected, _ = write(tmp_path / "direct", pieces)
    assert write(small_disk / "file", pieces)[0] == expected
    monkeypatch.setattr(direct_io, "O_DIRECT", 0)
    write(tmp_path / "cached", pieces)
    # As where a file system takes the flag and then refuses what is written with it.
    monkeypatch.setattr(direct_io, "O_DIRECT", getattr(os, "O_DIRECT", 0))
    monkeypatch.setattr(direct_io, "ALIGNMENT", 100)
    write(tmp_path / "refused", pieces)
    for path in (tmp_path / "direct", tmp_path / "cached", tmp_path / "refused"):
        assert path.read_bytes() == expected


def test_what_the_disk_refuses_is_raised_by_the_end(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "file", observe=lambda view: None)
    os.close(file._file)
    file._file = os.open(tmp_path / "file", os.O_RDONLY)
    file.append(b"x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.finish()
    file.close()


def test_finished_file_is_flushed_at_its_full_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(direct_io.os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_size))
    write(tmp_path / "file", [(700, True)])
    assert flushed == [700]
