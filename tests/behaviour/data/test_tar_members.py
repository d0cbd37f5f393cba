"""Tars are read to their last byte, and headers that are hostile end in a defect, not in a hang."""

import gzip
import io
import sys
import tarfile
from pathlib import Path

import pytest
import webdataset

from tests.support.corpora.external_tars import tar_bytes, write_tars
from tests.support.corpora.shard_folders import photo
from tests.support.corpora.sources import listed, opened
from tests.support.tables import refused
from vitscale.data import webdataset as stream
from vitscale.data.tar_members import TarDefect, members

BLOCK = 512


def samples(first: int, num: int) -> bytes:
    """A tar of samples, padded as by GNU tar to 20 blocks."""
    stored = range(first, first + num)
    return tar_bytes(
        {f"{n}.{kind}": b"%d" % (n % 2) for n in stored for kind in ("jpg", "cls")}
    )


def unpadded(tar: bytes) -> bytes:
    """The same without the zeros behind its members."""
    whole = tar.rstrip(b"\0")
    return whole + bytes(-len(whole) % BLOCK)


A = samples(0, 3)
B = samples(10, 2)
END = bytes(2 * BLOCK)


def members_of(content: bytes) -> tuple[list[str], str]:
    """Names of the members, and the defect behind them."""
    names = []
    try:
        for member in members(io.BytesIO(content)):
            names.append(member.name)
    except TarDefect as defect:
        return names, str(defect)
    return names, ""


def names_by_tarfile(content: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(content), ignore_zeros=True) as tar:
        return tar.getnames()


JOINED = {
    "two": A + B,
    "three": A + B + samples(20, 1),
    "end marks alone": unpadded(A) + END + unpadded(B) + END,
    "three zero blocks": unpadded(A) + END + bytes(BLOCK) + B,
    "much padding": A + bytes(3 << 20) + B,
    "no end mark between": unpadded(A) + B,
    "an empty one first": END + A,
    "an empty one last": A + bytes(20 * BLOCK),
    "PAX": tar_bytes({f"{'d' * 200}/1.jpg": b"1"}, format=tarfile.PAX_FORMAT) + B,
}


@pytest.mark.parametrize("content", JOINED.values(), ids=JOINED)
def test_tars_that_were_joined_are_read_to_the_end(content, tmp_path):
    assert members_of(content) == (names_by_tarfile(content), "")

    # As one file of a source, as the tar of a class in a larger tar, and as a stream.
    expected = [name for name in names_by_tarfile(content) if name.endswith(".jpg")]
    write_tars(tmp_path / "all", {"all.tar": {"cat.tar": content, "dog.tar": A}})
    (tmp_path / "train-0.tar").write_bytes(content)
    for kind, path in (("webdataset", "train-0.tar"), ("class_tars", "all/all.tar")):
        rows = listed(opened(kind, tmp_path / path))
        kept = [row.path for row in rows if row.reason != "other_name"]
        names = [path.partition(".tar/")[2].removeprefix("cat.tar/") for path in kept]
        assert [name for name in names if "dog.tar" not in name] == expected
    read = [
        f"{key}.jpg"
        for _, key, _, _ in stream._samples_of(tmp_path / "train-0.tar", num_classes=0)
    ]
    assert read == expected


def test_a_tar_of_tars_that_were_joined_has_all_classes(tmp_path):
    (tmp_path / "all.tar").write_bytes(
        tar_bytes({"cat.tar": A}) + tar_bytes({"dog.tar": B})
    )
    source = opened("class_tars", tmp_path / "all.tar")
    assert [box.class_name for box in source.containers()] == ["cat", "dog"]


BEHIND = {
    "text": b"a note\n",
    "compressed": gzip.compress(B),
    "cut header": B[:300],
    "noise, aligned": b"\x01" * BLOCK,
    "not aligned": b"\0" * 100 + B,
    "cut member": unpadded(B)[:700],
    "no second end mark": unpadded(B) + bytes(BLOCK),
}


