"""Trained models and prepared shards for own code; `vitscale --help` lists the commands."""

import os
from typing import TYPE_CHECKING, Any

# Before numpy is imported: OpenBLAS then starts threads, which keep a rank from forking the server
# of its loader workers (`distributed.fork_server`). Nothing here multiplies large numpy matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
__all__ = ["Model", "Preprocess", "ShardDataset", "load_model"]


if TYPE_CHECKING:
    from vitscale.evaluation.api import Model, Preprocess, ShardDataset, load_model
else:

    def __getattr__(name: str) -> Any:
        """Import torch only when one of these is asked for."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from vitscale.evaluation import api

        return getattr(api, name)
