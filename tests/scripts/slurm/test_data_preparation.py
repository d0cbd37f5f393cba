"""Shards made by an array of tasks on two nodes, some of them stopped half way."""

import re

import pytest

from tests.support.corpora.image_corpus import contents
from tests.support.waiting import ROOT, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

NUM_TASKS = 4
NUM_SHARDS = 24
SETTINGS = (
    "--config",
    ROOT / "configs/data/image_folder.yaml",
    "source.path=images",
    "source.holdout_fraction=0",
    f"shards.min_shards={NUM_SHARDS}",
    "images.max_bad_fraction=0.2",
)


def write_corpus(folder):
    """Noise in three classes, seconds of work to decode, some files cut short."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for label in ("dark", "grey", "light"):
        (folder / label).mkdir(parents=True)
        for number in range(80):
            path = folder / label / f"{number}.jpg"
            pixels = random.integers(0, 256, (800, 800, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            if number % 20 == 7:
                path.write_bytes(path.read_bytes()[:1000])


def test_an_array_makes_the_same_shards_as_one_process(slurm, tmp_path):
    write_corpus(tmp_path / "images")
    output = slurm.script(
        "launch/slurm.py",
        *SETTINGS,
        "output=shards",
        f"launch.num_tasks={NUM_TASKS}",
        "launch.cpus_per_task=2",
        "launch.timeout_min=10",
        "num_workers=1",
        cwd=tmp_path,
    )
    match = re.search(r"submitted array (\d+): data_prep-shards, 4 task\(s\)", output)
    assert match, output
    array = match[1]
    logs = tmp_path / f"runs/data_prep-shards/slurm/{array}"
    assert f"{logs}/{array}_TASK_0_log.out, TASK from 0 to 3" in output

    # All tasks are working, each in one process, which handles signals by then.
    scratch = tmp_path / ".shards.preparing/tmp"
    wait_until(lambda: len([*scratch.glob("*")]) == NUM_TASKS)
    # Where a task runs when it is requeued is up to SLURM.
    nodes = {slurm.job(f"{array}_{task}")["NodeList"] for task in range(NUM_TASKS)}
    assert nodes == {"n1", "n2"}

    # As at the time limit; and as SLURM does for a preemption.
    slurm.run(["scancel", "--signal=USR2", f"{array}_0"])
    slurm.run(["scontrol", "requeue", f"{array}_1"])
    slurm.run(["scancel", f"{array}_2"])
    assert not (tmp_path / "shards").exists()

    # Meanwhile: SLURM delays a requeued job.
    alone = ("output=alone", "num_workers=2")
    slurm.script("data_prep/make_shards.py", *SETTINGS, *alone, cwd=tmp_path)

    states = ["COMPLETED", "FAILED", "CANCELLED"]
    ended = []
    texts = []
    for task in range(NUM_TASKS):
        ended.append(slurm.wait(f"{array}_{task}", states=states))
        texts.append((logs / f"{array}_{task}_0_log.out").read_text())
    job_states = [task["JobState"] for task in ended]
    expected = "COMPLETED COMPLETED CANCELLED COMPLETED".split()
    assert job_states == expected, "\n".join(texts)
    assert [task["Restarts"] for task in ended] == "1 1 0 0".split(), "\n".join(texts)
    were_stopped = ["stopped by a signal" in text for text in texts]
    assert were_stopped == [True, True, True, False]
    assert f"requeueing job {array}_0 (1 of" in texts[0]

    # SLURM requeues one and cancels the other.
    for task in (1, 2):
        assert f"SLURM is ending job {array}_{task}" in texts[task]

    # Each is the only rank of its job: otherwise it would leave its errors to rank 0.
    started = "data_prep/make_shards.py: 1 process(es), settings in "
    assert all(started in text for text in texts)

    # Every process of a task gets the signal, and none reports it as a failure.
    assert not [text for text in texts if "Traceback" in text or "died" in text]

    made = contents(tmp_path / "shards")
    expected = contents(tmp_path / "alone")
    assert sum(name.endswith(".tar") for name in expected) == NUM_SHARDS
    assert made.keys() == expected.keys()
    assert [name for name in expected if made[name] != expected[name]] == []

    # Nothing is left beside the shards.
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