@pytest.mark.parametrize("tail", BEHIND.values(), ids=BEHIND)
def test_other_bytes_behind_the_end_mark_are_a_defect(tail, tmp_path):
    (tmp_path / "train-0.tar").write_bytes(A + tail)
    rows = listed(opened("webdataset", tmp_path))
    assert [row.name for row in rows if row.reason is None][:3] == ["0", "1", "2"]
    assert [row.reason for row in rows][-1] == "truncated_tar"
    with refused(r"train-0\.tar: cannot be read"):
        list(stream._samples_of(tmp_path / "train-0.tar", num_classes=0))


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header of any size, as GNU tar stores numbers that octal digits cannot hold."""
    info = tarfile.TarInfo(name)
    info.type = kind
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % (1 << 88)).to_bytes(
        11, "big"
    )
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def pax(records: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("pax", len(records), kind) + records + bytes(-len(records) % BLOCK)


ONE = header("a.jpg", 5) + b"12345".ljust(BLOCK, b"\0")
SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
HOSTILE = {
    "back to itself": header("b.txt", -BLOCK),
    "back to the first": header("b.txt", -3 * BLOCK),
    "back a little": header("b.txt", -1),
    "a negative image": header("b.jpg", -BLOCK),
    "beyond the end": header("b.jpg", 1 << 40),
    "beyond all numbers": header("b.jpg", 1 << 80),
    "an unknown kind beyond the end": header("b.jpg", 1 << 40, b"Z"),
    "a long name of 2^60 bytes": header("b", 1 << 60, tarfile.GNUTYPE_LONGNAME),
    "a negative long name": header("b", -5 * BLOCK, tarfile.GNUTYPE_LONGNAME),
    "PAX records of 2^60 bytes": header("b", 1 << 60, tarfile.XHDTYPE),
    "global records of 2^60 bytes": header("b", 1 << 60, tarfile.XGLTYPE),
    "a negative size in PAX": pax(b"17 size=-00001024\n") + ONE,
    "text for a size in PAX": pax(b"12 size=abc\n") + ONE,
    "records that are none": pax(b"x" * 100) + ONE,
    "digits without end": pax(b"1" * 200_000) + ONE,
    "a sparse map that is cut": pax(SPARSE) + header("b.jpg", 10),
    "a sparse map of text": pax(SPARSE) + header("b.jpg", 10) + b"text" * 128,
    "names of names": header("b", 0, tarfile.GNUTYPE_LONGNAME)
    * (sys.getrecursionlimit() + 9),
    "no name after a long one": header("b", 5, tarfile.GNUTYPE_LONGNAME)
    + b"12345".ljust(BLOCK),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers_end_in_a_row(content, tmp_path):
    (tmp_path / "train-0.tar").write_bytes(
        ONE + content + ONE.replace(b"a.jpg", b"z.jpg")
    )
    for kind in ("webdataset", "class_tars"):
        rows = listed(opened(kind, tmp_path, {"values": "none"}))
        assert "train-0.tar/a.jpg" in {row.path for row in rows if row.reason is None}
        assert rows[-1].reason == "truncated_tar"
        assert len(rows) < 5
    with refused("cannot be read"):
        list(stream._samples_of(tmp_path / "train-0.tar", num_classes=0))


def test_a_stream_gives_what_stock_webdataset_gives(tmp_path):
    kinds = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    for number, format in enumerate(kinds):
        stored = {
            "a.jpg": photo(1),
            f"{'é' * 20}/x.PNG": photo(2),
            ".cache/imgs/y.jpg": photo(3),
            ".cache/imgs/y.cls": b"4",
            "__meta__": b"",
            "z.txt": b"caption",
            "z.webp": photo(4),
        }
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes(stored, format=format))
        url = str(tmp_path / f"{number}.tar")
        expected = {
            each["__key__"]: next(
                each[kind] for kind in stream.IMAGE_SUFFIXES if kind in each
            )
            for each in webdataset.WebDataset(url, shardshuffle=False)
            if set(each) & set(stream.IMAGE_SUFFIXES)
        }
        found = {
            key: image
            for _, key, image, _ in stream._samples_of(Path(url), num_classes=0)
        }
        assert found == expected


def test_a_file_with_holes_is_passed_over(tmp_path):
    """GNU tar's sparse files claim more bytes than they have in the tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        stored = b"1\n0\n5\n".ljust(BLOCK, b"\0") + b"12345"
        info = tarfile.TarInfo("holes.jpg")
        info.size = len(stored)
        info.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "holes.jpg",
            "GNU.sparse.realsize": str(1 << 30),
        }
        tar.addfile(info, io.BytesIO(stored))
        tar.addfile(tarfile.TarInfo("last.jpg"))
    found = list(members(io.BytesIO(buffer.getvalue())))
    assert [(each.name, each.is_file) for each in found] == [
        ("holes.jpg", False),
        ("last.jpg", True),
    ]
