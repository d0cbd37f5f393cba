from __future__ import annotations

import gzip
import io
import lzma
import os
import random
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from data_prep.shards.tar_walk import (
    BLOCK,
    CompressedTar,
    TarDefect,
    TarMember,
    walk_tar,
)
from tests.support.corpora.tars import tar_bytes

FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def header(name: bytes, kind: bytes, *, size: int = 0) -> bytes:
    info = tarfile.TarInfo("x")
    info.size, info.type = size, kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[-BLOCK:])
    block[:100] = name.ljust(100, b"\0")
    return signed(block)


def signed(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def walk(data: bytes, *, start: int = 0, end: int | None = None) -> list[TarMember]:
    members, defect = walk_until_defect(data, start=start, end=end)
    if defect is not None:
        raise defect
    return members


def walk_until_defect(
    data: bytes, *, start: int = 0, end: int | None = None
) -> tuple[list[TarMember], TarDefect | None]:
    members: list[TarMember] = []
    fd = os.memfd_create("tar")
    try:
        os.write(fd, data)
        for member in walk_tar(fd, start=start, end=len(data) if end is None else end):
            members.append(member)
    except TarDefect as defect:
        return members, defect
    finally:
        os.close(fd)
    return members, None


@pytest.mark.parametrize("format", FORMATS)
def test_members_and_offsets_equal_those_of_tarfile(format: int) -> None:
    files = {"a.jpg": b"1" * 700, "sub/" + "n" * 90 + ".png": b"", "ü/2.jpg": bytes(512)}
    if format != tarfile.USTAR_FORMAT:
        files |= {"long/" * 60 + "x.jpg": b"22", "ü" * 300: b"3"}
    files |= {"p" * 60 + "/" + "q" * 80: b"4" * 1025}
    data = tar_bytes(files, format=format)
    expected = [
        (info.name, info.offset_data, info.size)
        for info in tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8")
    ]
    members = walk(data)
    assert [(m.name, m.offset, m.num_bytes) for m in members] == expected
    assert {m.name: data[m.offset :][: m.num_bytes] for m in members} == files
    assert {m.kind for m in members} == {"file"}


@pytest.mark.parametrize("format", FORMATS[1:])
def test_truncation_is_detected_and_keeps_earlier_members(format: int) -> None:
    files = {"a.jpg": b"1" * 700, "l" * 300 + ".jpg": b"2" * 512, "c.jpg": b"", "d.jpg": b"4"}
    data = tar_bytes(files, format=format)
    whole = walk(data)
    end_of_members = whole[-1].offset + BLOCK
    assert len(data) > end_of_members + 2 * BLOCK
    for cut in range(len(data) + 1):
        members, defect = walk_until_defect(data[:cut])
        assert (defect is None) == (cut >= end_of_members + 2 * BLOCK), cut
        assert members == [m for m in whole if m.offset + m.num_bytes <= cut and m in members]
        if defect is None:
            assert members == whole
        complete = [m for m in whole if m.offset + m.num_bytes <= cut]
        assert members == complete, cut


def test_a_tar_inside_a_tar_is_read_in_place() -> None:
    inner = tar_bytes({"x.jpg": b"inner bytes"})
    data = tar_bytes({"before": b"0" * 99, "n01.tar": inner, "after": b"1"})
    box = walk(data)[1]
    (member,) = walk(data, start=box.offset, end=box.offset + box.num_bytes)
    assert data[member.offset :][: member.num_bytes] == b"inner bytes"
    for cut in range(2 * BLOCK + 2 * BLOCK):
        assert walk_until_defect(data, start=box.offset, end=box.offset + cut)[1] is not None


def test_members_other_than_files_have_their_kind() -> None:
    kinds = {b"1": "link", b"2": "link", b"3": "special", b"4": "special", b"5": "folder"}
    kinds |= {b"6": "special", b"7": "file", b"\0": "file", b"0": "file", b"D": "special"}
    data = b"".join(header(b"n" + kind.strip(b"\0"), kind) for kind in kinds) + bytes(1024)
    assert [m.kind for m in walk(data)] == list(kinds.values())
    (old_folder,) = walk(header(b"folder/", b"\0") + bytes(1024))
    assert old_folder.kind == "folder"


def test_names_are_unchanged() -> None:
    names = ["/abs.jpg", "../up.jpg", "a/../../b", "./dot", "new\nline", "a//b", "\udcff.jpg"]
    assert [m.name for m in walk(tar_bytes(dict.fromkeys(names, b"")))] == names


def test_sparse_files_are_detected_and_skipped() -> None:
    old = bytearray(header(b"old", b"S", size=600))
    old[482] = 1
    more = bytearray(BLOCK)
    more[504] = 1
    end = tar_bytes({"z.jpg": b"z"})
    data = signed(old) + bytes(more) + bytes(BLOCK) + b"s" * 600 + bytes(424) + end
    sparse, last = walk(data)
    assert (sparse.kind, last.name) == ("sparse", "z.jpg")
    assert data[sparse.offset :][: sparse.num_bytes] == b"s" * 600
    for cut in range(BLOCK, 4 * BLOCK, 100):
        assert walk_until_defect(data[:cut])[1] is not None
    pax = b"30 GNU.sparse.name=real/x.jpg\n"
    data = header(b"pax", b"x", size=len(pax)) + pax.ljust(BLOCK, b"\0") + end
    assert [(m.name, m.kind) for m in walk(data)] == [("real/x.jpg", "sparse")]


def test_concatenated_tars_are_a_defect() -> None:
    data = tar_bytes({"a": b"1"})
    members, defect = walk_until_defect(data + data)
    assert len(members) == 1 and "after the end mark" in str(defect)


def test_compression_methods_are_named() -> None:
    data = tar_bytes({"a": b"1"})
    for packed, method in [
        (gzip.compress(data), "gzip"),
        (lzma.compress(data), "xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "zstd"),
        (b"\x1f\x8b", "gzip"),
    ]:
        with pytest.raises(CompressedTar, match=f"compressed with {method}"):
            walk(packed)


def test_random_damage_only_raises_tar_defects() -> None:
    rng = random.Random(0)
    wholes = [
        tar_bytes(
            {f"{i}.jpg": bytes([i]) * (300 * i) for i in range(4)} | {"l" * 200: b"x"}, format=form
        )
        for form in FORMATS[1:]
    ]
    longest = max(map(len, wholes))
    tracemalloc.start()
    for _ in range(1500):
        data = bytearray(rng.choice(wholes))
        for _ in range(rng.randint(1, 8)):
            # Mostly at the start, where headers are.
            data[rng.randrange(rng.choice([BLOCK, 3000, len(data)]))] = rng.randrange(256)
        if rng.random() < 0.5:  # fix the checksums, so that damaged fields are read
            for place in range(0, len(data) - BLOCK, BLOCK):
                if data[place + 257 : place + 262] == b"ustar":
                    data[place : place + BLOCK] = signed(data[place : place + BLOCK])
        members, _ = walk_until_defect(bytes(data))
        assert all(0 <= m.offset <= m.offset + m.num_bytes <= len(data) for m in members)
        places = [m.offset for m in members]
        assert places == sorted(set(places))
    assert tracemalloc.get_traced_memory()[1] < 40 * longest
    tracemalloc.stop()


def test_pipes_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    fd = os.open(tmp_path / "a.tar", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError):
        list(walk_tar(fd, end=1024))
    os.close(fd)
