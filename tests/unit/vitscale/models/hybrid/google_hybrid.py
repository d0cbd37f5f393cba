"""A hybrid as vision_transformer computes it, written out slowly on arrays with its names.

Independent of the code under test: SAME padding, standardised kernels and attention are spelt out.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

Arrays = dict[str, np.ndarray]


def unit_shapes(stage_depths: tuple[int, ...], root: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"conv_root/kernel": (7, 7, 3, root)}
    shapes |= {"gn_root/scale": (root,), "gn_root/bias": (root,)}
    inputs = root
    for stage, depth in enumerate(stage_depths):
        middle, outputs = root * 2**stage, 4 * root * 2**stage
        for number in range(depth):
            u = f"block{stage + 1}/unit{number + 1}/"
            shapes[u + "conv1/kernel"] = (1, 1, inputs, middle)
            shapes[u + "conv2/kernel"] = (3, 3, middle, middle)
            shapes[u + "conv3/kernel"] = (1, 1, middle, outputs)
            norms = {"gn1": middle, "gn2": middle, "gn3": outputs}
            if number == 0:
                shapes[u + "conv_proj/kernel"] = (1, 1, inputs, outputs)
                norms["gn_proj"] = outputs
            for name, width in norms.items():
                shapes |= {f"{u}{name}/scale": (width,), f"{u}{name}/bias": (width,)}
            inputs = outputs
    return shapes


def hybrid_arrays(
    stage_depths: tuple[int, ...], *, root: int, grid: int, patch: int, width: int, heads: int
) -> Arrays:
    """Random weights of a hybrid with one block and 5 classes, under Google's names."""
    features = root if not stage_depths else 4 * root * 2 ** (len(stage_depths) - 1)
    block = "Transformer/encoderblock_0/"
    attention = block + "MultiHeadDotProductAttention_1/"
    shapes = unit_shapes(stage_depths, root) | {
        "embedding/kernel": (patch, patch, features, width),
        "embedding/bias": (width,),
        "cls": (1, 1, width),
        "Transformer/posembed_input/pos_embedding": (1, grid * grid + 1, width),
        "Transformer/encoder_norm/scale": (width,),
        "Transformer/encoder_norm/bias": (width,),
        "head/kernel": (width, 5),
        "head/bias": (5,),
        f"{attention}out/kernel": (heads, width // heads, width),
        f"{attention}out/bias": (width,),
        f"{block}MlpBlock_3/Dense_0/kernel": (width, 2 * width),
        f"{block}MlpBlock_3/Dense_0/bias": (2 * width,),
        f"{block}MlpBlock_3/Dense_1/kernel": (2 * width, width),
        f"{block}MlpBlock_3/Dense_1/bias": (width,),
    }
    for name in ("LayerNorm_0", "LayerNorm_2"):
        shapes |= {f"{block}{name}/scale": (width,), f"{block}{name}/bias": (width,)}
    for name in ("query", "key", "value"):
        shapes[f"{attention}{name}/kernel"] = (width, heads, width // heads)
        shapes[f"{attention}{name}/bias"] = (heads, width // heads)
    random = np.random.default_rng(0)
    return {
        # Kernels this small tell epsilons on the deviation from epsilons on the variance.
        name: random.normal(scale=0.002 if "conv" in name else 0.3, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


class GoogleHybrid:
    """The forward pass in fp64."""

    def __init__(self, arrays: Arrays) -> None:
        self.weights = {name: torch.from_numpy(a).double() for name, a in arrays.items()}

    def conv(self, x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        kernel = self.weights[f"{name}/kernel"]
        mean = kernel.mean(dim=(0, 1, 2))
        deviation = ((kernel - mean) ** 2).mean(dim=(0, 1, 2)).sqrt()
        kernel = ((kernel - mean) / (deviation + 1e-5)).permute(3, 2, 0, 1)
        return F.conv2d(same(x, kernel.shape[-1], stride, 0.0), kernel, stride=stride)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        batch, channels, *sides = x.shape
        grouped = x.reshape(batch, 32, -1)
        mean = grouped.mean(-1, keepdim=True)
        variance = ((grouped - mean) ** 2).mean(-1, keepdim=True)
        normal = ((grouped - mean) / (variance + 1e-6).sqrt()).reshape(batch, channels, *sides)
        scale, bias = self.weights[f"{name}/scale"], self.weights[f"{name}/bias"]
        return normal * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)

    def stem(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x, "conv_root", 2), "gn_root").relu()
        x = F.max_pool2d(same(x, 3, 2, -torch.inf), 3, 2)
        stages = {int(name[5]) for name in self.weights if name.startswith("block")}
        for stage in sorted(stages):
            number = 1
            while f"block{stage}/unit{number}/conv1/kernel" in self.weights:
                stride = 2 if stage > 1 and number == 1 else 1
                x = self.unit(x, f"block{stage}/unit{number}/", stride)
                number += 1
        return x

    def unit(self, x: torch.Tensor, u: str, stride: int) -> torch.Tensor:
        shortcut = x
        if f"{u}conv_proj/kernel" in self.weights:
            shortcut = self.norm(self.conv(x, f"{u}conv_proj", stride), f"{u}gn_proj")
        y = self.norm(self.conv(x, f"{u}conv1"), f"{u}gn1").relu()
        y = self.norm(self.conv(y, f"{u}conv2", stride), f"{u}gn2").relu()
        y = self.norm(self.conv(y, f"{u}conv3"), f"{u}gn3")
        return (shortcut + y).relu()

    def layer_norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias = self.weights[f"{name}/scale"], self.weights[f"{name}/bias"]
        return F.layer_norm(x, x.shape[-1:], scale, bias, eps=1e-6)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        b = "Transformer/encoderblock_0/"
        y = self.layer_norm(x, b + "LayerNorm_0")
        w = {
            name: self.weights[f"{b}MultiHeadDotProductAttention_1/{name}"]
            for kind in ("query", "key", "value", "out")
            for name in (f"{kind}/kernel", f"{kind}/bias")
        }
        q, k, v = (
            torch.einsum("bld,dhw->bhlw", y, w[f"{n}/kernel"]) + w[f"{n}/bias"][:, None]
            for n in ("query", "key", "value")
        )
        shares = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + torch.einsum("bhlw,hwd->bld", shares @ v, w["out/kernel"]) + w["out/bias"]
        y = self.layer_norm(x, b + "LayerNorm_2")
        for number in (0, 1):
            dense = f"{b}MlpBlock_3/Dense_{number}/"
            y = y @ self.weights[dense + "kernel"] + self.weights[dense + "bias"]
            y = F.gelu(y, approximate="tanh") if number == 0 else y
        return x + y

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        kernel = self.weights["embedding/kernel"].permute(3, 2, 0, 1)
        bias = self.weights["embedding/bias"]
        x = F.conv2d(self.stem(images.double()), kernel, bias, stride=kernel.shape[-1])
        tokens = x.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.weights["cls"].expand(len(x), 1, -1), tokens], dim=1)
        tokens = tokens + self.weights["Transformer/posembed_input/pos_embedding"]
        first = self.layer_norm(self.block(tokens), "Transformer/encoder_norm")[:, 0]
        return first @ self.weights["head/kernel"] + self.weights["head/bias"]


def same(x: torch.Tensor, kernel: int, stride: int, value: float) -> torch.Tensor:
    """TensorFlow's SAME: the odd row goes to the end."""
    side = x.shape[-1]
    total = max(0, (-(-side // stride) - 1) * stride + kernel - side)
    pair = (total // 2, total - total // 2)
    return F.pad(x, (*pair, *pair), value=value)
