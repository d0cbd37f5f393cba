"""Version of the source code: from git, of a wheel its release, or as recorded in a snapshot."""

from __future__ import annotations

import hashlib
import json
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from vitscale.config.packaged import INSIDE, PROJECT_ROOT

# What jobs run; changes elsewhere in the checkout do not count.
CODE_FOLDERS = ("configs", "data_prep", "finetune", "launch", "pretrain", "vitscale")
# In the root of a snapshot, which lies in a run folder that may be inside a checkout.
RECORD_NAME = "source.json"
TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceVersion:
    """A commit, and how the code differs from it."""

    commit: str
    """Full hash; of a wheel, the tag of its release."""
    patch: str
    """Names of files that are neither committed nor ignored, and edits. Empty without any."""

    @property
    def short(self) -> str:
        """The commit in 12 characters; if the code differs from it, + and a hash of how."""
        changes = f"+{hashlib.sha256(self.patch.encode()).hexdigest()[:8]}" if self.patch else ""
        return self.commit[:12] + changes


def source_version(root: Path = PROJECT_ROOT) -> SourceVersion | None:
    """The version of the code in `root`; None outside a checkout and a snapshot, or without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
        return done.stdout.decode("utf-8", "replace")

    if root == INSIDE:
        return SourceVersion(commit=f"v{version('vitscale')}", patch="")
    with suppress(OSError, ValueError, TypeError):
        recorded = json.loads((root / RECORD_NAME).read_text())
        return SourceVersion(**recorded) if recorded else None
    try:
        commit = git("rev-parse", "HEAD").strip()
        options = ("HEAD", "--no-ext-diff", "--no-color", "--relative", "--")
        diff = git("diff", *options, *CODE_FOLDERS)
        untracked = git("ls-files", "--others", "--exclude-standard", "-z", "--", *CODE_FOLDERS)
    except (OSError, subprocess.SubprocessError):
        return None
    names = "".join(f"# untracked: {name}\n" for name in sorted(untracked.split("\0")) if name)
    return SourceVersion(commit=commit, patch=names + diff)
