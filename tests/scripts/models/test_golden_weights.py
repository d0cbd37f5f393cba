"""Stored weights of other libraries, and our own, still give the logits of those libraries.

Made once by timm, transformers and NumPy, all parameters random; `google` has vision_transformer's
names and the logits of timm's reader, `own` is our export of `timm`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.support.golden import FOLDER
from vitscale.evaluation.trained_model import open_model

SIZE = 8


def fixed_images() -> torch.Tensor:
    numbers = torch.arange(2 * 3 * SIZE * SIZE, dtype=torch.int64)
    return ((numbers * numbers * 37 + numbers * 11) % 255 / 127 - 1).reshape(2, 3, SIZE, SIZE)


@pytest.mark.parametrize("kind", ["google", "timm", "vit", "deit", "dinov2", "own"])
def test_logits_of_stored_weights(kind: str) -> None:
    folder = FOLDER / "weights" / kind
    expected = json.loads((folder / "expected.json").read_text())
    path = folder / "model.npz"
    loaded = open_model(str(path if path.exists() else folder))
    with torch.no_grad():
        logits = loaded.network(fixed_images()).numpy()
    assert np.abs(logits - np.array(expected["logits"])).max() < 1e-5
    assert np.std(expected["logits"]) > 0.1
    assert loaded.classes == (expected["classes"] and tuple(expected["classes"]))
    assert list(loaded.preprocessing.mean) == expected["mean"]
