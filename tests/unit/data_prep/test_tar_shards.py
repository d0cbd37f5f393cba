from __future__ import annotations

import tarfile
from pathlib import Path

import blake3
from hypothesis import given
from hypothesis import strategies as st

from data_prep.tar_shards import TarShard, sample_bytes, shard_lengths


def test_offsets_point_at_the_images_and_the_entry_describes_the_file(tmp_path: Path) -> None:
    images = [bytes([i]) * size for i, size in enumerate((1, 511, 512, 513, 5000))]
    path = tmp_path / "train-000000.tar"
    with TarShard(path) as tar:
        offsets = [
            tar.add(f"k{i}", extension="png", image=image, label=i)
            for i, image in enumerate(images)
        ]
    data = path.read_bytes()
    assert [data[o : o + len(i)] for o, i in zip(offsets, images, strict=True)] == images
    assert (tar.entry.samples, tar.entry.bytes) == (5, len(data))
    assert tar.entry.blake3 == blake3.blake3(data).hexdigest()
    assert sum(sample_bytes(len(image)) for image in images) + 1024 == len(data)
    with tarfile.open(path) as stored:
        members = stored.getmembers()
        assert [m.name for m in members[:4]] == ["k0.png", "k0.cls", "k1.png", "k1.cls"]
        assert [m.offset_data for m in members[::2]] == offsets
        label = stored.extractfile("k4.cls")
        assert label is not None and label.read() == b"4"
        assert {(m.mtime, m.uid, m.uname, m.gname, m.mode) for m in members} == {
            (0, 0, "", "", 0o644)
        }


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    st.floats(0.001, 1.0),
    st.integers(1, 8),
)
def test_shards_hold_every_sample_and_differ_by_one_at_most(
    sizes: list[int], shard_mib: float, min_shards: int
) -> None:
    lengths = shard_lengths(sizes, shard_mib=shard_mib, min_shards=min_shards)
    assert sum(lengths) == len(sizes)
    assert max(lengths) - min(lengths) <= 1 and min(lengths) >= 1
    assert len(lengths) >= min(min_shards, len(sizes))
