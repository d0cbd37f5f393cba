"""Repeat the training that used to hang: evaluations on contended cores.

    python benchmarks/faults/hang_loop.py --pairs 100 --ledger hang_loop.jsonl

Two trainings of two ranks run at a time on two bound cores, each with twelve evaluations of the
weights and of their average. Before loader workers came from a fork server, 5 of 16 trainings hung
in an evaluation on Python 3.11. A training that takes over `--limit` seconds counts as hung: the
stacks of its ranks and their children are printed (py-spy, where it is installed), then it is
killed. Ends with exit code 1 if any training hung or failed. Further arguments are settings.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from tests.hang_watch import stacks
from vitscale.distributed.processes import descendants, free_port

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "schedule.steps=60 schedule.epochs=null schedule.warmup_steps=5 data.global_batch=32 "
    "engine.max_micro_batch=8 engine.num_threads=1 model.width=48 "
    "model.depth=2 model.mlp_width=96 optim.ema.decay=0.9 "
    "checkpoint.every_steps=7 tracking.log_every_steps=5 tracking.uri=null"
).split() + ["evaluate=[{name: classification, every_steps: 5}]"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=10, help="of trainings, one after the other")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds")
    parser.add_argument("--ledger", type=Path, help="append a line of JSON for each pair")
    options, settings = parser.parse_known_args()
    num = {"hung": 0, "failed": 0}
    with tempfile.TemporaryDirectory() as work:
        shards = make_shards(Path(work))
        for pair in range(options.pairs):
            start = time.monotonic()
            found = run_pair(Path(work), shards, settings, limit_s=options.limit)
            seconds = round(time.monotonic() - start, 1)
            num = {key: num[key] + found[key] for key in num}
            print(f"pair {pair}: {seconds} s, {num['hung']} ranks hung so far", flush=True)
            if options.ledger:
                row = {"seconds": seconds, "python": sys.version.split()[0], **found}
                with open(options.ledger, "a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{options.pairs} pairs: {num['hung']} ranks hung, {num['failed']} failed")
    sys.exit(any(num.values()))


def make_shards(work: Path) -> Path:
    """Digits as shards."""
    images, shards = work / "images", work / "shards"
    config = ["--config", ROOT / "configs/data/digits.yaml"]
    for command in (
        [ROOT / "data_prep/make_corpus.py", "digits", images],
        [ROOT / "data_prep/make_shards.py", *config, f"source.path={images}", f"output={shards}"],
    ):
        subprocess.run([sys.executable, *command], check=True, capture_output=True, cwd=work)
    return shards


def run_pair(work: Path, shards: Path, settings: list[str], *, limit_s: float) -> dict[str, int]:
    """How many of the four ranks hung, and how many failed."""
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [work / f"log-{each}-{rank}" for each in "ab" for rank in (0, 1)]
    for each, (first, second) in zip("ab", (logs[:2], logs[2:]), strict=True):
        ranks += start_training(work / each, shards, settings, logs=(first, second))
    end = time.monotonic() + limit_s
    while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
        time.sleep(0.2)
    hung = [rank for rank in ranks if rank.poll() is None]
    for rank in hung:
        print(stacks([rank.pid, *descendants(rank.pid)]), flush=True)
    for rank in hung:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
    failed = [log for rank, log in zip(ranks, logs, strict=True) if rank.returncode and not hung]
    for log in failed:
        print(log.read_text(errors="replace")[-3000:])
    for each in "ab":
        shutil.rmtree(work / each, ignore_errors=True)
    return {"hung": len(hung), "failed": len(failed)}


def start_training(
    folder: Path, shards: Path, settings: list[str], *, logs: tuple[Path, Path]
) -> list[subprocess.Popen[bytes]]:
    port, ranks = str(free_port()), []
    for rank, log in enumerate(logs):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
        env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, ROOT / "pretrain/main.py"]
        command += ["--config", ROOT / "configs/digits/pretrain.yaml", *SETTINGS, *settings]
        command += [f"data.path={shards}", f"output={folder}"]
        with open(log, "wb") as output:
            ranks.append(
                subprocess.Popen(
                    command,
                    env=os.environ | env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                    stdout=output,
                    stderr=output,
                    cwd=folder.parent,
                    start_new_session=True,
                )
            )
    return ranks


if __name__ == "__main__":
    main()
