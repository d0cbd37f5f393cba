"""Label spaces known by name: ImageNet's releases, from files of timm, which is not imported."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from vitscale.config.errors import UserError

# Lists of WordNet ids in timm. Their lengths identify the releases: 1,000; 11,821; 21,843;
# 21,841; 11,221 (21k-P of the autumn 2011 release) and 10,450 (of the winter 2021 release).
LABEL_SPACES = {
    "imagenet_1k": "imagenet_synsets.txt",
    "imagenet_12k": "imagenet12k_synsets.txt",
    "imagenet_21k_goog": "imagenet21k_goog_synsets.txt",
    "imagenet_22k": "imagenet22k_synsets.txt",
    "imagenet_21k_p": "imagenet21k_miil_synsets.txt",
    "imagenet_21k_p_winter21": "imagenet21k_miil_w21_synsets.txt",
}
# The classes of evaluation sets, in the order of ImageNet-1k's.
SUBSETS = {
    "imagenet_a": "imagenet_a_synsets.txt",
    "imagenet_r": "imagenet_r_synsets.txt",
}


@cache
def known_space(name: str) -> tuple[str, ...]:
    """Class names of one of LABEL_SPACES or SUBSETS, in the order of labels. Raises UserError."""
    file = (LABEL_SPACES | SUBSETS)[name]
    return tuple(timm_file(file, where="labels.space").read_text().split())


def timm_file(name: str, *, where: str) -> Path:
    """A file of timm's lists. Raises UserError if the installed timm lacks it."""
    # `find_spec` locates the package without importing it, which would import torch as well.
    spec = importlib.util.find_spec("timm")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "data/_info" / name
        if path.is_file():
            return path
    what = f"{name} comes with timm, and the installed timm has none"
    raise UserError(what, where=where, next_step="pip install -U timm")
