"""Each heavy dependency is imported in one place, so that replacing it is a local change."""

from __future__ import annotations

from tests.contract.tree import imports_of, module_files, top_level_imports_of

OWNERS: dict[str, set[str]] = {
    "fsspec": {"vitscale.data.remote.backends"},
    "deepspeed": {"vitscale.engine.host_waits", "vitscale.engine.layouts"},
    "mlflow": {
        "finetune.serving.logged_model",
        "vitscale.tracking.mlflow_client",
        "vitscale.tracking.mlflow_store",
        "vitscale.tracking.replay",
        "vitscale.tracking.system_metrics",
    },
    "submitit": {"launch.jobs.submission"},
    # Tests and benchmarks read our shards with it, too.
    "webdataset": {"vitscale.data.tars.scan", "vitscale.data.tars.stream"},
    "timm": {"vitscale.models"},
    "sklearn": {"data_prep.images.made.digits"},
    "isal": {"vitscale.images.png_webp.png"},
    "simplejpeg": {"vitscale.images.decoders", "vitscale.images.strict_jpeg"},
}
# Entries of registries, whose settings need no torch, and checkpoint folders, which are listed
# without it; their methods need it. Of these only imports at module level count.
LAZY = (
    "finetune.objectives.registry",
    "finetune.objectives.linear_probe",
    "pretrain.objectives.",
    "vitscale.evaluation.",
    "vitscale.training.",
)
LAZY += ("vitscale.checkpoint.folders",)
TORCHLESS_FOLDERS = ("launch.", "data_prep.", "vitscale.config.", "vitscale.runs.")


def test_only_the_owners_import_heavy_dependencies() -> None:
    """An owner that no longer imports its dependency is an error too."""
    importers: dict[str, set[str]] = {dependency: set() for dependency in OWNERS}
    for module in module_files():
        for name in {name.split(".")[0] for name in imports_of(module)} & OWNERS.keys():
            package = module.startswith("vitscale.models.") and name == "timm"
            importers[name].add("vitscale.models" if package else module)
    assert importers == OWNERS


def test_settings_and_launching_never_import_torch() -> None:
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
            lazy = module.startswith(LAZY)
            names = top_level_imports_of(module) if lazy else imports_of(module)
            if any(name.split(".")[0] in ("torch", "torchvision", "timm") for name in names):
                reached[start] = module
            stack += [name for name in names if name in module_files()]
    assert not reached
