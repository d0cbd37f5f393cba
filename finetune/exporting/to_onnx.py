"""Export as an ONNX graph with any batch size: normalised images in, logits out."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from math import floor
from pathlib import Path
from typing import Any

import torch

from finetune.exporting.format import PHOTO, Format, write_description
from finetune.exporting.to_timm import INTERPOLATIONS
from vitscale.evaluation.trained_model import Preprocessing, TrainedModel

GRAPH_NAME = "model.onnx"
# A protobuf message holds less than 2 GiB; larger weights become a second file.
MAX_INSIDE_BYTES = 1_900_000_000
TRACED_IMAGES = 2


class OnnxFormat(Format):
    library = "onnxruntime"
    hub_library = "onnx"
    needs = ("onnx", "onnxscript")

    def write(self, model: TrainedModel, folder: Path) -> None:
        import onnx

        size = model.preprocessing.image_size
        path = folder / GRAPH_NAME
        num_bytes = sum(4 * values.numel() for values in model.network.parameters())

        # The exporter prints and warns about its own parts.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model.network,
                (torch.zeros(TRACED_IMAGES, 3, size, size),),
                path,
                input_names=["images"],
                output_names=[_output(model)],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=num_bytes > MAX_INSIDE_BYTES,
                verbose=False,
            )
        write_description(model, folder)

        # A graph is often passed on alone, so it also carries what its users need.
        graph = onnx.load(path, load_external_data=False)
        metadata = {"preprocessing": json.dumps(asdict(model.preprocessing))}
        if model.classes is not None:
            metadata["classes"] = json.dumps(model.classes)
        onnx.helper.set_model_props(graph, metadata)
        onnx.save(graph, path)

    def logits(
        self, model: TrainedModel, folder: Path, images_B3SS: torch.Tensor
    ) -> torch.Tensor:
        """Run batches of several sizes."""
        import onnxruntime

        options: Any = onnxruntime.SessionOptions()
        # It warns about parts of the graph that it merges, which is no concern of the user.
        options.log_severity_level = 3  # errors
        graph: Any = onnxruntime.InferenceSession(
            folder / GRAPH_NAME, options, providers=["CPUExecutionProvider"]
        )
        # A batch size that was fixed while tracing would show here.
        logits = [
            torch.from_numpy(graph.run(None, {"images": part_B3SS.numpy()})[0])
            for part_B3SS in (images_B3SS[:1], images_B3SS[1:])
        ]
        return torch.cat(logits)

    def notes(self, model: TrainedModel) -> Iterator[str]:
        outputs = "classes" if model.num_classes else "channels"
        yield (
            "Input `images`: fp32 [batch, 3, height, width], resized and normalised as below. "
            f"Output `{_output(model)}`: fp32 [batch, {outputs}]. Its metadata has the "
            "names of the classes and the preprocessing as JSON."
        )

    def usage(self, model: TrainedModel) -> str:
        best = _output(model)
        if model.classes is not None:
            best = f'json.loads(metadata["classes"])[{best}.argmax()]'
        elif model.num_classes:
            best += ".argmax()"
        return (
            "import json, numpy, onnxruntime\nfrom PIL import Image, ImageOps\n"
            f"{PHOTO}{_resize(model.preprocessing)}"
            'session = onnxruntime.InferenceSession("FOLDER/model.onnx")\n'
            f'({_output(model)},) = session.run(None, {{"images": images}})\n'
            "metadata = session.get_modelmeta().custom_metadata_map\n"
            f"print({best})"
        )


def _resize(pixels: Preprocessing) -> str:
    """Python that makes `images` of a photograph, with Pillow and NumPy alone."""
    size = pixels.image_size
    side = size
    if pixels.eval_resize != "squash":
        side = floor(size / pixels.eval_crop_fraction)
    sides = f"({side}, {side})"
    if pixels.eval_resize.startswith("center_crop"):
        sides = f"[side * {side} // min(image.size) for side in image.size]"

    # An odd number of pixels is cut as the model's own preprocessing cuts it.
    start = f"round((side - {size}) / 2)"
    if pixels.eval_resize.endswith("_down"):
        start = f"(side - {size}) // 2"

    name = INTERPOLATIONS[pixels.eval_interpolation].upper()
    return (
        f"image = image.resize({sides}, Image.Resampling.{name})\n"
        f"left, top = ({start} for side in image.size)\n"
        f"image = image.crop((left, top, left + {size}, top + {size}))\n"
        f"pixels = (numpy.array(image) / 255 - {list(pixels.mean)}) / {list(pixels.std)}\n"
        'images = pixels.transpose(2, 0, 1)[None].astype("float32")\n'
    )


def _output(model: TrainedModel) -> str:
    return "logits" if model.num_classes else "features"
