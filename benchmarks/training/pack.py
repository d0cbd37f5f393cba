"""Pack what the GPU benchmark needs into one folder, for a machine without internet.

    python benchmarks/training/pack.py PACK                     # here; for Python 3.12, x86-64
    bash PACK/start.sh python3 benchmarks/gpu_training.py --call 1 --out OUT    # on that machine

PACK has every package beyond torch, torchvision and what these bring themselves, deepspeed built
as a wheel, the decoders' extensions and their libjpeg. start.sh unpacks it once, puts the
extensions into the checkout, and runs the command given. Versions are those of constraints.txt.

Owns: what is packed, and the check that it is complete. Exit code 1: something is missing.
Leaves out: torch, torchvision and numpy, which must be on the machine already.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JPEG_EXTENSION = "vitscale/images/jpeg/_region.abi3.so"
PNG_EXTENSION = "vitscale/images/png_webp/_png.abi3.so"
MAX_MIB = 60
# Module by package. Pillow and typing-extensions come with torch and torchvision.
PACKED = {
    **{"timm": "timm", "deepspeed": "deepspeed", "pyarrow": "pyarrow", "psutil": "psutil"},
    **{"msgpack": "msgpack", "py-cpuinfo": "cpuinfo", "einops": "einops", "hjson": "hjson"},
    **{"pydantic": "pydantic", "pydantic_core": "pydantic_core", "blake3": "blake3"},
    **{"annotated-types": "annotated_types", "typing-inspection": "typing_inspection"},
    **{"typing_extensions": "typing_extensions", "simplejpeg": "simplejpeg", "ninja": "ninja"},
    **{"isal": "isal"},
    **{"safetensors": "safetensors", "PyYAML": "yaml", "tqdm": "tqdm", "packaging": "packaging"},
}
FROM_SOURCE = "deepspeed"
NEED_TORCH = ("timm", "deepspeed", "simplejpeg")  # simplejpeg needs numpy
ON_THE_MACHINE = ("torch", "torchvision", "numpy")
# Headers, tests and services that no import needs: half of the size.
LEFT_OUT = ("pyarrow/include", "pyarrow/src", "pyarrow/tests", "pyarrow/libarrow_flight.so.*")
GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)
START = """#!/bin/bash
# Unpack once, then run the command given: bash PACK/start.sh COMMAND ...
set -e
pack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
site=${PACK_SITE:-/tmp/vitscale-site}
if [ ! -e "$site/complete" ]; then
    mkdir -p "$site"
    tar -xJf "$pack/site.tar.xz" -C "$site"
    touch "$site/complete"
fi
[ -e JPEG ] || cp "$pack/jpeg.so" JPEG
[ -e PNG ] || cp "$pack/png.so" PNG
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
export LD_LIBRARY_PATH="$site/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$@"
""".replace("JPEG", JPEG_EXTENSION).replace("PNG", PNG_EXTENSION)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to put it")
    parser.add_argument("--python", default="3.12", help="version of that machine's Python")
    parser.add_argument("--interpreter", help="of that version, to import the packages with")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    shutil.rmtree(folder / "site", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as wheels:
        download(Path(wheels), python=options.python)
        install(Path(wheels), folder / "site", python=options.python)
    add_extensions(folder)
    check(folder / "site", options.interpreter or f"python{options.python}", options.python)
    run(["tar", "-cJf", folder / "site.tar.xz", "-C", folder / "site", "."], XZ_OPT="-2")
    shutil.rmtree(folder / "site")
    (folder / "start.sh").write_text(START)
    mib = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    print(f"{folder}: {mib:.1f} MiB for Python {options.python}")
    if mib > MAX_MIB:
        sys.exit(f"{folder} is larger than {MAX_MIB} MiB")


def run(command: Iterable[str | Path], **more: str) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout[-3000:]}")


def pinned() -> dict[str, str]:
    """PACKAGE==VERSION by package, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = {canonical(line.partition("==")[0]): line.strip() for line in lines if "==" in line}
    return {name: versions[canonical(name)] for name in PACKED}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def platform_options(python: str) -> list[str]:
    """pip compares a platform's number exactly, so each one is named."""
    tag = f"cp{python.replace('.', '')}"
    platforms = [f"manylinux_2_{number}_x86_64" for number in GLIBC]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "any"]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for abi in (tag, "abi3", "none"):
        options += ["--abi", abi]
    for name in platforms:
        options += ["--platform", name]
    return options


def download(wheels: Path, *, python: str) -> None:
    versions = pinned()
    source = versions.pop(FROM_SOURCE)
    pip = [sys.executable, "-m", "pip"]
    run(
        [*pip, "download", "--no-deps", "-d", wheels, *platform_options(python), *versions.values()]
    )
    # None of its operators is compiled, so the wheel runs on any machine.
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    run(build, DS_BUILD_OPS="0", DS_ACCELERATOR="cpu")


def install(wheels: Path, site: Path, *, python: str) -> None:
    files = sorted(wheels.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile"]
    run([*pip, "--target", site, *platform_options(python), *files])
    for pattern in LEFT_OUT:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def add_extensions(folder: Path) -> None:
    """The extensions, and the libjpeg that one was linked with."""
    for name, extension in (("jpeg.so", JPEG_EXTENSION), ("png.so", PNG_EXTENSION)):
        if not (ROOT / extension).exists():
            sys.exit(f"{extension} is not built; run: make install")
        shutil.copy(ROOT / extension, folder / name)
    found = subprocess.run(["ldd", str(folder / "jpeg.so")], capture_output=True, text=True).stdout
    library = re.search(r"(libjpeg\S*) => (\S+)", found)
    if library is None:
        sys.exit(f"{JPEG_EXTENSION} is linked with no libjpeg")
    (folder / "site/lib").mkdir(exist_ok=True)
    shutil.copy(library[2], folder / "site/lib" / library[1])


def check(site: Path, interpreter: str, python: str) -> None:
    """Import the packages from `site` alone; torch and numpy from here, if of the same version."""
    missing = [module for module in PACKED.values() if not list(site.glob(f"{module}*"))]
    if missing:
        sys.exit(f"not packed: {', '.join(missing)}")
    if shutil.which(interpreter) is None:
        print(f"no {interpreter} here: the packages were not imported")
        return
    same = python == f"{sys.version_info.major}.{sys.version_info.minor}"
    modules = [each for each in PACKED.values() if same or each not in NEED_TORCH]
    with tempfile.TemporaryDirectory() as beside:
        if same:
            link_packages(Path(beside), ON_THE_MACHINE)
        paths = [str(site), beside]
        code = f"import sys; sys.path[:0] = {paths!r}; import {', '.join(modules)}"
        if same:
            code += f"; sys.path.insert(0, {str(ROOT)!r})"
            code += "; import benchmarks.gpu_training as b; b.import_sections()"
            code += "; import data_prep.make_shards, data_prep.pipeline.runner"
        run([interpreter, "-I", "-S", "-c", code], LD_LIBRARY_PATH=str(site / "lib"))
    print(f"{interpreter} imports {', '.join(modules)}{' and all sections' * same}")


def link_packages(folder: Path, names: Iterable[str]) -> None:
    """Links to packages installed here and to all that they need, and to nothing else."""
    seen: set[str] = set()
    left = list(names)
    while left:
        name = canonical(left.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in package.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(package.locate_file(top))))
        needs = [need for need in package.requires or [] if "extra ==" not in need]
        left += [re.split(r"[^A-Za-z0-9._-]", need)[0] for need in needs]


if __name__ == "__main__":
    main()
