"""A chain through launch/local.py with real trainings: stopped, resumed, with a failing stage."""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml

from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.runs import TINY
from tests.support.waiting import PATIENCE_S, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

RUN = TINY | yaml.safe_load("""
data: {path: shards, global_batch: 2, num_workers: 0}
schedule: {steps: 4}
checkpoint: {every_steps: 2}
""")
# Signals and the exit codes of a chain that they stop.
STOPS = {signal.SIGTERM: 75, signal.SIGINT: 130}
CHAIN = """\
stage: chain
name: small
overrides: [data.path=shards, launch.nodes=3]  # a local run has one
stages:
  - {name: pretrain, config: pretrain.yaml}
  # Found to be missing when the training starts.
  - name: lost
    config: finetune.yaml
    inputs: {init: pretrain}
    overrides: [data.path=lost, data.planned_num_samples=9]
  - {name: after, config: pretrain.yaml, after: [lost]}
"""


def start(folder):
    return subprocess.Popen(
        [sys.executable, ROOT / "launch/local.py", "--config", "chain.yaml", "--num-procs", "2"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        # A background job of a shell ignores Ctrl-C, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def wait_for_training(chain, stage):
    """Read what the chain prints until the processes of a stage, counted from 1, run."""
    num_started = 0
    for line in iter(chain.stdout.readline, ""):
        # Then the count of stages would be wrong.
        assert "done before" not in line
        num_started += line.startswith("running 2 proc")
        if num_started == stage:
            return
    raise AssertionError(f"the chain ended before its stage {stage} ran")


def test_a_stopped_chain_resumes_and_reports_failures(tmp_path):
    make_shard_folder(tmp_path / "shards")
    for stage in ("pretrain", "finetune"):
        (tmp_path / f"{stage}.yaml").write_text(json.dumps(RUN | {"stage": stage}))
    (tmp_path / "chain.yaml").write_text(CHAIN)

    # In the first stage, and in the second, after the first has ended.
    for stage, (number, code) in enumerate(STOPS.items(), start=1):
        chain = start(tmp_path)
        wait_for_training(chain, stage)
        chain.send_signal(number)
        output, _ = chain.communicate(timeout=PATIENCE_S)
        assert chain.returncode == code, output
        assert "the same command resumes the chain" in output
        # A stopped stage is no reason to go on with the next one.
        assert f"[{stage + 1}/3]" not in output

    # To the end: what is done is not done again, and what needs a failed stage is not started.
    chain = start(tmp_path)
    output, _ = chain.communicate(timeout=PATIENCE_S)
    assert chain.returncode == 1, output
    assert "[1/3] pretrain: done before" in output
    assert "lost: ended with code 2" in output
    assert "after: not started: lost is not done" in output
