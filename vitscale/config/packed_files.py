"""How far a packed file of somebody else may unpack: zip archives of weights, Parquet tables."""

from __future__ import annotations

from vitscale.config.errors import UserError

# Published files of weights and tables unpack to at most twice their size.
MAX_EXPANSION = 20
ALWAYS_ALLOWED_BYTES = 64 << 20


def check_expansion(
    content_bytes: int, *, file_bytes: int, where: str, times: int = MAX_EXPANSION
) -> None:
    """Raise UserError if a file unpacks to more than `times` its size, and to more than 64 MiB."""
    if content_bytes > max(ALWAYS_ALLOWED_BYTES, times * file_bytes):
        raise UserError(
            f"unpacks to {content_bytes:,} bytes or more, "
            f"{content_bytes // max(1, file_bytes):,} times its size",
            where=where,
            allowed=f"{times} times the size of the file",
            next_step="do not use this file unless you trust who made it; then save it unpacked",
        )
