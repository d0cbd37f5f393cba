"""Each heavy dependency is imported in one place, so that replacing it is a local change."""

from __future__ import annotations

import pytest

from tests.contract.tree import imports_of, module_files

OWNERS = {
    "fsspec": {"vitscale.data.remote.store"},
    "deepspeed": {"vitscale.engine.engine"},
    "mlflow": {"vitscale.tracking.mlflow_store"},
    "submitit": {"launch.jobs.submission"},
    "webdataset": {"data_prep.shards.tar_writer"},
    "timm": {"vitscale.models.vit"},
    "sklearn": {"data_prep.make_digits"},
    "simplejpeg": {"vitscale.images.decoders", "vitscale.images.strict_jpeg"},
}
TORCHLESS_FOLDERS = ("launch.", "data_prep.", "vitscale.config.", "vitscale.runs.")


@pytest.mark.parametrize("dependency", OWNERS)
def test_only_the_owner_imports(dependency: str) -> None:
    importers = {
        module
        for module in module_files()
        if any(name.split(".")[0] == dependency for name in imports_of(module))
    }
    assert importers <= OWNERS[dependency], f"only {OWNERS[dependency]} may import {dependency}"


@pytest.mark.parametrize("dependency", OWNERS)
def test_owners_exist(dependency: str) -> None:
    assert OWNERS[dependency] <= set(module_files())


def test_settings_and_launching_never_reach_torch() -> None:
    """Followed through all own imports, since a login node may have no torch at all."""
    reached = {}
    for start in module_files():
        if not start.startswith(TORCHLESS_FOLDERS) and not start.endswith(".settings"):
            continue
        stack, seen = [start], set()
        while stack:
            module = stack.pop()
            if module in seen:
                continue
            seen.add(module)
            names = imports_of(module)
            if any(name.split(".")[0] in ("torch", "torchvision", "timm") for name in names):
                reached[start] = module
            stack += [name for name in names if name in module_files()]
    assert not reached
