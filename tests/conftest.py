"""Fixtures of all tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, so that a change is judged by itself and not by chance.
# HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("explore")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB. Skipped if it cannot be mounted; VITSCALE_REQUIRE_MOUNT=1 fails."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        reason = f"cannot mount a small disk: {done.stderr.strip()}"
        if os.environ.get("VITSCALE_REQUIRE_MOUNT") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
