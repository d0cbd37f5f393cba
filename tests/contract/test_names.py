"""File names that would shadow a module, and vague names."""

from __future__ import annotations

import sys
from importlib.metadata import packages_distributions

from tests.contract.tree import PACKAGES, ROOT, STAGES, module_files, scripts

VAGUE = {"utils", "util", "common", "misc", "helpers", "helper", "stuff", "lib"}


def test_no_file_beside_a_script_shadows_a_module() -> None:
    """`python launch/x.py` puts launch/ first on the path: launch/queue.py would hide `queue`."""
    installed = {
        name for name, owners in packages_distributions().items() if owners != ["vitscale"]
    }
    # evaluate, datasets: dependencies of dependencies, not installed everywhere.
    taken = sys.stdlib_module_names | installed | set(PACKAGES) | {"evaluate", "datasets"}
    # Deeper ones run as `python -m`, which puts no folder first.
    folders = {module_files()[s].parent for s in scripts() if s.count(".") == 1}
    assert {folder.name for folder in folders} == set(STAGES)
    names = [
        path for folder in folders for path in folder.iterdir() if not path.name.startswith("__")
    ]
    assert not [str(path.relative_to(ROOT)) for path in names if path.stem in taken]


def test_no_module_has_a_vague_name() -> None:
    assert not [m for m in module_files() if VAGUE & set(m.split("."))]
