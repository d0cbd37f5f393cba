"""`vitscale demo` of a wheel, with a third of the training steps; which images it takes.

The accuracy of the full demo in the README is measured by hand.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from launch.demo import folder_of_classes, link_some, name_of
from tests.contract.tree import PACKAGES
from tests.support.runs import journal
from tests.support.tables import refused
from tests.support.waiting import ROOT

# What a job of this wheel imports, as it lies in a checkout.
LIST_SNAPSHOT = (
    "from launch.jobs.snapshot import read_code; print(*read_code(), sep='\\n')"
)
BUILD_SDIST = "from setuptools.build_meta import build_sdist; build_sdist('..')"


def final_top1(run: Path) -> float:
    *_, last = journal(run, "val/top1")["val/top1"]
    return last


def shorten(config: Path):
    """Leave a third of the steps."""
    text = config.read_text()
    (steps,) = re.findall(r"^  steps: (\d+)$", text, flags=re.M)
    third = int(steps) // 3
    config.write_text(text.replace(f"  steps: {steps}\n", f"  steps: {third}\n"))


def installed_wheel(folder: Path) -> tuple[Path, Path]:
    """A wheel, built from an sdist, and the Python of a venv with it, which does not know the
    checkout.

    All other packages come from the venv of the tests: a .pth file adds its site-packages. Python
    does not read the .pth files there, among them that of the editable install.
    """
    # Without what is built: the wheel must build it from the sources in the sdist.
    source = folder / "source"
    not_built = shutil.ignore_patterns("*.so")
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=not_built)
    for name in "pyproject.toml setup.py README.md LICENSE".split():
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", BUILD_SDIST], cwd=source, check=True)

    # Without a network: setuptools and everything else is in the venv of the tests.
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([*build, *folder.glob("*.tar.gz")], check=True)
    [wheel] = folder.glob("*.whl")

    venv = folder / "venv"
    site = f"lib/python{sysconfig.get_python_version()}/site-packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin/python"
    subprocess.run([*pip, "--python", python, "install", *offline, wheel], check=True)
    (venv / site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return wheel, python


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1500)
def test_the_demo_of_a_wheel_learns_and_transfers(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    wheel, python = installed_wheel(tmp_path / "build")
    # One package: `launch` or `configs` beside it would be names for all of site-packages.
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"vitscale"}
    ask = "import vitscale, vitscale.images.jpeg._region; print(vitscale.__path__[0])"
    package = Path(subprocess.check_output([python, "-c", ask], text=True).strip())
    assert package.is_relative_to(tmp_path)
    list_snapshot = [python, "-c", LIST_SNAPSHOT]
    environment = {"PYTHONPATH": str(package / "_app")}
    listed = subprocess.check_output(list_snapshot, text=True, env=environment)
    names = set(listed.splitlines())
    assert {"vitscale/command.py", "pretrain/main.py", "configs/vit_b16.yaml"} <= names
    assert any(name.endswith("/_region.abi3.so") for name in names)
    assert "_app" not in listed
    for stage in ("pretrain", "finetune"):
        shorten(package / f"_app/configs/demo/{stage}.yaml")
    demo = [python.with_name("vitscale"), "demo"]
    finished = subprocess.run(demo, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr
    runs = tmp_path / "runs"
    pretrained = final_top1(runs / "demo-pretrain")
    finetuned = final_top1(runs / "demo-finetune")
    scratch = final_top1(runs / "demo-scratch")

    # Measured once: 29.6, 42.9 and 31.2 %; one class of 53 is 1.9 %.
    assert pretrained >= 0.2
    assert finetuned >= pretrained + 0.05
    assert finetuned >= scratch + 0.05
    assert f"{100 * finetuned:.1f} %" in finished.stdout
    assert f"Made in {tmp_path}:" in finished.stdout
    report = (runs / "demo/report.html").read_text()
    assert "demo-finetune" in report
    assert "data:image/png;base64" in report


def test_at_most_200_images_of_each_class_are_taken(tmp_path):
    # Images in a folder of a class; a hidden folder, and a hidden file of macOS, are no images.
    source = tmp_path / "in"
    links = tmp_path / "out"
    for name, num in (("cat", 450), ("dog", 3), (".cache", 2)):
        folder = source / name / "sub"
        folder.mkdir(parents=True)
        for number in range(num):
            (folder / f"{number}.JPEG").touch()
    (source / "cat/._1.jpg").touch()
    for _ in range(2):  # started, resumed
        link_some(source, links)
        # Spread over the class: every third of 450.
        counts = {path.name: len([*path.iterdir()]) for path in links.iterdir()}
        assert counts == {"cat": 150, "dog": 3}
    with refused("no class folders with images"):
        link_some(source / "cat/sub", links)


def test_folders_of_one_name_are_different_demos(tmp_path):
    """A folder that has changed, too: its shards would be those of the images before."""
    first, *others = [tmp_path / name for name in ("a/photos", "b/photos", "b/photos!")]
    for folder in (first, *others):
        (folder / "cat").mkdir(parents=True)
        (folder / "cat/1.jpg").touch()
    names = {name_of(folder) for folder in (first, *others)}
    assert len(names) == 3
    assert all(name.startswith("demo-photos-") for name in names)

    # A file that Windows leaves is no change; an image in another class is one.
    (first / "Thumbs.db").touch()
    assert name_of(first) in names
    (first / "cat/1.jpg").rename(first / "1.jpg")
    assert name_of(first) not in names

    # It becomes part of names of files, which may have 255 bytes.
    long = tmp_path / ("x" * 200)
    long.mkdir()
    assert len(name_of(long)) < 100


def test_the_demo_takes_classes_and_not_splits(tmp_path, capsys):
    folder = tmp_path / "in"
    for split in ("Train", "val"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
    assert folder_of_classes(folder) == folder / "Train"
    assert "takes images of train alone" in capsys.readouterr().out
    assert folder_of_classes(folder / "Train") == folder / "Train"
    # With a third folder they may be splits, or classes: nobody can tell.
    (folder / "preview").mkdir()
    with refused("DATA=.*named like splits.*(.|\n)*such as .*/in/train"):
        folder_of_classes(folder)
