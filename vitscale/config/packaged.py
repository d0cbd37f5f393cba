"""Find the stages and the packaged configurations, and the version of the code: in a checkout, a
snapshot of it or a wheel.

The name of a configuration is its path: `deit/b16` is configs/deit/b16.yaml.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
# setup.py puts the stages and configs/ here in a wheel.
INSIDE = PACKAGE / "_app"
IS_WHEEL = INSIDE.is_dir()
# A checkout, a snapshot (launch/jobs/snapshot.py), or the wheel's folder.
PROJECT_ROOT = INSIDE if IS_WHEEL else PACKAGE.parent
CONFIGS = PROJECT_ROOT / "configs"
# Written by docs/settings_page.py.
COMPLETED_KEYS = PACKAGE / "config/completed_keys.txt"
# Jobs run these; changes elsewhere in the checkout do not count.
CODE_FOLDERS = ("configs", "data_prep", "finetune", "launch", "pretrain", "vitscale")
# It is in the root of a snapshot, whose run folder may be inside a checkout.
RECORD_NAME = "source.json"
TIMEOUT_S = 30


@cache
def config_names() -> tuple[str, ...]:
    files = CONFIGS.rglob("*.yaml")
    return tuple(
        sorted(str(each.relative_to(CONFIGS).with_suffix("")) for each in files)
    )


def find_config(path: str) -> str:
    """The file of a path, or else of a name: `cifar10/vit_tiny`, or `vit_tiny`, as it is alone; a
    copy in configs/ here comes first. Returns the path where nothing is found."""
    path = os.path.expanduser(path)
    if os.path.exists(path):
        return path
    found = _named(path)
    # Several configurations may have this last part, and then the name says too little.
    if len(found) != 1:
        return path
    file = f"configs/{found[0]}.yaml"
    if os.path.exists(file):
        return file
    return str(PROJECT_ROOT / file)


def _named(path: str) -> list[str]:
    """The name that a path stands for, or else those that end like it."""
    # Names may be given as paths of the checkout, too, which tab completion makes.
    name = path.removeprefix("configs/").removesuffix(".yaml")
    if name in config_names():
        return [name]
    return [each for each in config_names() if each.endswith(f"/{name}")]


def similar_configs(path: str) -> str:
    """The next step after an unknown name or path: the names that end like it, or are similar."""
    from difflib import get_close_matches  # for errors alone

    name = path.removeprefix("configs/").removesuffix(".yaml")
    names = _named(name)[:5] or get_close_matches(name, config_names(), n=5, cutoff=0.5)
    if names:
        return f"did you mean {', '.join(names)}? `vitscale configs` lists all"
    return "`vitscale configs` lists all"


class SourceVersion(NamedTuple):
    """A commit, and how the code differs from it."""

    commit: str
    """Full hash; of a wheel, the tag of its release."""
    patch: str
    """Names of files that are neither committed nor ignored, and edits. Empty without any."""

    @property
    def short(self) -> str:
        """The commit in 12 characters; if the code differs from it, + and a hash of how."""
        import hashlib

        changes = ""
        if self.patch:
            changes = f"+{hashlib.sha256(self.patch.encode()).hexdigest()[:8]}"
        return self.commit[:12] + changes


def source_version(root: Path = PROJECT_ROOT) -> SourceVersion | None:
    """The version of the code in `root`; None outside a checkout and a snapshot, or without git."""
    # Imported here, not at the start of every command.
    import json
    import subprocess
    from importlib.metadata import version

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        done = subprocess.run(
            command, check=True, capture_output=True, timeout=TIMEOUT_S
        )
        return done.stdout.decode("utf-8", "replace")

    if root == INSIDE:
        # A wheel has no repository; its release has a tag.
        return SourceVersion(commit=f"v{version('vitscale')}", patch="")
    # A snapshot or an image has a record instead of a repository.
    with suppress(OSError, ValueError, TypeError):
        recorded = json.loads((root / RECORD_NAME).read_text())
        if recorded:
            return SourceVersion(**recorded)
        return None
    try:
        commit = git("rev-parse", "HEAD").strip()
        options = ("HEAD", "--no-ext-diff", "--no-color", "--relative", "--")
        diff = git("diff", *options, *CODE_FOLDERS)
        # Paths are separated by NUL, since names of files may have line feeds.
        untracked = git(
            "ls-files", "--others", "--exclude-standard", "-z", "--", *CODE_FOLDERS
        )
    except (OSError, subprocess.SubprocessError):
        return None

    names = "".join(
        f"# untracked: {name}\n" for name in sorted(untracked.split("\0")) if name
    )
    return SourceVersion(commit=commit, patch=names + diff)
