"""Export as an ONNX graph with any batch size: normalised images in, logits out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.exporting.format import Format, write_description
from finetune.loading.loaded_model import LoadedModel

GRAPH_NAME = "model.onnx"
# A protobuf message holds less than 2 GiB; larger weights become a second file.
MAX_INSIDE_BYTES = 1_900_000_000
TRACED_IMAGES = 2


class OnnxFormat(Format):
    library = "onnxruntime"
    hub_library = "onnx"
    needs = ("onnx", "onnxscript")

    def write(self, loaded: LoadedModel, folder: Path) -> None:
        size = loaded.preprocessing.image_size
        num_bytes = sum(4 * p.numel() for p in loaded.network.parameters())
        # The exporter prints and warns about its own parts.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Logits(loaded.network).eval(),
                (torch.zeros(TRACED_IMAGES, 3, size, size),),
                folder / GRAPH_NAME,
                input_names=["images"],
                output_names=[_output(loaded)],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                external_data=num_bytes > MAX_INSIDE_BYTES,
                verbose=False,
            )
        write_description(loaded, folder)
        _add_metadata(loaded, folder / GRAPH_NAME)

    def logits(
        self, loaded: LoadedModel, folder: Path, images_B3HW: torch.Tensor
    ) -> torch.Tensor | None:
        """In batches of several sizes."""
        if importlib.util.find_spec("onnxruntime") is None:
            return None
        import onnxruntime

        options: Any = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        graph: Any = onnxruntime.InferenceSession(
            folder / GRAPH_NAME, options, providers=["CPUExecutionProvider"]
        )
        parts = (images_B3HW[:1], images_B3HW[1:])
        found = [torch.from_numpy(graph.run(None, {"images": p.numpy()})[0]) for p in parts]
        return torch.cat(found)

    def notes(self, loaded: LoadedModel) -> Iterator[str]:
        yield (
            "Input `images`: fp32 [batch, 3, height, width], resized and normalised as below. "
            f"Output `{_output(loaded)}`: fp32 [batch, "
            f"{'classes' if loaded.num_classes else 'channels'}]. Its metadata has the "
            "names of the classes and the preprocessing as JSON."
        )

    def usage(self, loaded: LoadedModel) -> str:
        return (
            "import onnxruntime\n"
            'session = onnxruntime.InferenceSession("FOLDER/model.onnx")\n'
            f'{_output(loaded)} = session.run(None, {{"images": images}})[0]\n'
            "metadata = session.get_modelmeta().custom_metadata_map"
        )


def _output(loaded: LoadedModel) -> str:
    return "logits" if loaded.num_classes else "features"


def _add_metadata(loaded: LoadedModel, path: Path) -> None:
    """Names of the classes and the preprocessing, as JSON in the graph itself."""
    import onnx

    graph = onnx.load(path, load_external_data=False)
    values = {"preprocessing": asdict(loaded.preprocessing), "classes": loaded.classes}
    known = {key: json.dumps(value) for key, value in values.items() if value is not None}
    onnx.helper.set_model_props(graph, known)
    onnx.save(graph, path)


class _Logits(nn.Module):
    """The model with one input and one output."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(images)
        return logits
