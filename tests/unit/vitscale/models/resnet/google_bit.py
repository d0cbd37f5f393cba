"""A BiT ResNet as big_transfer computes it, written out slowly on arrays with its names."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

Arrays = dict[str, np.ndarray]
CONV, NORM = "standardized_conv2d/kernel", "group_norm"


def bit_arrays(stage_depths: tuple[int, ...], *, root: int) -> Arrays:
    """Random weights with 5 classes, under Google's names."""
    shapes: dict[str, tuple[int, ...]] = {f"resnet/root_block/{CONV}": (7, 7, 3, root)}
    inputs = root
    for stage, depth in enumerate(stage_depths):
        middle, outputs = root * 2**stage, 4 * root * 2**stage
        for number in range(depth):
            u = f"resnet/block{stage + 1}/unit{number + 1:02d}/"
            shapes[f"{u}a/{CONV}"] = (1, 1, inputs, middle)
            shapes[f"{u}b/{CONV}"] = (3, 3, middle, middle)
            shapes[f"{u}c/{CONV}"] = (1, 1, middle, outputs)
            if number == 0:
                shapes[f"{u}a/proj/{CONV}"] = (1, 1, inputs, outputs)
            for letter, width in (("a", inputs), ("b", middle), ("c", middle)):
                shapes[f"{u}{letter}/{NORM}/gamma"] = (width,)
                shapes[f"{u}{letter}/{NORM}/beta"] = (width,)
            inputs = outputs
    shapes |= {f"resnet/{NORM}/gamma": (inputs,), f"resnet/{NORM}/beta": (inputs,)}
    shapes |= {"resnet/head/conv2d/kernel": (1, 1, inputs, 5), "resnet/head/conv2d/bias": (5,)}
    random = np.random.default_rng(0)
    return {
        # Kernels this small tell an epsilon of 1e-10 from timm's 1e-8.
        name: random.normal(scale=0.001 if CONV in name else 0.3, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


class GoogleBiT:
    """The forward pass in fp64."""

    def __init__(self, arrays: Arrays) -> None:
        self.weights = {name: torch.from_numpy(a).double() for name, a in arrays.items()}

    def conv(self, x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        kernel = self.weights[f"{name}/{CONV}"].permute(3, 2, 0, 1)
        mean = kernel.mean(dim=(1, 2, 3), keepdim=True)
        variance = ((kernel - mean) ** 2).mean(dim=(1, 2, 3), keepdim=True)
        kernel = (kernel - mean) / (variance + 1e-10).sqrt()
        return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias = self.weights[f"{name}/{NORM}/gamma"], self.weights[f"{name}/{NORM}/beta"]
        return F.group_norm(x, 32, scale, bias, eps=1e-5).relu()

    def features(self, images: torch.Tensor) -> torch.Tensor:
        x = self.conv(images.double(), "resnet/root_block", 2)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=0.0), 3, 2)
        units = {name.rsplit("/a/")[0] for name in self.weights if "/a/" in name}
        for u in sorted(units):
            stride = 2 if u.endswith("unit01") and "block1" not in u else 1
            before = self.norm(x, f"{u}/a")
            if f"{u}/a/proj/{CONV}" in self.weights:
                x = self.conv(before, f"{u}/a/proj", stride)
            y = self.norm(self.conv(before, f"{u}/a"), f"{u}/b")
            y = self.norm(self.conv(y, f"{u}/b", stride), f"{u}/c")
            x = x + self.conv(y, f"{u}/c")
        return self.norm(x, "resnet").mean((2, 3))

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        kernel = self.weights["resnet/head/conv2d/kernel"][0, 0]
        return self.features(images) @ kernel + self.weights["resnet/head/conv2d/bias"]
