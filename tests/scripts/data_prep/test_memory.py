"""data_prep/make_shards.py does not hold a corpus in memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.golden import FOLDER

REPOSITORY = Path(__file__).parents[3]
MIB = 2**20
# A comment of a JPEG file, as long as one can be.
COMMENT = b"\xff\xfe\xff\xff" + bytes(65_533)


def corpus(folder: Path, *, num_images: int) -> Path:
    """Images of 4 MiB under many names."""
    original = (FOLDER / "images/cat/grey.jpg").read_bytes()
    (folder / "cat").mkdir(parents=True)
    (folder / "image").write_bytes(original[:2] + 64 * COMMENT + original[2:])
    for number in range(num_images):
        os.link(folder / "image", folder / f"cat/{number:03d}.jpg")
    (folder / "image").unlink()
    return folder


def peak_mib(*command: str) -> float:
    """The largest sum over a process and its children of the memory that is their own."""
    process = psutil.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak = 0.0
    while process.poll() is None:
        used = 0
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                used += each.memory_full_info().uss
        peak = max(peak, used / MIB)
        time.sleep(0.02)
    output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    return peak


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    found = {}
    for num_images in (4, 128):
        source = corpus(tmp_path / f"in-{num_images}", num_images=num_images)
        found[num_images] = peak_mib(
            sys.executable, "data_prep/make_shards.py", "--config=configs/data/image_folder.yaml",
            f"source.path={source}", f"output={tmp_path}/out-{num_images}", "num_workers=2",
            "source.holdout_fraction=0.0", "shards.shard_mib=256",
        )  # fmt: skip
    # 512 MiB of images; a worker holds one of 4 MiB and its copies.
    assert found[128] - found[4] < 64, found
