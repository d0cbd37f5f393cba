"""Version of the source code: from git, or as recorded when a snapshot of it was taken.

All functions return None outside a checkout and a snapshot, and where git is missing.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

# A checkout, a snapshot (launch/jobs/snapshot.py), or site-packages.
PROJECT_ROOT = Path(__file__).resolve().parents[2]
# What jobs run; changes elsewhere in the checkout do not count.
CODE_FOLDERS = ("configs", "data_prep", "finetune", "launch", "pretrain", "vitscale")
# In the root of a snapshot, which lies in a run folder that may be inside a checkout.
RECORD_NAME = "source.json"
TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceVersion:
    """A commit, and how the code differs from it."""

    commit: str
    """Full hash."""
    patch: str
    """Names of files that are neither committed nor ignored, and edits. Empty without any."""

    @property
    def short(self) -> str:
        """The commit in 12 characters; if the code differs from it, + and a hash of how."""
        changes = f"+{hashlib.sha256(self.patch.encode()).hexdigest()[:8]}" if self.patch else ""
        return self.commit[:12] + changes


def source_version(root: Path = PROJECT_ROOT) -> SourceVersion | None:
    """The version of the code in `root`."""
    try:
        recorded = json.loads((root / RECORD_NAME).read_text())
        return SourceVersion(**recorded) if recorded else None
    except (OSError, ValueError, TypeError):
        pass
    commit = _git("rev-parse", "HEAD", root=root)
    options = ("--no-ext-diff", "--no-color", "--relative")
    diff = _git("diff", "HEAD", *options, "--", *CODE_FOLDERS, root=root)
    others = ("ls-files", "--others", "--exclude-standard", "-z", "--", *CODE_FOLDERS)
    untracked = _git(*others, root=root)
    if commit is None or diff is None or untracked is None:
        return None
    names = "".join(f"# untracked: {name}\n" for name in sorted(untracked.split("\0")) if name)
    return SourceVersion(commit=commit.strip(), patch=names + diff)


def _git(*arguments: str, root: Path) -> str | None:
    """What git prints in `root`; None if it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
