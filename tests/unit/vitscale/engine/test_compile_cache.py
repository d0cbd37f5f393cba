"""The folder of compiled code and its seed: private, whole or not used."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from vitscale.config.errors import UserError
from vitscale.engine.compile_cache import (
    MANIFEST,
    VARIABLE,
    CompileCache,
    open_compile_cache,
    write_archive,
)
from vitscale.engine.settings import EngineSettings

CODE = {"ab/kernel.so": b"\x7fELF", "fxgraph/x/y": b"graph", "triton/0/k/k.cubin": b"gpu"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)


def opened(node: Path, run: Path, **settings: str) -> CompileCache:
    """What a new process on a node gets."""
    os.environ.pop(VARIABLE, None)
    cache = open_compile_cache(
        EngineSettings.model_validate({"compile_cache": str(node), **settings}),
        run_folder=run,
        device=torch.device("cpu"),
    )
    assert cache is not None and os.environ[VARIABLE] == str(cache.folder)
    return cache


def files(folder: Path) -> dict[str, bytes]:
    return {
        each.relative_to(folder).as_posix(): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file()
    }


@pytest.fixture
def compiled(tmp_path: Path) -> CompileCache:
    """A first node that has compiled, and its seed in the run folder."""
    cache = opened(tmp_path / "first", tmp_path)
    assert "empty: no " in cache.message
    for name, data in CODE.items():
        (cache.folder / name).parent.mkdir(parents=True)
        (cache.folder / name).write_bytes(data)
    (cache.folder / "ab/x.lock").write_bytes(b"held")
    assert cache.write_seed() == f"compiled code of 3 files kept in {tmp_path / 'compiled.tar'}"
    return cache


def test_a_new_node_gets_all_files(compiled: CompileCache, tmp_path: Path) -> None:
    cache = opened(tmp_path / "second", tmp_path)
    assert cache.message.endswith(f"3 files from {tmp_path / 'compiled.tar'}")
    assert files(cache.folder) == CODE
    assert os.access(cache.folder / "ab/kernel.so", os.X_OK)
    assert (tmp_path / "second").stat().st_mode & 0o777 == 0o700


def test_ranks_that_start_together_unpack_once(compiled: CompileCache, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        caches = list(pool.map(lambda _: opened(tmp_path / "second", tmp_path), range(8)))
    assert sum("files from" in each.message for each in caches) == 1
    assert {each.folder for each in caches} == {caches[0].folder}
    assert files(caches[0].folder) == CODE


def test_a_seed_is_written_once(compiled: CompileCache) -> None:
    before = compiled.seed.stat()
    (compiled.folder / "later").write_bytes(b"")
    assert compiled.write_seed() is None
    assert compiled.seed.stat() == before


def rewritten(seed: Path, change: Callable[[dict[str, object], dict[str, bytes]], None]) -> None:
    """Write the seed again with another manifest or other members."""
    with tarfile.open(seed) as tar:
        content = {each.name: tar.extractfile(each).read() for each in tar}
    manifest = json.loads(content.pop(MANIFEST))
    change(manifest, content)
    with tarfile.open(seed, "w") as tar:
        for name, data in {MANIFEST: json.dumps(manifest).encode(), **content}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    seed.chmod(0o600)


UNUSABLE = {
    "of torch 1.0": lambda manifest, _: manifest["versions"].update(torch="1.0"),
    "kernel.so is damaged": lambda _, content: content.update({"ab/kernel.so": b"\x7fELG"}),
    "lacks 1 files": lambda _, content: content.pop("triton/0/k/k.cubin"),
    "an unlisted member '../x'": lambda _, content: content.update({"../x": b""}),
    "manifest.json is damaged": lambda manifest, _: manifest.pop("files"),
}


@pytest.mark.parametrize("problem", UNUSABLE)
def test_an_unusable_seed_leaves_an_empty_folder(
    compiled: CompileCache, tmp_path: Path, problem: str
) -> None:
    rewritten(compiled.seed, UNUSABLE[problem])
    cache = opened(tmp_path / "second", tmp_path)
    assert problem in cache.message and "empty" in cache.message
    assert files(cache.folder) == {}
    assert sorted(each.name for each in (tmp_path / "second").iterdir()) == [
        cache.folder.name,
        f"{cache.folder.name}.lock",
    ]


def test_listed_names_stay_inside_the_folder(compiled: CompileCache, tmp_path: Path) -> None:
    def escape(manifest: dict[str, dict[str, object]], content: dict[str, bytes]) -> None:
        manifest["files"]["../x"] = manifest["files"].pop("ab/kernel.so")
        content["../x"] = content.pop("ab/kernel.so")

    rewritten(compiled.seed, escape)
    cache = opened(tmp_path / "second", tmp_path)
    assert "'../x' outside of the folder" in cache.message
    assert files(cache.folder) == {}


@pytest.mark.parametrize("length", [0, 100, 512, 1024, 3000])
def test_a_truncated_seed_is_not_used(compiled: CompileCache, tmp_path: Path, length: int) -> None:
    compiled.seed.write_bytes(compiled.seed.read_bytes()[:length])
    cache = opened(tmp_path / "second", tmp_path)
    assert "empty" in cache.message and files(cache.folder) == {}


def test_a_seed_that_others_can_write_is_not_used(compiled: CompileCache, tmp_path: Path) -> None:
    compiled.seed.chmod(0o620)
    assert "others can write it" in opened(tmp_path / "second", tmp_path).message
    compiled.seed.rename(tmp_path / "real")
    compiled.seed.symlink_to(tmp_path / "real")
    assert "cannot be read" in opened(tmp_path / "third", tmp_path).message


def test_a_seed_of_other_versions_is_replaced(compiled: CompileCache, tmp_path: Path) -> None:
    write_archive(compiled.seed, compiled.folder, versions={"torch": "1.0"})
    said = compiled.write_seed()
    assert said is not None and "3 files kept" in said
    assert files(opened(tmp_path / "second", tmp_path).folder) == CODE


def test_folders_that_others_can_use_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UserError, match=r"engine.compile_cache: .* only you can use"):
        opened(tmp_path / "open", tmp_path)


def test_the_place_follows_variable_setting_and_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, plain = torch.device("cpu"), EngineSettings()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert open_compile_cache(plain, run_folder=tmp_path, device=cpu) is None
    assert os.environ[VARIABLE] == str(tmp_path / "home/vitscale/compiled")
    # A folder that the user has set stays.
    node = EngineSettings(compile_cache=str(tmp_path / "node"))
    assert open_compile_cache(node, run_folder=tmp_path, device=cpu) is None
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = open_compile_cache(plain, run_folder=tmp_path, device=cpu)
    assert cache is not None and cache.folder.parent == tmp_path / f"vitscale-{os.getuid()}"


def test_a_configured_seed_is_shared_by_runs(tmp_path: Path) -> None:
    seed = str(tmp_path / "seed.tar")
    first = opened(tmp_path / "a", tmp_path / "run1", compile_seed=seed)
    (first.folder / "code").write_bytes(b"x")
    assert first.write_seed() == f"compiled code of 1 files kept in {seed}"
    second = opened(tmp_path / "b", tmp_path / "run2", compile_seed=seed)
    assert files(second.folder) == {"code": b"x"}


def test_a_seed_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a", tmp_path / "missing")
    said = cache.write_seed()
    assert said is not None and said.startswith("compiled code is not kept: ")
