"""Tars are read to their last byte, and headers that are hostile end in a defect, not in a hang."""

import gzip
import io
import sys
import tarfile

import webdataset

from tests.support.corpora.external_tars import tar_bytes, write_tars
from tests.support.corpora.shard_folders import photo
from tests.support.corpora.sources import listed, opened
from tests.support.tables import every, refused
from vitscale.data import webdataset as stream
from vitscale.data.tar_members import TarDefect, members

BLOCK = 512


def samples(first: int, num: int) -> bytes:
    """A tar of samples, padded as by GNU tar to 20 blocks."""
    members = {}
    for number in range(first, first + num):
        data = b"%d" % (number % 2)
        members |= {f"{number}.jpg": data, f"{number}.cls": data}
    return tar_bytes(members)


def unpadded(tar: bytes) -> bytes:
    """The same without the zeros behind its members."""
    whole = tar.rstrip(b"\0")
    return whole + bytes(-len(whole) % BLOCK)


A = samples(0, 3)
B = samples(10, 2)

# Two blocks of zeros end a tar; more may follow as padding.
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
    # Python's own reader, told to go on behind an end mark.
    with tarfile.open(fileobj=io.BytesIO(content), ignore_zeros=True) as tar:
        return tar.getnames()


# As `cat a.tar b.tar` makes them, and as other programs end or pad what they append.
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


@every(name=JOINED)
def test_tars_that_were_joined_are_read_to_the_end(name, tmp_path):
    content = JOINED[name]
    assert members_of(content) == (names_by_tarfile(content), "")

    expected = [name for name in names_by_tarfile(content) if name.endswith(".jpg")]

    # As one file of a source, and as the tar of a class in a larger tar.
    stream_path = tmp_path / "train-0.tar"
    stream_path.write_bytes(content)
    write_tars(tmp_path / "all", {"all.tar": {"cat.tar": content, "dog.tar": A}})
    for kind, path in (
        ("webdataset", stream_path),
        ("class_tars", tmp_path / "all/all.tar"),
    ):
        names = []
        for row in listed(opened(kind, path)):
            _, _, name = row.path.partition(".tar/")
            if row.reason != "other_name" and "dog.tar" not in name:
                names.append(name.removeprefix("cat.tar/"))
        assert names == expected

    # As a stream, which joins the members of a sample.
    samples_read = stream._samples_of(stream_path, num_classes=0)
    assert [f"{key}.jpg" for _, key, _, _ in samples_read] == expected


def test_a_tar_of_tars_that_were_joined_has_all_classes(tmp_path):
    path = tmp_path / "all.tar"
    path.write_bytes(tar_bytes({"cat.tar": A}) + tar_bytes({"dog.tar": B}))
    source = opened("class_tars", path)
    assert [box.class_name for box in source.containers()] == ["cat", "dog"]


# Behind a sound end: what is no tar, and tars that were cut or lost their alignment.
BEHIND = {
    "text": b"a note\n",
    "compressed": gzip.compress(B),
    "cut header": B[:300],
    "noise, aligned": b"\x01" * BLOCK,
    "not aligned": b"\0" * 100 + B,
    "cut member": unpadded(B)[:700],
    "no second end mark": unpadded(B) + bytes(BLOCK),
}


