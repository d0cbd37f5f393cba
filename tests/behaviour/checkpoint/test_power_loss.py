"""Power loss after every system call of a save, on a disk that keeps as little as POSIX allows.

The calls of a real save are recorded and replayed on a model: what a file holds is durable from
its fsync, a name from the fsync of its folder. Every durable state is written out and read by the
real reader. Then each fsync, rename and check of the protocol is removed, and some state must lose
a committed step.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.support.light_checkpoints import light_save
from tests.support.tables import every
from vitscale.checkpoint import folders
from vitscale.checkpoint.folders import newest_checkpoint
from vitscale.config.errors import UserError
from vitscale.distributed.atomic_files import fsync_folder

# All calls by which the protocol changes the disk.
RECORDED = "open write fsync rename replace mkdir unlink rmdir".split()


@dataclass
class Node:
    """A file (content) or folder (names), and the part of it that would survive power loss."""

    is_folder: bool
    content: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    durable_content: bytes = b""
    durable_names: dict[str, Node] = field(default_factory=dict)


class DiskModel:
    """The tree below one real folder, changed by recorded calls."""

    def __init__(self, root):
        self.root = root
        self.top = Node(True)
        self.files = {}

    def node(self, path):
        node = self.top
        for part in Path(path).relative_to(self.root).parts:
            node = node.names[part]
        return node

    def place(self, path):
        """The names of the folder above, and the path's own name in it."""
        path = Path(path)
        return self.node(path.parent).names, path.name

    def apply(self, call, result, *arguments):
        match call, arguments:
            case "open", (path, flags, *_):
                # A new file has a name at once, for as long as power is there.
                if flags & os.O_CREAT:
                    names, name = self.place(path)
                    names.setdefault(name, Node(False))
                self.files[result] = self.node(path)
            case "write", (fd, data):
                self.files[fd].content += data
            case "fsync", (fd,):
                # Of a file its content, of a folder its names.
                node = self.files[fd]
                node.durable_content = node.content
                node.durable_names = dict(node.names)
            case "rename" | "replace", (old, new):
                names, name = self.place(old)
                node = names.pop(name)
                names, name = self.place(new)
                names[name] = node
            case "mkdir", (path, *_):
                names, name = self.place(path)
                names[name] = Node(True)
            case "unlink" | "rmdir", (path,):
                names, name = self.place(path)
                del names[name]

    def states(self):
        """What may be left: only what was flushed, or besides it all names without content."""
        yield _durable(self.top, all_names=False)
        yield _durable(self.top, all_names=True)


def _durable(node, *, all_names):
    """What is left of a node. all_names: names that nobody flushed are there, too."""
    names = node.names if all_names else node.durable_names
    left = {}
    for name, child in names.items():
        left[name] = _durable(child, all_names=all_names)
    return Node(node.is_folder, content=node.durable_content, names=left)


def write_out(node, path):
    """Write a state's tree as real files, for the real reader."""
    if not node.is_folder:
        path.write_bytes(node.content)
        return
    path.mkdir()
    for name, child in node.names.items():
        write_out(child, path / name)


def rmtree(folder, *, ignore_errors=False):
    """shutil.rmtree in calls with whole paths."""
    if ignore_errors and not folder.exists():
        return
    for child in sorted(folder.iterdir()):
        os.unlink(child)
    os.rmdir(folder)


def broken_promises(tmp_path, *, keep=1):
    """Lose power after each call of three saves; return what the reader finds wrong."""
    root = tmp_path / "disk"
    after = tmp_path / "after"
    root.mkdir()
    model = DiskModel(root)
    promised = 0
    broken = []

    def lose_power(moment):
        for kind, state in zip(("least", "names only"), model.states(), strict=True):
            write_out(state, after)
            step = 0
            with suppress(UserError):  # none that can be read
                checkpoint, _ = newest_checkpoint(after / "run/checkpoints")
                if checkpoint:
                    step = checkpoint.step
            if step < promised:
                where = f"{promised} was promised, {moment}"
                broken.append(f"{kind}: step {step} where {where}")
            shutil.rmtree(after)

    def recorded(name, function):
        def call(*arguments, **options):
            result = function(*arguments, **options)
            if name == "write":  # the caller reuses its buffer
                fd, data = arguments
                arguments = (fd, bytes(data)[:result])
            moments.append((name, result, arguments))
            return result

        return call

    moments = []
    for step in (1, 2, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "rmtree", rmtree)
            for name in RECORDED:
                patch.setattr(os, name, recorded(name, getattr(os, name)))
            light_save(root / "run/checkpoints", step=step, keep=keep)

        # The save is over: now its calls happen one by one on the model.
        for number, (name, result, arguments) in enumerate(moments):
            model.apply(name, result, *arguments)
            lose_power(f"after call {number} ({name}) of save {step}")
        moments.clear()

        # From here on the step may not be lost, by a later save either.
        promised = step
        lose_power(f"after save {step}")
    return broken


@every(keep="1, 2")
def test_power_loss_never_loses_a_committed_step(tmp_path, keep):
    assert broken_promises(tmp_path, keep=keep) == []


# The right functions, which the mutants leave out parts of.
WRITE_NEW_FILE = folders.write_new_file
COMMIT_FOLDER = folders.commit_folder


def unflushed(path, pieces, *, suffix):
    """Write a file, without its fsync if it has this suffix."""
    with pytest.MonkeyPatch.context() as patch:
        if path.suffix == suffix:
            patch.setattr(os, "fsync", lambda fd: None)
        return WRITE_NEW_FILE(path, pieces)


def rename_only(temporary, final, *, flush):
    """Commit with one of the two flushes that belong to it."""
    if flush == "content":
        fsync_folder(temporary)
    os.rename(temporary, final)
    if flush == "parent":
        fsync_folder(final.parent)


def pruned_first(temporary, final):
    """Remove the old steps before the new one has its name."""
    for path in final.parent.glob("step-*"):
        rmtree(path)
    COMMIT_FOLDER(temporary, final)


# Each replaces one name of `folders`.
MUTANTS = {
    "no fsync of the tensors": (
        "write_new_file",
        partial(unflushed, suffix=".safetensors"),
    ),
    "no fsync of the manifest": ("write_new_file", partial(unflushed, suffix=".json")),
    "no fsync of the folder": ("commit_folder", partial(rename_only, flush="parent")),
    "no fsync of the parent": ("commit_folder", partial(rename_only, flush="content")),
    "no fsync of new parents": ("make_folders", partial(os.makedirs, exist_ok=True)),
    "no rename": ("commit_folder", lambda temporary, final: None),
    "old steps removed first": ("commit_folder", pruned_first),
}


@every(mutant=MUTANTS)
def test_every_step_of_the_protocol_is_required(tmp_path, monkeypatch, mutant):
    name, function = MUTANTS[mutant]
    monkeypatch.setattr(folders, name, function)
    assert broken_promises(tmp_path)
