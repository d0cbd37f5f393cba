"""Suffixes of files of weights. Needs no torch."""

from __future__ import annotations

TORCH_FILES = (".pth", ".pt", ".bin", ".tar")
SUFFIXES = (".npz", ".safetensors", *TORCH_FILES)
