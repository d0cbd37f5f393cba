"""Read .safetensors files: one, or several with an index."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vitscale.config.errors import UserError
from vitscale.models.weights.files.json_files import read_json
from vitscale.models.weights.files.limits import MAX_BYTES, check_size

MAX_SHARDS = 200


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors in fp32. safetensors itself compares the header with the file's size.

    Raises UserError for files that are too large or damaged, and OSError.
    """
    check_size(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).float() for name in file.keys()}
    except SafetensorError as error:
        raise UserError(f"is not a safetensors file ({error})", where=str(path)) from None


def read_sharded(index: Path) -> dict[str, torch.Tensor]:
    """Tensors in fp32 of all files that a `model.safetensors.index.json` lists.

    Raises UserError where the index names other files than .safetensors beside it, or tensors that
    they do not hold.
    """
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError("has no weight_map", where=str(index))
    names = sorted({str(name) for name in listed.values()})
    wrong = [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]
    if wrong or len(names) > MAX_SHARDS:
        what = (
            f"{wrong[0]!r} is no .safetensors file beside it" if wrong else "lists too many files"
        )
        raise UserError(what, where=str(index), allowed=f"up to {MAX_SHARDS} files beside it")
    files = [index.parent / name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        what = f"{len(missing)} of its {len(files)} files are missing, such as {missing[0]}"
        raise UserError(what, where=str(index), next_step="download the whole folder")
    if (total := sum(map(check_size, files))) > MAX_BYTES:
        raise UserError(f"lists {total:,} bytes; more than {MAX_BYTES:,}", where=str(index))
    found: dict[str, torch.Tensor] = {}
    for file in files:
        found |= read_safetensors(file)
    absent = sorted(listed.keys() - found.keys())
    if absent:
        what = f"{absent[0]!r} and {len(absent) - 1} more tensors are in none of its files"
        raise UserError(what, where=str(index))
    return found
