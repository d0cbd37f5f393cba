"""Verification: a committed folder is read unchanged or refused."""

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.light_checkpoints import flip, light_save, tensor_file
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.tables import every, refused, rows
from vitscale.checkpoint import folders
from vitscale.checkpoint.folders import (
    best_of,
    manifest_text,
    newest_checkpoint,
    read_checkpoint,
    step_folders,
    step_of,
)
from vitscale.config.errors import StorageError, UserError
from vitscale.distributed import atomic_files

RANK_FILE = "rank-00000.safetensors"
MANIFEST = "manifest.json"


def save(tmp_path, step):
    return light_save(tmp_path / "checkpoints", step=step, keep=9).folder


# Shell commands in the folder of a checkpoint: what disks, people and other versions leave.
DAMAGE = dict(
    line.split(": ", 1)
    for line in r"""
truncated: truncate -s 20 $RANK
rank file missing: rm $RANK
rank file a folder: rm $RANK; mkdir $RANK
manifest missing: rm $MANIFEST
manifest torn: truncate -s 30 $MANIFEST
manifest of lists: echo [] > $MANIFEST
manifest not UTF-8: printf '\377\376{}' > $MANIFEST
manifest of another step: cp ../step-00000001/$MANIFEST .
all of another step: cp ../step-00000001/* .
version unknown: sed -i 's/"format_version": *[0-9]*/"format_version": 3/' $MANIFEST
empty folder: rm *
a file: rm -r $PWD; touch $PWD
""".strip().splitlines()
)


def damaged(kind, folder):
    if kind == "bit flipped":
        flip(folder / RANK_FILE, -1)
        return
    environment = os.environ | {"RANK": RANK_FILE, "MANIFEST": MANIFEST}
    subprocess.run(DAMAGE[kind], shell=True, check=True, cwd=folder, env=environment)


def content(folder):
    contents = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            contents[str(path)] = path.read_bytes()
    return contents


@every(damage=["bit flipped", *DAMAGE])
def test_damaged_newest_falls_back_to_the_one_before(tmp_path, damage):
    """Without one, the run is refused: starting over would overwrite what may become readable."""
    checkpoints = tmp_path / "checkpoints"
    first = checkpoints / "step-00000001"
    away = tmp_path / "away"
    assert newest_checkpoint(checkpoints) == (None, [])

    # A save that was killed is no checkpoint: the run starts from the beginning.
    (checkpoints / ".step-00000001.killed.tmp").mkdir(parents=True)
    assert newest_checkpoint(checkpoints) == (None, [])
    save(tmp_path, 1)
    damaged(damage, save(tmp_path, 2))
    checkpoint, complaints = newest_checkpoint(checkpoints)
    assert checkpoint.step == 1
    assert len(complaints) == 1
    assert "skipping damaged checkpoint" in complaints[0]
    assert "next:" not in complaints[0]  # the older one is taken without being asked

    # Now the damaged one is the only one.
    first.rename(away)
    before = content(checkpoints)
    with refused("holds checkpoints, but none that can be read") as caught:
        newest_checkpoint(checkpoints)
    assert "step-00000002" in caught.value.what
    assert "start over" in str(caught.value.next_step)
    assert content(checkpoints) == before

    # The run resumes from step 1 and commits step 2 again, over the damaged folder.
    away.rename(first)
    save(tmp_path, 2)
    checkpoint, complaints = newest_checkpoint(checkpoints)
    assert checkpoint.step == 2
    assert complaints == []


def test_an_outage_of_storage_is_no_damage(tmp_path, monkeypatch):
    """A file that cannot be read for a moment is read again; no older step replaces it."""
    checkpoints = tmp_path / "checkpoints"
    for step in (1, 2):
        save(tmp_path, step)
    num_failures = 1
    read = folders.blake3_of_file

    def fail(path, **options):
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, **options)

    monkeypatch.setattr(folders, "blake3_of_file", fail)
    pauses = []
    monkeypatch.setattr(atomic_files.time, "sleep", pauses.append)
    checkpoint, complaints = newest_checkpoint(checkpoints)
    assert checkpoint.step == 2
    assert complaints == []

    # It lasts longer than all attempts.
    num_failures = 100
    with pytest.raises(StorageError, match=r"cannot be read \(Stale file handle\)"):
        newest_checkpoint(checkpoints)
    assert pauses[-3:] == [0.5, 1.0, 2.0]


def test_any_flipped_bit_is_detected(tmp_path):
    """Each byte in turn with one bit flipped: refused, or (white space) read unchanged."""
    folder = save(tmp_path, 1)
    undamaged = read_checkpoint(folder)
    for name in (RANK_FILE, MANIFEST):
        path = folder / name
        data = path.read_bytes()
        num_survived = 0
        for position in range(len(data)):
            flip(path, position, bit=position % 8)
            try:
                assert read_checkpoint(folder) == undamaged
                num_survived += 1
            except UserError:
                pass
            path.write_bytes(data)

        # Every byte of the tensors counts; of the manifest all but the blanks between its values.
        limit = 1
        if name == MANIFEST:
            limit = data.count(b" ") + 5
        assert num_survived < limit


# Beside the folder, anywhere, the folder above, and a pickle.
@every(name="../outside.safetensors, /outside.safetensors, .., data.pt")
def test_manifest_lists_tensor_files_of_its_folder_only(tmp_path, name):
    folder = save(tmp_path, 1)
    (folder.parent / "outside.safetensors").write_bytes(tensor_file(1))
    path = folder / MANIFEST

    # Size and hash are right, so only the name can be the reason.
    manifest = json.loads(path.read_text())
    files = {name: manifest["files"][RANK_FILE]}
    path.write_text(
        manifest_text(
            step=1,
            files=files,
            progress={},
            description={},
        )
    )
    with refused("not a plain file name"):
        read_checkpoint(folder)


