"""Version of the source code: from git, or as recorded when a snapshot of it was taken.

All functions return None outside a checkout and a snapshot, and where git is missing.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# A checkout, a snapshot (launch/jobs/snapshot.py), or site-packages.
PROJECT_ROOT = Path(__file__).resolve().parents[2]
# What jobs run; changes elsewhere in the checkout do not count.
CODE_FOLDERS = ("configs", "data_prep", "finetune", "launch", "pretrain", "vitscale")
# In the root of a snapshot, which lies in a run folder that may be inside a checkout.
RECORD_NAME = "source.json"
TIMEOUT_S = 30
SHORT_CHARS, DIFF_HASH_CHARS = 12, 8
MAX_DIFF_CHARS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceVersion:
    """A commit, and how the code differs from it."""

    commit: str
    """Full hash."""
    diff: str
    """Edits of tracked files as a patch; empty without edits."""
    untracked: tuple[str, ...]
    """Files that are neither committed nor ignored."""

    @property
    def is_dirty(self) -> bool:
        return bool(self.diff or self.untracked)

    @property
    def short(self) -> str:
        """The commit in 12 characters; if the code differs from it, + and a hash of how."""
        if not self.is_dirty:
            return self.commit[:SHORT_CHARS]
        changes = hashlib.sha256("\0".join([self.diff, *self.untracked]).encode()).hexdigest()
        return f"{self.commit[:SHORT_CHARS]}+{changes[:DIFF_HASH_CHARS]}"

    @property
    def patch(self) -> str:
        """The edits, with the names of untracked files first. Empty for a clean commit."""
        return "".join(f"# untracked: {name}\n" for name in self.untracked) + self.diff

    def record(self) -> dict[str, Any]:
        """For the record of a snapshot."""
        return asdict(self) | {"dirty": self.is_dirty}


def source_version(root: Path = PROJECT_ROOT) -> SourceVersion | None:
    """The version of the code in `root`."""
    if (recorded := _recorded(root)) is not None:
        return recorded
    commit = git_output("rev-parse", "HEAD", root=root)
    options = ("--no-ext-diff", "--no-color", "--relative")
    diff = git_output("diff", "HEAD", *options, "--", *CODE_FOLDERS, root=root)
    untracked = list_files("--others", root=root)
    if commit is None or diff is None or untracked is None:
        return None
    if len(diff) > MAX_DIFF_CHARS:
        diff = f"{diff[:MAX_DIFF_CHARS]}\n... ({len(diff)} characters)"
    return SourceVersion(commit=commit.strip(), diff=diff, untracked=tuple(untracked))


def list_files(*which: str, root: Path) -> list[str] | None:
    """Files below CODE_FOLDERS that git does not ignore; `which`: --cached, --others."""
    listed = git_output(
        "ls-files", "-z", *which, "--exclude-standard", "--", *CODE_FOLDERS, root=root
    )
    return None if listed is None else sorted({name for name in listed.split("\0") if name})


def git_output(*arguments: str, root: Path) -> str | None:
    """What git prints in `root`; None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def _recorded(root: Path) -> SourceVersion | None:
    try:
        found = json.loads((root / RECORD_NAME).read_text())
        return SourceVersion(
            commit=found["commit"], diff=found["diff"], untracked=tuple(found["untracked"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
