"""Entry points of a shard folder: written by verify_shards.py, used by the loader."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.corpora.image_corpus import corpus, make_shards
from tests.support.ranks.rank_processes import ROOT
from tests.support.required import skip_or_fail
from vitscale.data.samples import TrainingSamples
from vitscale.data.settings import DataSettings
from vitscale.data.training_set import open_training_set
from vitscale.images.decoders import RegionDecoder, missing
from vitscale.images.jpeg import entry_points

SIZE = 24


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same shards, plain and with entry points."""
    why = missing("region")
    if why is not None:
        skip_or_fail(f"the region decoder does not work here: {why}")
    base = tmp_path_factory.mktemp("entry_points")
    source = corpus(base / "images", side=300)
    make_shards(source, base / "plain", "images.check=header", "shards.min_shards=2")
    shutil.copytree(base / "plain", base / "with")
    assert verify(base / "with", "--entry-points")[0] == 0
    return base / "plain", base / "with"


def verify(folder: Path, *switches: str) -> tuple[int, str]:
    command = [sys.executable, ROOT / "data_prep/verify_shards.py", folder, *switches]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def points_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "entry_points").glob("*")}


def test_they_change_no_other_file(folders: tuple[Path, Path]) -> None:
    plain, written = folders
    assert not (plain / "entry_points").exists()
    for path in plain.glob("*.*"):
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name
    assert set(points_of(written)) == {path.stem + ".jpt" for path in plain.glob("*.tar")}


def test_the_loader_uses_them_and_gives_the_same_pixels(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    crop = RegionDecoder.crop

    def counted(self, data, request, *, out=None):  # type: ignore[no-untyped-def]  # as replaced
        given.append(len(request.entry_points))
        return crop(self, data, request, out=out)

    monkeypatch.setattr(RegionDecoder, "crop", counted)
    pixels, num_given = [], []
    for folder in folders:
        given.clear()
        data = DataSettings(path=str(folder), global_batch=4, val_split="test", decoder="region")
        training_set = open_training_set(data, seed=0)
        samples = TrainingSamples(training_set, settings=data, image_size=SIZE, seed=0)
        out = torch.empty(20, 3, SIZE, SIZE, dtype=torch.uint8)
        assert [samples.fill(position, out[position])[1] for position in range(20)] == [[]] * 20
        pixels.append(out)
        num_given.append(sum(map(bool, given)))
    assert torch.equal(*pixels)
    assert num_given[0] == 0 and num_given[1] > 4


def test_verification_finds_wrong_ones(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[1], tmp_path / "shards")
    assert verify(folder)[0] == 0
    path = sorted((folder / "entry_points").glob("train*"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, text = verify(folder)
    assert code == 2 and "the entry points of 1 images are missing or wrong" in text
    assert f"remove {path}, or write it again with --entry-points" in text
    assert verify(folder, "--entry-points")[0] == 0 and points_of(folder) == points_of(folders[1])
    entry_points._open.cache_clear()
