"""Git version of the source tree.

Both functions return None outside a checkout and where git is missing.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE_FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 30
SHORT_CHARS = 12


def git_commit() -> str | None:
    """Full hash of the checked-out commit."""
    return _git("rev-parse", "HEAD")


def code_version() -> str | None:
    """Short hash of the commit, with '+' if tracked files were edited."""
    commit, edited = git_commit(), _git("status", "--porcelain", "--untracked-files=no")
    if commit is None or edited is None:
        return None
    return commit[:SHORT_CHARS] + ("+" if edited else "")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(SOURCE_FOLDER), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.strip()
