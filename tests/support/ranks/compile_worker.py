"""Compile a small function with the cache of a node; print what torch found in it.

python compile_worker.py NODE_FOLDER RUN_FOLDER
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from vitscale.engine.compile_cache import open_compile_cache
from vitscale.engine.settings import EngineSettings

node, run = sys.argv[1:]
settings = EngineSettings(compile_cache=node)
cache = open_compile_cache(settings, run_folder=Path(run), device=torch.device("cpu"))
assert cache is not None

# Imported after the folder is set: it makes torch choose one.
counters = importlib.import_module("torch._dynamo.utils").counters
compiled = torch.compile(lambda values: torch.nn.functional.gelu(values).sum())
total = compiled(torch.linspace(-1, 1, 32))
found = {kind: counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss")}
print(cache.message)
print("hits", found["hit"], "misses", found["miss"], "total", total.item())
print(cache.write_seed())
