"""A chain on a real SLURM: one stage fails, what needs it is cancelled, and a repeat continues."""

import json
import re

import pytest
import yaml

from tests.support.corpora.image_corpus import corpus
from tests.support.runs import TINY

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ENDED = ("COMPLETED", "FAILED", "CANCELLED")
# One run of each stage that a chain can have; the shards are an array of two tasks.
DATA = """\
stage: data_prep
output: shards
num_workers: 1
source: {path: images, holdout_fraction: 0.5}
shards: {min_shards: 2}
launch: {timeout_min: 10, num_tasks: 2}
"""
RUN = TINY | yaml.safe_load("""
data: {path: none, global_batch: 2, num_workers: 0}
schedule: {epochs: 1}
launch: {timeout_min: 10}
""")
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
# The test decides by two files when the first stage begins, and whether the second one fails.
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
# A sweep goes on: each evaluation is of one of its runs.
RUNS = """
shards pretrain finetune/lr-0.01 finetune/lr-0.001 evaluate/lr-0.01 evaluate/lr-0.001
""".split()


def write_inputs(folder):
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

    def state_of(job_id):
        return slurm.wait(job_id, states=ENDED)["JobState"]

    def logs():
        paths = sorted(tmp_path.glob("runs/small/**/*.out"))
        return "\n".join(path.read_text() for path in paths)

    first, output = chain()
    assert [*first] == RUNS, output
    # Again while they wait: jobs that have not ended are kept.
    _, output = chain()
    assert "submitted" not in output, output
    assert output.count("kept ") == 6, output

    # The failure of one cancels all that need it, also those that need it by another.
    (tmp_path / "begin").touch()
    assert state_of(first["pretrain"]) == "FAILED"
    for run in RUNS[2:]:
        assert state_of(first[run]) == "CANCELLED"
    shown = slurm.script("launch/status.py", "runs/small", cwd=tmp_path)
    shown = re.sub(r"job \d+", "job N", shown)
    told = "not started: job N was cancelled, since a job that it needs failed"
    assert shown.count(told) == len(RUNS[2:]), shown
    manifest = tmp_path / "shards/manifest.json"
    made_at = manifest.stat().st_mtime_ns

    # What is done is not done again.
    (tmp_path / "allowed").touch()
    second, output = chain()
    assert [*second] == RUNS[1:], output
    assert "skipped   shards: done" in output, output
    for rate in ("lr-0.01", "lr-0.001"):
        assert state_of(second[f"evaluate/{rate}"]) == "COMPLETED", logs()
        path = tmp_path / f"runs/small/evaluate/{rate}/results.json"
        results = json.loads(path.read_text())
        assert f"finetune/{rate}" in results["model"]["source"]
    assert manifest.stat().st_mtime_ns == made_at
    third, output = chain()
    assert not third, output
    assert "compare  vitscale compare runs/small" in output, output
