"""Write a run for TensorBoard, into the folder `tensorboard` of the run.

Each start makes its file anew from the journal: no step is doubled, and none left out, whatever was
killed before. tensorboard is an extra.
"""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote
from textwrap import indent

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from vitscale.config.loader import resolve_scalar, shown_path
from vitscale.config.redaction import flatten_params, shared_yaml
from vitscale.tracking.mlflow_sync import RunReader, Status


class Reader(RunReader):
    """One file of events in the folder `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder / "tensorboard"
        self.run_id = str(self._folder)
        self.page = f"tensorboard --logdir {quote(shown_path(folder.parent))}"
        self._folder.mkdir(exist_ok=True)
        self._open()

    def _open(self) -> None:
        # Two files would show every point twice.
        for old in self._folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._path = self._folder / f"events.out.tfevents.{time.time_ns()}"
        self._file = open(self._path, "wb")
        self._offset = 0
        self.num_points = 0
        self._write(self.started, file_version="brain.Event:2")

        params = {
            # A null would be no value of a hyperparameter, so it is shown as text.
            key: text if (value := resolve_scalar(text)) is None else value
            for key, text in flatten_params(self.config).items()
        }
        self._write(
            self.started, summary=hparams_pb(params, self.record.name, self.started)
        )

        tags = "".join(f"\n- {key}: {text}" for key, text in self.record.tags.items())
        texts = {
            "run": f"{self.record.note}\n{tags}",
            # Four blanks make it a block of code in Markdown, which keeps its lines.
            "settings": indent(shared_yaml(self.config), "    "),
        }
        for tag, text in texts.items():
            shown = Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""))
            shown.tensor.CopyFrom(make_tensor_proto(text))
            self._write(self.started, summary=Summary(value=[shown]))

    def _write(self, moment: float, **values: object) -> None:
        event = Event(wall_time=moment, **values)
        RecordWriter(self._file).write(event.SerializeToString())

    def sync(self, status: Status, *, ended: float | None = None) -> None:
        if not self._path.exists():  # `compare.py sync` has made another one
            self._open()
        for row in self.new_rows():
            values = [
                Summary.Value(tag=key, simple_value=v) for key, v in row.metrics.items()
            ]
            self._write(row.time, step=row.step, summary=Summary(value=values))
            self.num_points += len(values)
        # Without a flush a viewer would see nothing until the buffer is full.
        self._file.flush()
