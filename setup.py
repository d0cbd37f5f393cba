"""Put the stages and configs/ inside the `vitscale` package of a wheel: it installs one name.

In a checkout they stay where they are. Everything else is in pyproject.toml.
"""

import sys

from setuptools import find_packages, setup

STAGES = ("data_prep", "finetune", "launch", "pretrain")
INSIDE = "vitscale._app"

packages = find_packages(include=["vitscale", "vitscale.*"])
stages = find_packages(
    include=[pattern for name in STAGES for pattern in (name, f"{name}.*")]
)
package_dir = {}
if "editable_wheel" in sys.argv:
    packages += stages
else:
    packages += [f"{INSIDE}.{name}" for name in (*stages, "configs")]
    package_dir = {f"{INSIDE}.{name}": name for name in (*STAGES, "configs")}

# One wheel serves all versions of Python from 3.11 on.
options = {"bdist_wheel": {"py_limited_api": "cp311"}}
setup(packages=packages, package_dir=package_dir, options=options)
