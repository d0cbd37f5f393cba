"""Fixtures that several integration tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.rank_processes import ROOT


@pytest.fixture(scope="session")
def digits_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded corpus as shards, made by the scripts that people run."""
    folder = tmp_path_factory.mktemp("digits")
    for command in (
        ["data_prep/make_digits.py", folder / "images"],
        [
            "data_prep/make_shards.py",
            "--config",
            ROOT / "configs/data/digits.yaml",
            f"source.path={folder / 'images'}",
            f"output={folder / 'shards'}",
        ],
    ):
        script, *arguments = map(str, command)
        subprocess.run([sys.executable, ROOT / script, *arguments], check=True, cwd=folder)
    return folder / "shards"
