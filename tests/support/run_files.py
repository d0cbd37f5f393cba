"""A small valid run file, and the errors of a file as text."""

from __future__ import annotations

import pytest

from pretrain.run import PretrainRun
from vitscale.config.errors import UserErrors
from vitscale.config.loader import load_run

VALID = """\
stage: pretrain
name: demo
data:
  path: shards
  global_batch: 64
model:
  preset: B/16
optim:
  lr: 1e-3
schedule:
  epochs: 3
"""


def errors_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(UserErrors) as caught:
        load_run(PretrainRun, path, overrides=overrides)
    return [error.text() for error in caught.value.errors]
