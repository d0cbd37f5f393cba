"""One rank of one layout of the R3 matrix: train half-way, save, resume from all other layouts.

Started by test_elastic_resume.py as `elastic_worker.py FOLDER NUM_LAYOUTS`, once for each number of
ranks, all at the same time; the layouts exchange files in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

# Beside this file; a script's own folder is on the path.
from engine_training import (  # type: ignore[import-not-found]  # see above
    engine_losses,
    new_engine,
    reader,
    whole_state,
)
from plain_training import STEPS  # type: ignore[import-not-found]  # see above
from safetensors.torch import load_file, save_file

from vitscale.distributed.exit import run_rank_script
from vitscale.distributed.world import World, agree_no_error, process_group

STAGES, HALF, PATIENCE_S = (0, 1, 2, 3), STEPS // 2, 900
# 25 steps took 0.4 to 1.3 s of processor time at ZeRO 0 to 2 and 5.7 s at ZeRO 3 (one rank, two
# CPU cores, November 2026).
FURTHER = {0: HALF, 1: HALF, 2: HALF, 3: 5}


def save_half(world: World, folder: Path, *, stage: int) -> list[float]:
    """Train to the middle; rank 0 leaves the state under the layout's name."""
    engine = new_engine(world, stage=stage)
    losses = engine_losses(engine, world, start=0, stop=HALF)
    tensors = whole_state(engine)
    progress = {
        "losses": losses,
        "steps": engine.optimizer_steps(),
        "counters": engine.export_counters(),
    }
    if world.is_first:
        name = f"{world.world_size} ranks ZeRO {stage}"
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{name}.safetensors")
        (folder / f"{name}.tmp").write_text(json.dumps(progress))
        os.rename(folder / f"{name}.tmp", folder / f"{name}.json")
    return losses


def wait_for(folder: Path, num_layouts: int) -> list[Path]:
    deadline = time.monotonic() + PATIENCE_S
    while len(found := sorted(folder.glob("* ranks ZeRO *.json"))) < num_layouts:
        assert time.monotonic() < deadline, f"only {found} came"
        time.sleep(0.2)
    return found


def main() -> None:
    folder, num_layouts = Path(sys.argv[1]), int(sys.argv[2])
    results = {}
    with process_group(device="cpu", timeout_min=20, num_threads=1) as world:
        for stage in STAGES:
            save_half(world, folder, stage=stage)
        sources = wait_for(folder, num_layouts)
        agree_no_error(None)
        for stage in STAGES:
            for source in sources:
                progress = json.loads(source.read_text())
                engine = new_engine(world, stage=stage)
                tensors: dict[str, torch.Tensor] = load_file(source.with_suffix(".safetensors"))
                engine.import_state(reader(tensors), optimizer_steps=progress["steps"])
                engine.import_counters(progress["counters"])
                losses = engine_losses(engine, world, start=HALF, stop=HALF + FURTHER[stage])
                target = f"{world.world_size} ranks ZeRO {stage}"
                results[f"{source.stem} to {target}"] = progress["losses"] + losses
        if world.is_first:
            print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    run_rank_script(main)
