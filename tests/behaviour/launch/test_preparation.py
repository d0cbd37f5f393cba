"""What a submission leaves in the job folder: a copy of the code, the configuration, no rests."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest

from launch.jobs.preparation import job_folder, prepare_job, submitting
from launch.jobs.snapshot import kept_code
from vitscale.config.errors import UserError
from vitscale.config.packaged import RECORD_NAME, source_version
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.launching import LaunchSettings


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small checkout with one commit."""
    root = tmp_path / "checkout"
    files = {
        ".gitignore": "*.so\n__pycache__/\n/runs/\n",
        "vitscale/model.py": "width = 1\n",
        "vitscale/old.py": "old = 1\n",
        "launch/job.sh": "#!/bin/sh\n",
        "docs/page.md": "text\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "all")
    return root


def copy_of(root: Path, folder: Path) -> Path:
    copy = kept_code(LaunchSettings(), folder, root=root)
    assert copy is not None
    return copy


def test_a_snapshot_is_the_code_as_it_is_on_disk(root: Path, tmp_path: Path) -> None:
    """Edits, new files and extensions; no other folders."""
    (root / "vitscale/model.py").write_text("width = 2\n")
    (root / "vitscale/old.py").unlink()
    (root / "vitscale/new é.py").touch()
    (root / "vitscale/_region.abi3.so").write_bytes(b"ELF")
    (root / "vitscale/__pycache__").mkdir()
    (root / "vitscale/__pycache__/model.pyc").touch()
    copy = copy_of(root, tmp_path)
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == [
        "launch/job.sh", "source.json", "vitscale/_region.abi3.so", "vitscale/model.py",
        "vitscale/new é.py",
    ]  # fmt: skip
    assert (copy / "vitscale/model.py").read_text() == "width = 2\n"
    record = json.loads((copy / RECORD_NAME).read_text())
    assert record["patch"].startswith("# untracked: vitscale/new é.py\n")
    assert "-width = 1\n+width = 2\n" in record["patch"]


def test_the_record_replaces_git_inside_a_snapshot(root: Path, tmp_path: Path) -> None:
    # A run folder is often inside the checkout, whose commit may have moved on.
    (root / "runs").mkdir()
    copy = copy_of(root, root / "runs")
    recorded = source_version(copy)
    assert recorded == source_version(root) and recorded is not None and not recorded.patch
    git(root, "commit", "--quiet", "--allow-empty", "--message", "later")
    assert source_version(copy) == recorded != source_version(root)
    assert copy_of(copy, tmp_path).name == copy.name


def test_equal_code_shares_one_folder_and_other_code_does_not(root: Path, tmp_path: Path) -> None:
    first = copy_of(root, tmp_path)
    assert copy_of(root, tmp_path) == first
    (root / "launch/job.sh").rename(root / "launch/job")
    second = copy_of(root, tmp_path)
    (root / ".git").rename(tmp_path / "elsewhere")  # as in an installed package
    third = copy_of(root, tmp_path)
    assert len({first, second, third}) == 3 == len(list(tmp_path.glob("*code-*")))
    assert source_version(third) is None
    assert kept_code(LaunchSettings(snapshot=False), tmp_path, root=root) is None


# ---- the job folder ---------------------------------------------------------------------------


def test_a_refusal_removes_no_files_of_other_submissions(tmp_path: Path) -> None:
    folder = tmp_path / "run/slurm"

    def submit() -> None:
        with submitting(folder):
            (folder / "12").mkdir()
            (folder / "config-2.yaml").touch()

    other = threading.Thread(target=submit)
    with pytest.raises(UserError), submitting(folder):
        (folder / "config-1.yaml").touch()
        other.start()
        other.join(0.2)
        raise UserError("refused")
    other.join()
    assert {path.name for path in folder.iterdir()} == {"12", "config-2.yaml"}


def test_a_job_has_a_private_folder_and_the_script_of_its_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = {"path": "tars", "kind": "webdataset"}
    values = {"output": "shards", "source": source, "script": "index_shards"}
    run = DataPrepRun.model_validate(values)
    job = prepare_job(run, cluster="slurm")
    folder = Path(job.config).parent
    assert {each.stat().st_mode & 0o777 for each in (folder, folder.parent)} == {0o700}
    assert Path(job.script).name == "index_shards.py" and Path(job.script).is_file()
    assert job.run_folder is None and "script: index_shards" in Path(job.config).read_text()
    Path(job.config).unlink()
    Path(job.config).mkdir()
    with pytest.raises(UserError, match="output=.*: cannot be written"):
        prepare_job(run, cluster="slurm")


def test_preparations_of_different_outputs_have_different_job_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def folder_of(output: str) -> Path:
        values = {"output": output, "source": {"path": "images"}}
        return job_folder(DataPrepRun.model_validate(values), cluster="slurm")

    outputs = ["shards", "a/shards", "b/shards", "a/b/shards", "/a/shards", "~/shards", "../shards"]
    assert len({folder_of(output) for output in outputs}) == len(outputs)
    same = ["a/shards", "./a/shards/", "b/../a/shards", str(tmp_path / "a/shards")]
    assert len({folder_of(output) for output in same}) == 1
    assert folder_of("shards") == tmp_path / "runs/data_prep-shards/slurm"
    assert folder_of("a/shards").parent.name.startswith("data_prep-shards-")
