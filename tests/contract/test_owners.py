"""Each heavy dependency is imported in one place, so that replacing it is a local change.

And processes start in one way: none that may have threads forks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.contract.tree import (
    ROOT,
    imports_of,
    module_files,
    parsed,
    python_files,
    top_level_imports_of,
)

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


# Of multiprocessing: they start processes by the default method, which may be fork.
OF_DEFAULT_CONTEXT = {
    *("Process", "Pool", "Manager", "Queue", "JoinableQueue", "SimpleQueue"),
    *("Lock", "RLock", "Semaphore", "Condition", "Event", "Barrier", "Value", "Array"),
}
FORKS = """
os.fork()
os.forkpty()
pty.fork()
get_context("fork")
multiprocessing.get_context()
multiprocessing.set_start_method("fork")
multiprocessing.Pool(2)
mp.Process(target=f)
from multiprocessing import Queue
ProcessPoolExecutor(2)
DataLoader(data, num_workers=2)
WebLoader(data, num_workers=n)
DataLoader(data, num_workers=2, multiprocessing_context="fork")
subprocess.run(command, preexec_fn=f)
"""


def _forks(tree: ast.AST) -> Iterator[int]:
    """Lines that fork this process, or may do so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "multiprocessing":
            if OF_DEFAULT_CONTEXT & {alias.name for alias in node.names}:
                yield node.lineno
        if not isinstance(node, ast.Call):
            continue
        owner, _, name = ast.unparse(node.func).rpartition(".")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        values = [*node.args, *given.values()]
        texts = {value.value for value in values if isinstance(value, ast.Constant)}
        has_workers = "num_workers" in given and ast.unparse(given["num_workers"]) != "0"
        if (
            (owner in ("os", "pty") and name in ("fork", "forkpty"))
            or (name in ("get_context", "set_start_method") and (not values or "fork" in texts))
            or (owner in ("multiprocessing", "mp") and name in OF_DEFAULT_CONTEXT)
            or (name == "ProcessPoolExecutor" and len(node.args) < 2 and "mp_context" not in given)
            or (has_workers and name.endswith("Loader") and "multiprocessing_context" not in given)
            or ("multiprocessing_context" in given and "fork" in texts)
            or "preexec_fn" in given
        ):
            yield node.lineno


def test_no_process_forks() -> None:
    """The child would wait for ever for a lock that another thread held (`fork_server`)."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files()
        if not path.is_relative_to(ROOT / "tests")
        for line in _forks(parsed(path))
    ]
    assert not found, "use vitscale.distributed.fork_server.worker_context"
    lines = FORKS.strip().splitlines()
    assert [line for line in lines if list(_forks(ast.parse(line)))] == lines
