"""Time a step of objectives without labels beside its forward and backward passes alone.

    python benchmarks/objective_cost.py --rounds 5 --json results.json

The passes are a plain PyTorch loop on the same pixels: the student, with its head, forward and
backward on all views, by a gradient that is given; the teacher forward on the global views; AdamW.
A step has besides: losses, centres or Sinkhorn-Knopp, KoLeo, metrics, the norm of the gradients,
the average of the weights, and its copy to the teacher. Masks are drawn in both. Recipes of
configs/ with ViT-S/16, at their sizes of views, in fp32. Processor seconds of one thread, which the
load by others hardly moves.
"""

from __future__ import annotations

import argparse
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.measuring import (
    ROOT,
    parser_of,
    ratio,
    run_benchmark,
    spread,
)
from benchmarks.training_loops import EngineLoop, Task
from pretrain.objectives.views import split_by_kind
from pretrain.run import PretrainRun
from vitscale.config.errors import run_script
from vitscale.config.loader import load_run
from vitscale.data.loader import Batch
from vitscale.distributed.world import World, process_group
from vitscale.models.vit import decayed
from vitscale.optim.optimizers import build_optimizer, optimizer_groups

RECIPES = ("dino_s16", "ibot_b16", "lejepa_b16")
SETTINGS = (
    "model.preset=S/16 engine.device=cpu engine.precision=fp32 evaluate=[]".split()
)
TOY = "model.width=48 model.depth=1 model.num_heads=2 model.mlp_width=96".split()


class Passes:
    """Forward and backward passes, and the optimiser's update."""

    def __init__(self, loop: EngineLoop) -> None:
        """loop: the step that they are compared with."""
        task = loop.task
        run = task.run
        self.view_shapes = task.view_shapes
        # A second one, since it refers to the module of its model.
        self.objective: Any = run.make_objective()
        self.model: Any = task.initial()
        self.objective.extend_model(self.model, task.arch)
        self.teacher = deepcopy(self.model).eval().requires_grad_(False)
        self.normalize = loop.engine.normalized
        named = self.model.named_parameters()
        groups = optimizer_groups(
            named, settings=run.optim, decayed=decayed, layers_above=lambda name: 0
        )
        self.optimizer = build_optimizer(groups, settings=run.optim)

    def step(self, number: int, pixels: torch.Tensor, labels: torch.Tensor) -> None:
        positions = np.arange(len(labels)) + number * len(labels)
        batch = Batch(pixels, labels, labels, positions=positions)
        batch = batch.with_views(self.view_shapes)
        for module in self.model.modules():
            if hasattr(module, "positions"):
                module.positions = torch.from_numpy(positions)

        seen = split_by_kind(batch)[0]
        masks = {}
        if hasattr(self.objective, "_masks"):
            masks = self.objective._masks(batch, seen.shape[1])
        with torch.no_grad():
            if self.objective.has_teacher:
                chosen = masks.get("chosen_M")
                global_NCSS = self.normalize(seen.flatten(0, 1))
                self.teacher(global_NCSS, output="objective", chosen_M=chosen)

        outputs: list[torch.Tensor] = []
        for views_BVCSS in filter(torch.is_tensor, split_by_kind(batch)):
            images = self.normalize(views_BVCSS.flatten(0, 1))
            output = self.model(images, output="objective", **masks)
            # Scores of views and patches, or one embedding.
            outputs += [output] if torch.is_tensor(output) else output[1:]
            masks = {}
        outputs = [output for output in outputs if len(output)]
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        self.optimizer.step()
        self.optimizer.zero_grad()


def measure(options: argparse.Namespace, world: World) -> dict[str, Any]:
    seconds = {}
    for recipe in options.recipes:
        overrides = [*SETTINGS, *options.settings]
        for key in ("data.global_batch", "engine.max_micro_batch"):
            overrides.append(f"{key}={options.batch}")
        path = ROOT / f"configs/self_supervised/{recipe}.yaml"
        run = load_run(PretrainRun, path, overrides=overrides, with_site=False).run
        task = Task(run=run, device=world.device)
        loop = EngineLoop(task, world, stage=0)
        steps = {"step": loop.step, "passes": Passes(loop).step}
        times: dict[str, list[float]] = {name: [] for name in steps}
        # The first round allocates.
        for number in range(options.rounds + 1):
            for name in sorted(steps, reverse=number % 2 == 1):
                start = time.process_time()
                steps[name](number, *task.pool[number % len(task.pool)])
                times[name].append(time.process_time() - start)
        times = {name: values[1:] for name, values in times.items()}
        loop.engine.close()
        for name, values in times.items():
            print(f"{recipe}: {name} {spread(values, '.3f')} s")
        print(f"{recipe}: step / passes {ratio(times['step'], times['passes'], '.3f')}")
        seconds[recipe] = times
    return {"seconds": seconds}


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--batch", type=int, default=4, help="images of a step")
    parser.set_defaults(settings=())
    if parser.parse_args().toy:
        parser.set_defaults(rounds=1, batch=2, settings=TOY)
    options = parser.parse_args()
    with process_group(device="cpu", timeout_min=1, num_threads=1) as world:
        run_benchmark(options, lambda _: measure(options, world), "torch")


if __name__ == "__main__":
    run_script(main)
