"""Find the stages and the packaged configurations: in a checkout, a snapshot or a wheel.

The name of a configuration is its path: `deit/b16` is configs/deit/b16.yaml.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# setup.py puts the stages and configs/ here in a wheel.
INSIDE = PACKAGE / "_app"
IS_WHEEL = INSIDE.is_dir()
# A checkout, a snapshot (launch/jobs/snapshot.py), or the wheel's folder.
PROJECT_ROOT = INSIDE if IS_WHEEL else PACKAGE.parent
CONFIGS = PROJECT_ROOT / "configs"


@cache
def config_names() -> tuple[str, ...]:
    files = CONFIGS.rglob("*.yaml")
    return tuple(sorted(str(each.relative_to(CONFIGS).with_suffix("")) for each in files))


def find_config(path: str) -> str:
    """The file of a path, or else of a name: `cifar10/vit_tiny`, or `vit_tiny`, as it is alone.

    Returns the path where nothing is found.
    """
    if os.path.exists(path):
        return path
    name = path.removeprefix("configs/").removesuffix(".yaml")
    names = config_names()
    found = [name] if name in names else [each for each in names if each.endswith(f"/{name}")]
    return str(CONFIGS / f"{found[0]}.yaml") if len(found) == 1 else path


def similar_configs(path: str) -> str | None:
    """The next step after an unknown name or path: the names that end like it, or are similar."""
    name = path.removeprefix("configs/").removesuffix(".yaml")
    names = [each for each in config_names() if each.endswith(f"/{name}")]
    names = names[:5] or get_close_matches(name, config_names(), n=5, cutoff=0.5)
    if names:
        return f"did you mean {', '.join(names)}? `vitscale configs` lists all"
    return None if path.endswith((".yaml", ".yml")) else "`vitscale configs` lists all"
