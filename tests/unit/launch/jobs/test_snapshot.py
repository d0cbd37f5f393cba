"""Copies of the code that a job runs, taken from a git checkout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launch.jobs import snapshot
from launch.jobs.snapshot import Code, folder_name, kept_code, read_code, store_code
from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings
from vitscale.tracking.source_version import RECORD_NAME, source_version


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small checkout with one commit."""
    files = {
        ".gitignore": "*.so\n__pycache__/\n",
        "vitscale/model.py": "width = 1\n",
        "vitscale/old.py": "old = 1\n",
        "launch/job.sh": "#!/bin/sh\n",
        "docs/page.md": "text\n",
    }
    for name, text in files.items():
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkout" / name).write_text(text)
    root = tmp_path / "checkout"
    (root / "launch/job.sh").chmod(0o755)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all")
    return root


def code_of(root: Path) -> Code:
    code = read_code(root)
    assert code is not None
    return code


def test_a_snapshot_has_edits_new_files_and_extensions(root: Path, tmp_path: Path) -> None:
    (root / "vitscale/model.py").write_text("width = 2\n")
    (root / "vitscale/new é.py").write_text("new = 1\n")
    (root / "vitscale/_region.abi3.so").write_bytes(b"\x7fELF")
    (root / "vitscale/__pycache__").mkdir()
    (root / "vitscale/__pycache__/model.pyc").touch()
    (root / "vitscale/old.py").unlink()
    (root / "notes.txt").touch()
    copy = store_code(code_of(root), tmp_path)
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == [
        "launch/job.sh", "source.json", "vitscale/_region.abi3.so", "vitscale/model.py",
        "vitscale/new é.py",
    ]  # fmt: skip
    assert (copy / "vitscale/model.py").read_text() == "width = 2\n"
    assert (copy / "launch/job.sh").stat().st_mode & 0o777 == 0o555
    record = json.loads((copy / RECORD_NAME).read_text())
    assert record["patch"].startswith("# untracked: vitscale/new é.py\n")
    assert "-width = 1\n+width = 2\n" in record["patch"]


def test_the_record_replaces_git_inside_a_snapshot(root: Path) -> None:
    # A run folder is often inside the checkout, whose commit may have moved on.
    copy = store_code(code_of(root), root)
    recorded = source_version(copy)
    assert recorded == source_version(root) and recorded is not None and not recorded.patch
    git(root, "commit", "--quiet", "--allow-empty", "--message", "later")
    assert source_version(copy) == recorded != source_version(root)
    assert folder_name(code_of(copy)) == copy.name


def test_equal_code_shares_one_folder(root: Path, tmp_path: Path) -> None:
    first = store_code(code_of(root), tmp_path)
    assert store_code(code_of(root), tmp_path) == first
    (root / "launch/job.sh").chmod(0o644)
    assert store_code(code_of(root), tmp_path) != first
    assert len(list(tmp_path.glob("*code-*"))) == 2


def test_large_code_is_refused_with_its_largest_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "MAX_BYTES", 100_000)
    (root / "vitscale/weights.bin").write_bytes(bytes(200_000))
    with pytest.raises(UserError, match="largest file is vitscale/weights.bin"):
        read_code(root)


def test_without_git_there_is_no_snapshot(root: Path, tmp_path: Path) -> None:
    (root / ".git").rename(tmp_path / "elsewhere")
    assert read_code(root) is None


def test_files_ignored_by_an_outer_checkout_are_no_code(root: Path) -> None:
    # An environment inside a checkout: its packages have no version there.
    (root / ".gitignore").write_text("env/\n")
    (root / "env/vitscale").mkdir(parents=True)
    (root / "env/vitscale/model.py").touch()
    assert read_code(root / "env") is None


def test_code_without_a_version_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshot, "read_code", lambda: None)
    snapshot._warn_without_git.cache_clear()
    assert kept_code(LaunchSettings(snapshot=False), tmp_path) is None
    assert not capsys.readouterr().err
    for _ in range(2):
        assert kept_code(LaunchSettings(), tmp_path) is None
    assert capsys.readouterr().err.count("is no git checkout") == 1
    assert not list(tmp_path.iterdir())
