"""data_prep/make_shards.py killed, signalled, shared, or run while source or disk change."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.corpora.image_corpus import (
    REPOSITORY,
    command,
    contents,
    corpus,
    make_shards,
)
from tests.support.levels import by_level
from tests.support.tables import every
from tests.support.waiting import PATIENCE_S


def started(
    source: Path, output: Path, *options: str, until: str = "rows.arrow", **how
) -> subprocess.Popen[str]:
    """make_shards at work; it has made a file of this name."""
    process = subprocess.Popen(
        command(source, output, *options),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )
    while not list(output.with_name(f".{output.name}.preparing").glob(until)):
        assert process.poll() is None
        time.sleep(0.001)
    return process


def kill(process: subprocess.Popen[str], folder: Path) -> None:
    """Kill a task, and let its heartbeats grow as old as they would in a minute."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for heartbeat in folder.glob("tmp/*/alive"):
        os.utime(heartbeat, (time.time() - 61, time.time() - 61))


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_bytes(tmp_path):
    source = corpus(tmp_path / "images", num=100, side=96)
    many_shards = "shards.min_shards=10"
    make_shards(source, tmp_path / "whole", many_shards)
    half = tmp_path / "half"
    folder = tmp_path / ".half.preparing"
    finished = set()

    # Killed once in each phase: after it made its first file. What it made stays as it is.
    for made in ("list/*.arrow", "rows.arrow", "tars/*.arrow"):
        kill(
            started(source, half, many_shards, until=made, start_new_session=True),
            folder,
        )
        assert folder.exists()
        assert not half.exists()
        found = (folder.glob(f"{each}*.arrow") for each in ("", "list/", "tars/"))
        results = {path for paths in found for path in paths}
        assert results >= finished
        finished = results
    times = {path: path.stat().st_mtime_ns for path in (folder / "tars").glob("*.tar")}
    done = {path for path in times if path.with_suffix(".arrow") in finished}
    assert done
    make_shards(source, half, many_shards)
    assert contents(half) == contents(tmp_path / "whole")
    assert {(half / path.name).stat().st_mtime_ns for path in done} == {
        times[p] for p in done
    }
    assert not folder.exists()


def test_a_stop_signal_ends_it_with_the_code_for_going_on(tmp_path):
    source = corpus(tmp_path / "images", num=100, side=96)
    process = started(source, tmp_path / "shards")
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 75
    assert "run the same command again" in text
    make_shards(source, tmp_path / "shards")


def test_work_begun_with_other_settings_is_not_gone_on_with(tmp_path):
    source = corpus(tmp_path / "images")
    folder = tmp_path / ".shards.preparing"
    folder.mkdir()
    (folder / "settings.json").write_text("{}")
    text = make_shards(source, tmp_path / "shards", rc=2)
    assert "was begun with other settings" in text
    assert "next:" in text
    assert (folder / "settings.json").read_text() == "{}"


@every(change=by_level(["content", "removed"], fast=["content"], slow=["removed"]))
def test_a_source_that_changes_meanwhile_is_refused(change, tmp_path):
    source = corpus(tmp_path / "images", num=100, side=96)
    process = started(source, tmp_path / "shards", start_new_session=True)
    kill(process, tmp_path / ".shards.preparing")
    victim = source / "cat" / "003.jpg"
    if change == "content":
        victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    else:
        victim.unlink()
    text = make_shards(source, tmp_path / "shards", rc=2)
    assert "changed while the shards were made" in text
    assert "next:" in text
    assert {path.name for path in tmp_path.iterdir()} == {"images", ".shards.preparing"}
    make_shards(source, tmp_path / "shards")
    assert {path.name for path in tmp_path.iterdir()} == {"images", "shards"}


def test_late_array_tasks_get_the_result_of_their_job(tmp_path):
    source = corpus(tmp_path / "images")
    victim = source / "cat" / "003.jpg"
    photo = victim.read_bytes()
    victim.write_bytes(b"")
    texts = []
    for job, rc in (("7", 2), ("7", 2), ("8", 0)):
        if job == "8":
            victim.write_bytes(photo)
        done = subprocess.run(
            command(
                source,
                tmp_path / "shards",
                "images.max_bad_fraction=0",
                "launch.num_tasks=2",
            ),
            cwd=REPOSITORY,
            env=os.environ | {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": job},
            capture_output=True,
            text=True,
        )
        texts.append(done.stdout + done.stderr)
        assert done.returncode == rc, texts
        assert (tmp_path / ".shards.preparing/failed.json").exists() == bool(rc)
        assert not (tmp_path / ".shards.preparing/tars").exists()
    assert "1 of 24 images are bad" in texts[0]
    assert texts[1] == texts[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "shards"]


def test_full_disk_is_one_error_without_partial_files(small_disk, tmp_path):
    source = corpus(tmp_path / "images", num=60, side=96)
    text = make_shards(source, small_disk / "shards", rc=74)
    assert "MiB are free" in text
    assert "next: free space" in text
    assert [path.name for path in small_disk.iterdir()] == [".shards.preparing"]


def test_a_write_error_is_one_message_and_loses_nothing(tmp_path):
    source = corpus(tmp_path / "images", num=60, side=96)
    limited = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
        f"os.execv({sys.executable!r}, {command(source, tmp_path / 'shards')!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 74
    assert "Traceback" not in done.stderr
    assert "written (File too large)" in done.stderr
    assert "the run resumes" in done.stderr
    assert not (tmp_path / "shards").exists()
    assert not list((tmp_path / ".shards.preparing" / "tars").glob("train-*"))
    make_shards(source, tmp_path / "shards")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "shards"]


def test_an_output_that_is_a_link_is_made_where_it_leads(tmp_path):
    source = corpus(tmp_path / "images")
    (tmp_path / "disk" / "big").mkdir(parents=True)
    (tmp_path / "shards").symlink_to("disk/big")
    make_shards(source, tmp_path / "shards")
    assert (tmp_path / "shards").is_symlink()
    assert (tmp_path / "shards" / "manifest.json").exists()
    assert sorted(path.name for path in tmp_path.rglob(".*")) == []
    assert "already there" in make_shards(source, tmp_path / "shards")
