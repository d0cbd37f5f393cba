"""Hold constraints.txt to what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contract.tree import ROOT

PINNED = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)")


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [PINNED.fullmatch(line) for line in lines if not line.startswith("#")]
    assert pins and all(pins), "every line is NAME==VERSION: no paths, hosts or local builds"
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def test_constraints_satisfy_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = map(Requirement, [*project["dependencies"], *extras["demo"], *extras["dev"]])
    pins = _pins()
    wrong = [
        str(asked)
        for asked in wanted
        if canonicalize_name(asked.name) not in pins
        or not asked.specifier.contains(pins[canonicalize_name(asked.name)])
    ]
    assert not wrong, "run: make install LATEST=1, the tests, make constraints"


def test_constraints_leave_cuda_to_torch() -> None:
    """Each build of torch pins its own CUDA libraries: other pins would rule out other builds."""
    assert not [name for name in _pins() if name.startswith(("nvidia-", "cuda-", "triton"))]
