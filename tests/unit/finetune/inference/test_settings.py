"""What an evaluation takes from the run of `init`."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.inference.settings import EvaluateRun, settings_of_run
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run

CONFIG = """\
name: "shapes"
data: {path: "a b/shards", val_split: val, train_split: train}
evaluate: [{name: classification, every_steps: 5}, {name: knn, k: 3, every_steps: null}]
"""


def test_a_run_is_evaluated_as_it_evaluates_itself(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-00000005").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(CONFIG)
    for init in (tmp_path, tmp_path / "checkpoints/step-00000005"):
        words = [f"init={init}", "data.num_workers=0"]
        run = load_run(EvaluateRun, None, overrides=settings_of_run(words) + words).run
        assert (run.name, run.data.path) == ("shapes-evaluation", "a b/shards")
        assert (run.data.val_split, run.data.num_workers) == ("val", 0)
        classification, knn = run.evaluate
        assert (classification.name, knn.name, knn.every_steps) == ("classification", "knn", None)
        assert knn.model_dump()["k"] == 3


def test_weights_of_no_run_name_no_data(tmp_path: Path) -> None:
    (tmp_path / "b.npz").touch()
    assert settings_of_run([f"init={tmp_path / 'b.npz'}"]) == [
        'name="b-evaluation"',
        'evaluate=[{"name": "classification"}]',
    ]
    with pytest.raises(UserError, match="no such run or checkpoint folder"):
        settings_of_run([f"init={tmp_path / 'c'}"])
