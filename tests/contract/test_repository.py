"""Files beside the code agree: the locked versions, the site files of containers."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contract.tree import ROOT

VERSION = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)


def _versions(name: str) -> dict[str, str]:
    found = VERSION.findall((ROOT / name).read_text())
    return {canonicalize_name(package): version for package, version in found}


def test_the_lock_has_the_versions_last_tested() -> None:
    locked, tested = _versions("requirements.lock"), _versions("constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    assert needed <= set(locked), "renew it: make lock"
    both = locked.keys() & tested.keys()
    assert {name: locked[name] for name in both} == {name: tested[name] for name in both}


@pytest.mark.parametrize("name", ["apptainer", "pyxis"])
def test_the_site_files_of_containers_are_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = f"containers/{name}.yaml"
    monkeypatch.setenv("VITSCALE_SITE", site)
    command = [sys.executable, "launch/slurm.py", "--config", "configs/vit_h14.yaml"]
    shown = subprocess.run(
        [*command, "--print-config"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert f"{site}:3" in shown and "/images/vitscale.s" in shown


def test_the_docs_show_the_site_file_of_apptainer() -> None:
    _, _, settings = (ROOT / "containers/apptainer.yaml").read_text().partition("\n")
    assert settings in (ROOT / "docs/containers.md").read_text()
