"""A chain on a real SLURM: one stage fails, what needs it is cancelled, and a repeat continues."""

import json
import re
from pathlib import Path

import pytest

from tests.support.corpora.image_corpus import corpus
from tests.support.runs import TINY

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ENDED = ("COMPLETED", "FAILED", "CANCELLED")
DATA = """\
stage: data_prep
output: shards
num_workers: 1
source: {path: images, holdout_fraction: 0.5}
shards: {min_shards: 2}
launch: {timeout_min: 10, num_tasks: 2}
"""
RUN = TINY | {
    "data": {"path": "none", "global_batch": 2, "num_workers": 0},
    "schedule": {"epochs": 1},
    "launch": {"timeout_min": 10},
}
EVALUATE = """\
stage: evaluate
name: tiny
init: none
data: {path: none, num_workers: 0}
compute: {device: cpu, num_threads: 1}
evaluate: [{name: classification}]
tracking: {uri: null}
launch: {timeout_min: 10}
"""
CHAIN = """\
stage: chain
name: small
stages:
  - name: shards
    config: data.yaml
    overrides: ["launch.setup=[until test -e FOLDER/begin; do sleep 0.1; done]"]
  - name: pretrain
    config: pretrain.yaml
    inputs: {data.path: shards}
    overrides: ["launch.setup=[test -e FOLDER/allowed || exit 1]"]
  - name: finetune
    config: finetune.yaml
    inputs: {data.path: shards, init: pretrain}
    sweep: {optim.lr: [0.01, 0.001]}
  - {name: evaluate, config: evaluate.yaml, inputs: {data.path: shards, init: finetune}}
"""
RUNS = [
    *"shards pretrain finetune/lr-0.01 finetune/lr-0.001".split(),
    *("evaluate/lr-0.01", "evaluate/lr-0.001"),
]


def write_inputs(folder: Path) -> None:
    corpus(folder / "images", num=4, side=8)
    files = {
        "data": DATA,
        "pretrain": json.dumps(RUN | {"stage": "pretrain"}),
        "finetune": json.dumps(RUN | {"stage": "finetune"}),
        "evaluate": EVALUATE,
        "chain": CHAIN.replace("FOLDER", str(folder)),
    }
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def test_a_chain_continues_after_a_failure(slurm, tmp_path):
    write_inputs(tmp_path)

    def chain():
        """({stage: new job}, output)."""
        output = slurm.script("launch/slurm.py", "--config", "chain.yaml", cwd=tmp_path)
        return dict(re.findall(r"submitted (\S+): job (\d+)", output)), output

    def logs(run):
        return "\n".join(
            p.read_text() for p in tmp_path.glob(f"runs/small/{run}/**/*.out")
        )

    first, output = chain()
    assert list(first) == RUNS, output
    _, output = chain()
    assert "submitted" not in output and output.count("kept ") == 6, output
    (tmp_path / "begin").touch()
    assert slurm.wait(first["pretrain"], states=ENDED)["JobState"] == "FAILED"
    for run in RUNS[2:]:
        assert slurm.wait(first[run], states=ENDED)["JobState"] == "CANCELLED"
    shown = slurm.script("launch/status.py", "runs/small", cwd=tmp_path)
    told = "not started: job N was cancelled, since a job that it needs failed"
    assert re.sub(r"job \d+", "job N", shown).count(told) == len(RUNS[2:]), shown
    made = (tmp_path / "shards/manifest.json").stat().st_mtime_ns

    (tmp_path / "allowed").touch()
    second, output = chain()
    assert list(second) == RUNS[1:] and "skipped   shards: done" in output, output
    for lr in ("0.01", "0.001"):
        ended = slurm.wait(second[f"evaluate/lr-{lr}"], states=ENDED)
        assert ended["JobState"] == "COMPLETED", [*map(logs, RUNS)]
        results = json.loads(
            (tmp_path / f"runs/small/evaluate/lr-{lr}/results.json").read_text()
        )
        assert f"finetune/lr-{lr}" in results["model"]["source"]
    assert (tmp_path / "shards/manifest.json").stat().st_mtime_ns == made
    third, output = chain()
    assert not third and "compare  vitscale compare runs/small" in output, output
