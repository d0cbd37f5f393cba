"""Send the use of CPU, memory, disk, network and GPUs of each node to the MLflow run.

Owns: one monitor of MLflow's per node, in the background, and its end with the run.
Leaves out: the metrics themselves, which are MLflow's (`vitals/nodes/NAME/...`).

They are not in the journal. A store that does not answer costs points, and nothing else.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vitscale.config.redaction import redact
from vitscale.distributed.processes import node_name
from vitscale.tracking.mlflow_client import open_client, read_link
from vitscale.tracking.run_facts import NODE_PREFIX, absolute_uri, sqlite_path
from vitscale.tracking.settings import TrackingSettings

if TYPE_CHECKING:
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

SAMPLE_S = 10.0
SAMPLES_PER_POINT = 3
# A monitor that ended, because the store did not answer, is started again after this time.
RETRY_S = 60.0
CLOSE_WAIT_S = 2.0

_log = logging.getLogger(__name__)


@contextmanager
def node_metrics(
    folder: Path, settings: TrackingSettings, *, is_first_node: bool, is_first_of_node: bool
) -> Iterator[None]:
    """Watch this node until the block ends. Does nothing on other ranks, and without psutil.

    A SQLite store is only for the first node: several nodes cannot write to one file.
    """
    uri = None if settings.uri is None else absolute_uri(settings.uri)
    if (
        uri is None
        or not (settings.system_metrics and is_first_of_node)
        or not (is_first_node or sqlite_path(uri) is None)
        or importlib.util.find_spec("psutil") is None
    ):
        yield
        return
    watch = _Watch(folder, uri=uri)
    try:
        yield
    finally:
        watch.close()


class _Watch:
    """A daemon thread that keeps a monitor of MLflow's alive for the run of a folder.

    The folder's link names the run: the first rank may reach the store late, or replace the run.
    """

    def __init__(self, folder: Path, *, uri: str) -> None:
        self._folder, self._uri = folder, uri
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, within a bounded time; a thread that still waits for the store is left behind."""
        self._closing.set()
        self._thread.join(CLOSE_WAIT_S)

    def _work(self) -> None:
        monitor: SystemMetricsMonitor | None = None
        run_id = None
        pause = SAMPLE_S
        while not self._closing.wait(pause):
            pause = SAMPLE_S
            link = read_link(self._folder)
            if link is None or link.get("uri") != redact(self._uri):
                continue
            if monitor is not None and run_id == link["run_id"] and _is_alive(monitor):
                continue
            run_id = link["run_id"]
            # No failure of the store may reach training; `delivery` has warned of it.
            try:
                if monitor is not None:
                    monitor.finish()
                    pause = RETRY_S
                monitor = self._start(run_id)
            except Exception as error:
                _log.debug("no system metrics: %s", error)
                monitor, pause = None, RETRY_S
        if monitor is not None:
            monitor.finish()

    def _start(self, run_id: str) -> SystemMetricsMonitor:
        open_client(self._uri, say=lambda text: None)  # sets MLflow's time limits
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(
            run_id,
            sampling_interval=SAMPLE_S,
            samples_before_logging=SAMPLES_PER_POINT,
            node_id=node_name(),
            tracking_uri=self._uri,
        )
        # Its own prefix, system/, would put these charts before train/.
        monitor._metrics_prefix = NODE_PREFIX
        monitor._logging_step = monitor._get_next_logging_step(run_id)
        monitor.start()
        return monitor


def _is_alive(monitor: SystemMetricsMonitor) -> bool:
    thread = monitor._process
    return thread is not None and thread.is_alive()
