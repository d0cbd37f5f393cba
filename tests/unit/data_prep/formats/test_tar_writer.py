from __future__ import annotations

import tarfile
from pathlib import Path

import blake3
from hypothesis import given
from hypothesis import strategies as st

from data_prep.formats.tar_writer import MAX_MEMBER_BYTES, TarShard, ustar_header
from data_prep.steps.rows import hashed_key, make_key
from vitscale.runs.data_prep import DataPrepRun


@given(st.text("ABCxyz019_-.", min_size=1, max_size=100), st.integers(0, MAX_MEMBER_BYTES - 1))
def test_headers_are_those_of_the_standard_library(name: str, num_bytes: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = num_bytes, 0, 0o644
    assert ustar_header(name, num_bytes) == member.tobuf(tarfile.USTAR_FORMAT)


@given(st.text("aB9_", min_size=1, max_size=30), st.text("aB9_-", max_size=90), st.text())
def test_every_allowed_split_name_fits_the_longest_key(
    split: str, class_name: str, name: str
) -> None:
    run = {"source": {"path": "x", "holdout_split": split}, "output": "y"}
    problems = [key for key, _ in DataPrepRun.model_validate(run).problems()]
    assert (problems == ["source.holdout_split"]) == (len(split) > 24)
    longest = hashed_key(100 * "x", "path")
    for key in (make_key(class_name, name, path="path"), longest):
        if not problems:
            assert ustar_header(f"{split}-{key}.webp", 1)
            assert len(f"{split}-{key}") <= 95
    assert len(longest) == 70


def test_offsets_and_hash_match_the_file(tmp_path: Path) -> None:
    images = [bytes([i]) * size for i, size in enumerate((1, 511, 512, 513, 5000))]
    path = tmp_path / "train-000000.tar"
    with TarShard(path) as tar:
        offsets = [
            tar.add(f"k{i}", extension="png", image=image, label=i)
            for i, image in enumerate(images)
        ]
        digest = tar.finish()
    data = path.read_bytes()
    assert [data[o : o + len(i)] for o, i in zip(offsets, images, strict=True)] == images
    assert (tar.num_bytes, digest) == (len(data), blake3.blake3(data).hexdigest())
    # Two zero blocks end a tar; before them is the block of the last label.
    assert data[-1024:] == bytes(1024) and data[-1536:-1024] == b"4".ljust(512, b"\0")
    with tarfile.open(path) as stored:
        members = stored.getmembers()
        assert [m.name for m in members[:4]] == ["k0.png", "k0.cls", "k1.png", "k1.cls"]
        assert [m.offset_data for m in members[::2]] == offsets
        label = stored.extractfile("k4.cls")
        assert label is not None and label.read() == b"4"
        assert {(m.mtime, m.uid, m.uname, m.gname, m.mode) for m in members} == {
            (0, 0, "", "", 0o644)
        }
