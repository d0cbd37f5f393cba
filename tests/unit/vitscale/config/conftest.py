"""A folder with one valid run file, as the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_files import VALID


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(VALID)
    return tmp_path
