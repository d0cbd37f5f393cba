"""data_prep/make_shards.py killed, signalled, shared, or run while source or disk change."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.corpora.image_corpus import (
    command,
    contents,
    corpus,
    make_shards,
)
from tests.support.levels import by_level
from tests.support.tables import every
from tests.support.waiting import PATIENCE_S, ROOT, run_python


def started(source, output, *options, until="rows.arrow", **how):
    """make_shards at work; it has made a file of this name."""
    process = subprocess.Popen(
        command(source, output, *options),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        **how,
    )
    work = output.with_name(f".{output.name}.preparing")
    while not [*work.glob(until)]:
        # One that has finished was too fast to be killed; the test would show nothing.
        assert process.poll() is None
        time.sleep(0.001)
    return process


def kill(process, folder):
    """Kill a task, and let its heartbeats grow as old as they would in a minute."""
    # With its workers, which would otherwise finish what they have begun.
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    a_minute_ago = time.time() - 61
    for heartbeat in folder.glob("tmp/*/alive"):
        os.utime(heartbeat, (a_minute_ago, a_minute_ago))


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_bytes(tmp_path):
    source = corpus(tmp_path / "images", num=100, side=96)
    many_shards = "shards.min_shards=10"
    make_shards(source, tmp_path / "whole", many_shards)
    half = tmp_path / "half"
    folder = tmp_path / ".half.preparing"
    finished = set()

    # Killed once in each phase: after it made its first file. What it made stays as it is.
    for first_file in ("list/*.arrow", "rows.arrow", "tars/*.arrow"):
        process = started(
            source,
            half,
            many_shards,
            until=first_file,
            start_new_session=True,
        )
        kill(process, folder)
        assert folder.exists()
        # What has this name is whole.
        assert not half.exists()
        results = set()
        for pattern in ("*.arrow", "list/*.arrow", "tars/*.arrow"):
            results |= {*folder.glob(pattern)}
        assert results >= finished
        finished = results

    # A tar whose rows are written is done: it must be taken over, not written a second time.
    times = {}
    for path in (folder / "tars").glob("*.tar"):
        if path.with_suffix(".arrow") in finished:
            times[path.name] = path.stat().st_mtime_ns
    assert times
    make_shards(source, half, many_shards)
    assert contents(half) == contents(tmp_path / "whole")
    assert {name: (half / name).stat().st_mtime_ns for name in times} == times
    assert not folder.exists()


def test_a_stop_signal_ends_it_with_the_code_for_going_on(tmp_path):
    source = corpus(tmp_path / "images", num=100, side=96)
    process = started(source, tmp_path / "shards")
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=PATIENCE_S)
    # By this code a job is requeued.
    assert process.returncode == 75
    assert "run the same command again" in text
    make_shards(source, tmp_path / "shards")


def test_work_begun_with_other_settings_is_not_gone_on_with(tmp_path):
    source = corpus(tmp_path / "images")
    folder = tmp_path / ".shards.preparing"
    folder.mkdir()
    settings = folder / "settings.json"
    settings.write_text("{}")
    text = make_shards(source, tmp_path / "shards", rc=2)
    assert "was begun with other settings" in text
    assert "next:" in text
    # It may be days of work, which only its owner may throw away.
    assert settings.read_text() == "{}"


@every(change=by_level(["content", "removed"], fast=["content"], slow=["removed"]))
def test_a_source_that_changes_meanwhile_is_refused(change, tmp_path):
    source = corpus(tmp_path / "images", num=100, side=96)
    shards = tmp_path / "shards"
    process = started(source, shards, start_new_session=True)
    kill(process, tmp_path / ".shards.preparing")
    victim = source / "cat" / "003.jpg"
    if change == "content":
        # Of the same size, so only the content or the time can tell.
        victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    else:
        victim.unlink()
    text = make_shards(source, shards, rc=2)
    assert "changed while the shards were made" in text
    assert "next:" in text
    assert names_in(tmp_path) == [".shards.preparing", "images"]
    # The next start lists the source anew.
    make_shards(source, shards)
    assert names_in(tmp_path) == ["images", "shards"]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_late_array_tasks_get_the_result_of_their_job(tmp_path):
    source = corpus(tmp_path / "images")
    work = tmp_path / ".shards.preparing"
    _, *words = command(
        source,
        tmp_path / "shards",
        "images.max_bad_fraction=0",
        "launch.num_tasks=2",
    )
    victim = source / "cat" / "003.jpg"
    photo = victim.read_bytes()
    victim.write_bytes(b"")
    texts = []
    for job, rc in (("7", 2), ("7", 2), ("8", 0)):
        # A new job starts when the fault is mended; a late task of the old one only reports.
        if job == "8":
            victim.write_bytes(photo)
        task = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": job}
        done = run_python(*words, cwd=ROOT, env=os.environ | task)
        texts.append(done.stdout + done.stderr)
        assert done.returncode == rc, texts
        assert (work / "failed.json").exists() == bool(rc)
        assert not (work / "tars").exists()
    assert "1 of 24 images are bad" in texts[0]
    # Word for word: whoever reads the log of any task learns the reason.
    assert texts[1] == texts[0]
    assert names_in(tmp_path) == ["images", "shards"]


def test_full_disk_is_one_error_without_partial_files(small_disk, tmp_path):
    source = corpus(tmp_path / "images", num=60, side=96)
    text = make_shards(source, small_disk / "shards", rc=74)
    # Said before anything is written, from the sizes of the files.
    assert "MiB are free" in text
    assert "next: free space" in text
    assert names_in(small_disk) == [".shards.preparing"]


def test_a_write_error_is_one_message_and_loses_nothing(tmp_path):
    source = corpus(tmp_path / "images", num=60, side=96)
    shards = tmp_path / "shards"
    # A quota: the first tar is larger than any file of this process may become.
    code = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)); "
        f"os.execv({sys.executable!r}, {command(source, shards)!r})"
    )
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 74
    assert "Traceback" not in done.stderr
    assert "written (File too large)" in done.stderr
    assert "the run resumes" in done.stderr
    assert not shards.exists()
    # No half tar under a name that a resume would take for a whole one.
    assert not [*(tmp_path / ".shards.preparing/tars").glob("train-*")]
    make_shards(source, shards)
    assert names_in(tmp_path) == ["images", "shards"]


def test_an_output_that_is_a_link_is_made_where_it_leads(tmp_path):
    source = corpus(tmp_path / "images")
    shards = tmp_path / "shards"
    (tmp_path / "disk/big").mkdir(parents=True)
    shards.symlink_to("disk/big")
    make_shards(source, shards)
    # The last step renames a folder: it must not replace the link, nor cross to another disk.
    assert shards.is_symlink()
    assert (shards / "manifest.json").exists()
    assert [*tmp_path.rglob(".*")] == []
    assert "already there" in make_shards(source, shards)