def test_retention_counts_whole_earlier_steps_alone(tmp_path):
    """The run resumes from before damaged steps: counting them would drop what it commits."""
    damages = {
        1: None,
        2: "truncated",
        4: "bit flipped",
        5: "bit flipped",
    }
    for step, damage in damages.items():
        folder = save(tmp_path, step)
        if damage:
            damaged(damage, folder)
    checkpoints = folder.parent
    light_save(checkpoints, step=3, keep=2)

    # Two whole ones are kept, and the later ones, which may become readable.
    assert [path.name[-1] for path in sorted(checkpoints.iterdir())] == [*"1345"]
    checkpoint, complaints = newest_checkpoint(checkpoints)
    assert checkpoint.step == 3
    assert len(complaints) == 2


def test_files_are_verified_from_disk_before_the_commit(tmp_path, monkeypatch):
    """The page cache would return what was written, not what the disk holds."""
    dropped = []

    def advise(fd, start, length, advice):
        assert start == 0
        assert length == 0
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append(Path(os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    save(tmp_path, 1)

    # Still under its temporary name: not committed yet.
    (path,) = dropped
    assert path.name == RANK_FILE
    assert path.parent.name.startswith(".step-00000001.")


@every(num_damaged="1, 2")
def test_ranks_share_the_verification_and_agree(tmp_path, monkeypatch, num_damaged):
    checkpoints = tmp_path / "checkpoints"
    num_ranks = 5
    for step in (1, 2):

        def save_on(rank, gather, step=step):
            return light_save(
                checkpoints,
                step=step,
                rank=rank,
                gather=gather,
            )

        run_ranks(num_ranks, save_on)
    for folder in step_folders(checkpoints)[:num_damaged]:
        os.truncate(folder / "rank-00003.safetensors", 20)

    hashed = []
    blake3_of_file = folders.blake3_of_file

    def noted(path, **options):
        hashed.append(path)
        return blake3_of_file(path, **options)

    monkeypatch.setattr(folders, "blake3_of_file", noted)
    layout = {"world_size": num_ranks}

    def read(rank, gather):
        try:
            return newest_checkpoint(checkpoints, rank=rank, gather=gather, **layout)
        except UserError as error:
            return str(error)

    results = run_ranks(num_ranks, read)
    assert results == [results[0]] * num_ranks

    # Each file once, by one of them; a wrong size needs no hash.
    assert len(set(hashed)) == len(hashed) == 2 * num_ranks - num_damaged
    if num_damaged == 1:
        checkpoint, complaints = results[0]
        assert checkpoint.step == 1
        assert "step-00000002/rank-00003.safetensors" in complaints[0]
    else:
        assert "none that can be read" in results[0]


# Without scores; with some; the newest is not the best; equal ones; the best is among the newest.
@rows("""
- [keep, scores, kept]
- [2, {1: null, 2: null, 3: null}, [3, 2]]
- [2, {1: 0.9, 2: 0.5, 3: null, 4: null}, [4, 3, 1]]
- [1, {1: 0.5, 2: 0.9, 3: 0.7}, [3, 2]]
- [1, {1: 0.5, 2: 0.5, 3: 0.4}, [3, 1]]
- [2, {1: 0.1, 2: 0.2, 3: 0.3}, [3, 2]]
""")
def test_the_best_checkpoint_stays_beside_the_newest(tmp_path, keep, scores, kept):
    """Of equal ones the first; a run that resumes takes the newest, other commands the best."""
    folder = tmp_path / "checkpoints"
    for step, score in scores.items():
        light_save(folder, step=step, keep=keep, score=score)
    paths = step_folders(folder)
    assert [step_of(path) for path in paths] == kept
    newest, _ = newest_checkpoint(folder)
    assert newest.step == kept[0]

    values = {step: score for step, score in scores.items() if score is not None}
    best = best_of(paths)
    if not values:
        assert best is None
        return
    path, _ = best
    assert step_of(path) == max(values, key=lambda step: values[step])


def test_a_later_best_checkpoint_that_is_damaged_does_not_replace_the_best(tmp_path):
    """A run that resumed from before it keeps the best of its own steps, and writes it again."""
    folder = tmp_path / "checkpoints"
    for step, score in {1: 0.5, 2: 0.4, 4: 0.9}.items():
        later = light_save(folder, step=step, keep=9, score=score)

    # The size stays: only a hash over all of it would show the damage.
    flip(later.folder / RANK_FILE, -1)

    light_save(folder, step=3, keep=1, score=0.3)
    assert [step_of(path) for path in step_folders(folder)] == [4, 3, 1]
    light_save(folder, step=4, keep=1, score=0.2)
    assert [step_of(path) for path in step_folders(folder)] == [4, 1]
    assert read_checkpoint(later.folder).progress["score"]["value"] == 0.2


def test_a_best_checkpoint_that_is_lost_harms_nothing(tmp_path):
    """The best of those that are there is kept from then on."""
    folder = tmp_path / "checkpoints"
    for step, score in {1: 0.9, 2: 0.5, 3: 0.6}.items():
        light_save(folder, step=step, keep=1, score=score)
    (folder / "step-00000001" / RANK_FILE).unlink()
    light_save(folder, step=4, keep=1)
    assert [step_of(path) for path in step_folders(folder)] == [4, 3]

    # A save of a better one that never became whole.
    (folder / ".step-00000005.killed.tmp").mkdir()
    light_save(folder, step=6, keep=1)
    assert [step_of(path) for path in step_folders(folder)] == [6, 3]
