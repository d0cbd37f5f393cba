"""Parts that the stages share. See docs/architecture.md."""

import os

# Before numpy is imported: OpenBLAS then starts threads, which keep a rank from forking the server
# of its loader workers (`distributed.fork_server`). Nothing here multiplies large numpy matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