@every(tail=BEHIND)
def test_other_bytes_behind_the_end_mark_are_a_defect(tail, tmp_path):
    path = tmp_path / "train-0.tar"
    path.write_bytes(A + BEHIND[tail])

    # The samples before the defect are kept, and the last row says what came then.
    rows = listed(opened("webdataset", tmp_path))
    kept = [row.name for row in rows if row.reason is None]
    assert kept[:3] == ["0", "1", "2"]
    assert rows[-1].reason == "truncated_tar"

    # Training has no ledger: it stops.
    with refused(r"train-0\.tar: cannot be read"):
        list(stream._samples_of(path, num_classes=0))


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header of any size, as GNU tar stores numbers that octal digits cannot hold."""
    info = tarfile.TarInfo(name)
    info.type = kind
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    # Base 256: a first byte that marks the sign, then eleven bytes of the number.
    sign = b"\xff" if size < 0 else b"\x80"
    raw[124:136] = sign + (size % (1 << 88)).to_bytes(11, "big")

    # The checksum counts its own field as spaces.
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def pax(records: bytes) -> bytes:
    # Records of PAX are the content of a member of their own, padded to whole blocks.
    return (
        header("pax", len(records), tarfile.XHDTYPE)
        + records
        + bytes(-len(records) % BLOCK)
    )


# A sound member, which comes before and after each of the hostile ones.
ONE = header("a.jpg", 5) + b"12345".ljust(BLOCK, b"\0")
SPARSE = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"

HOSTILE = {
    # Offsets that lead back would be read for ever.
    "back to itself": header("b.txt", -BLOCK),
    "back to the first": header("b.txt", -3 * BLOCK),
    "back a little": header("b.txt", -1),
    "a negative image": header("b.jpg", -BLOCK),
    # Sizes that no file has: seeking there succeeds, and so does reading nothing.
    "beyond the end": header("b.jpg", 1 << 40),
    "beyond all numbers": header("b.jpg", 1 << 80),
    "an unknown kind beyond the end": header("b.jpg", 1 << 40, b"Z"),
    # Names and records are read into memory.
    "a long name of 2^60 bytes": header("b", 1 << 60, tarfile.GNUTYPE_LONGNAME),
    "a negative long name": header("b", -5 * BLOCK, tarfile.GNUTYPE_LONGNAME),
    "PAX records of 2^60 bytes": header("b", 1 << 60, tarfile.XHDTYPE),
    "global records of 2^60 bytes": header("b", 1 << 60, tarfile.XGLTYPE),
    # PAX repeats the size as text, which may be anything.
    "a negative size in PAX": pax(b"17 size=-00001024\n") + ONE,
    "text for a size in PAX": pax(b"12 size=abc\n") + ONE,
    "records that are none": pax(b"x" * 100) + ONE,
    "digits without end": pax(b"1" * 200_000) + ONE,
    "a sparse map that is cut": pax(SPARSE) + header("b.jpg", 10),
    "a sparse map of text": pax(SPARSE) + header("b.jpg", 10) + b"text" * 128,
    # A reader that calls itself for the next header runs out of calls.
    "names of names": header("b", 0, tarfile.GNUTYPE_LONGNAME)
    * (sys.getrecursionlimit() + 9),
    "no name after a long one": header("b", 5, tarfile.GNUTYPE_LONGNAME)
    + b"12345".ljust(BLOCK),
}


@every(name=HOSTILE)
def test_hostile_headers_end_in_a_row(name, tmp_path):
    path = tmp_path / "train-0.tar"
    last = ONE.replace(b"a.jpg", b"z.jpg")
    path.write_bytes(ONE + HOSTILE[name] + last)
    for kind in ("webdataset", "class_tars"):
        rows = listed(opened(kind, tmp_path, {"values": "none"}))
        kept = {row.path for row in rows if row.reason is None}
        assert "train-0.tar/a.jpg" in kept
        assert rows[-1].reason == "truncated_tar"

        # A reader that goes round would list its members again and again.
        assert len(rows) < 5
    with refused("cannot be read"):
        list(stream._samples_of(path, num_classes=0))


def test_a_stream_gives_what_stock_webdataset_gives(tmp_path):
    kinds = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
    for number, format in enumerate(kinds):
        stored = {
            "a.jpg": photo(1),
            # Letters beyond ASCII, upper case, and hidden folders.
            f"{'é' * 20}/x.PNG": photo(2),
            ".cache/imgs/y.jpg": photo(3),
            ".cache/imgs/y.cls": b"4",
            # Metadata and a caption, which are no samples by themselves.
            "__meta__": b"",
            "z.txt": b"caption",
            "z.webp": photo(4),
        }
        path = tmp_path / f"{number}.tar"
        path.write_bytes(tar_bytes(stored, format=format))

        # Of each sample with an image, its first one.
        expected = {}
        for sample in webdataset.WebDataset(str(path), shardshuffle=False):
            images = [kind for kind in stream.IMAGE_SUFFIXES if kind in sample]
            if images:
                expected[sample["__key__"]] = sample[images[0]]

        samples_read = stream._samples_of(path, num_classes=0)
        assert {key: image for _, key, image, _ in samples_read} == expected


def test_a_file_with_holes_is_passed_over(tmp_path):
    """GNU tar's sparse files claim more bytes than they have in the tar."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer,
        mode="w",
        format=tarfile.PAX_FORMAT,
    ) as tar:
        # The map of the holes comes before the bytes that are there.
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

    # It is no file whose bytes could be taken, and the next member is found behind it.
    buffer.seek(0)
    holes, last = members(buffer)
    assert (holes.name, holes.is_file) == ("holes.jpg", False)
    assert (last.name, last.is_file) == ("last.jpg", True)
