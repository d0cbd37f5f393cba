"""Predict throughput, goodput and the best checkpoint interval of a run from 1 to 512 nodes.

    python benchmarks/scaling_model.py --config configs/vit_h14.yaml --nodes 1:512
    python benchmarks/scaling_model.py --config ... --set mfu=0.5 nic_gbit_s=200 --figure FILE.png
    python benchmarks/scaling_model.py --inputs        every input with its unit and source

A model, no measurement: the formulas are in `launch/planning/scaling/`, the inputs in its
`cluster.py`. The first table keeps the global batch of the configuration, the second the images of
a GPU. Two more compare the model with published throughput and with bytes counted on two ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

try:
    from launch.jobs.preparation import RUN_TYPES
    from launch.planning.dry_run import data_facts, known_plans, planned_classes
    from launch.planning.scaling.cluster import Cluster
    from launch.planning.scaling.prediction import Batch, Prediction, predict
    from launch.planning.scaling.published import (
        COUNTED_BYTES,
        TABLES,
        predicted_bytes,
        predicted_rates,
    )
    from launch.planning.scaling.steps import update_bytes
    from vitscale.config.errors import UserError, run_script
    from vitscale.config.loader import load_run, run_leaves
    from vitscale.runs.training import TrainingRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e '.[demo,dev]'", file=sys.stderr)
    raise SystemExit(2) from None

HEADINGS = (
    *("nodes", "GPUs", "images/GPU", "step ms", "compute", "exposed", "stragglers", "data"),
    *("images/s", "efficiency", "start s", "MTBF h", "save every", "goodput", "days"),
)
LEGEND = (
    "exposed: communication that nothing hides; data: until the loader has the images; the longer\n"
    "of GPU and data counts. save every: the best checkpoint.every_steps; goodput: share of the\n"
    "time in which training advances, with failures. Sources of the inputs: --inputs"
)
# Input -> (worse, better) of the figure: published or plausible extremes.
RANGES: dict[str, tuple[float, float]] = {
    "mfu": (0.30, 0.56),
    "micro_batch_overhead_ms": (6.0, 0.0),
    "straggler_sigma": (0.03, 0.0),
    "nic_gbit_s": (100.0, 800.0),
    "nics_per_node": (1, 8),
    "network_efficiency": (0.6, 0.95),
    "overlap_share": (0.0, 1.0),
    "loader_images_per_core_s": (270.0, 1440.0),
    "file_system_read_gb_s": (10.0, 200.0),
    "metadata_ops_s": (20_000.0, 1_000_000.0),
    "import_ops": (60_000, 0),
    "failures_per_1000_node_days": (16.0, 2.34),
    "detection_s": (600.0, 10.0),
    "compile_s": (120.0, 20.0),
    "write_slowdown": (0.2, 0.0),
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A run, and what its predictions share."""

    run: Any
    num_classes: int
    total_images: int

    def at(self, nodes: int, cluster: Cluster, batch: Batch) -> Prediction:
        return predict(
            self.run,
            nodes=nodes,
            cluster=cluster,
            num_classes=self.num_classes,
            total_images=self.total_images,
            batch=batch,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, metavar="FILE", help="a run that trains")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument("--nodes", default="1:512", metavar="N", help="1:512 doubles; or 1,3,9")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="INPUT=VALUE", help="inputs of the cluster"
    )
    parser.add_argument("--inputs", action="store_true", help="print all inputs and their sources")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw rates and sensitivity")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args()


def node_counts(text: str) -> list[int]:
    """`1:512` doubles from the first to the last; `1,3,9` is a list."""
    first, colon, last = text.partition(":")
    try:
        counts = [int(first)] if colon else [int(part) for part in text.split(",")]
        while colon and 0 < counts[-1] * 2 <= int(last):
            counts.append(counts[-1] * 2)
        if min(counts) > 0 and (not colon or int(last) >= counts[0]):
            return counts
    except ValueError:
        pass
    raise UserError(
        f"{text!r} is not a range of nodes", where="--nodes", allowed="such as 1:512 or 1,3,9"
    )


def load_model(arguments: argparse.Namespace) -> Model:
    if arguments.config is None:
        raise UserError("no run is named", where="--config", next_step="add --config FILE")
    types = {stage: RUN_TYPES[stage] for stage in ("pretrain", "finetune")}
    run = load_run(types, arguments.config, overrides=arguments.overrides).run
    assert isinstance(run, TrainingRun)
    facts = data_facts(run)
    plans = known_plans(run, facts, world_size=run.launch.nodes * run.launch.tasks_per_node)
    num_classes = planned_classes(run, facts)
    if not plans or num_classes is None:
        raise UserError(
            "images or classes are unknown",
            where=str(arguments.config),
            next_step="set data.planned_num_samples and model.num_classes",
        )
    last = plans[-1]
    return Model(
        run=run, num_classes=num_classes, total_images=last.total_steps * last.global_batch
    )


def table(
    model: Model, nodes: Sequence[int], cluster: Cluster, batch: Batch
) -> tuple[list[Prediction], list[str]]:
    """Predictions, and a note for each number of nodes over which the batch does not divide."""
    found, notes = [], []
    for number in nodes:
        try:
            found.append(model.at(number, cluster, batch))
        except UserError as error:
            if error.where != "data.global_batch":
                raise
            notes.append(f"{number} node(s): {error.what}")
    return found, notes


def row(each: Prediction) -> tuple[str, ...]:
    step, recovery = each.step, each.recovery
    times = (step.total, step.compute, step.exposed, step.stragglers, step.data)
    return (
        str(each.ranks.nodes),
        f"{each.ranks.world:,}",
        f"{each.work.micro_batch} x {each.work.accumulation}",
        *(f"{1e3 * seconds:,.1f}" for seconds in times),
        f"{each.images_per_s:,.0f}",
        f"{each.efficiency:.3f}",
        f"{sum(recovery.start.values()):,.0f}",
        f"{recovery.mtbf / 3600:,.1f}",
        f"{each.best_steps:,}",
        f"{each.goodput:.4f}",
        f"{each.days:.3g}",
    )


def show(title: str, headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """As a table of Markdown."""
    lines = [tuple(headings), tuple("-" * len(name) for name in headings), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    print(f"\n{title}\n")
    for line in lines:
        cells = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        print(f"| {' | '.join(cells)} |")


def show_inputs(cluster: Cluster) -> None:
    for name, info in Cluster.model_fields.items():
        meaning = " ".join((info.description or "").split())
        print(f"{name} = {getattr(cluster, name)}")
        print(textwrap.indent(textwrap.fill(meaning, 92), "    "))


def published_rows(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    for each in TABLES:
        for nodes, published in each.rates.items():
            low, high = predicted_rates(each, nodes=nodes, cluster=cluster)
            difference = f"{low / published - 1:+.1%} to {high / published - 1:+.1%}"
            if nodes == min(each.rates):
                difference = "gives the MFU"
            rates = (f"{published:,.0f}", f"{low:,.0f} to {high:,.0f}")
            yield (each.name, str(nodes), *rates, difference)


def counted_rows() -> Iterator[tuple[str, ...]]:
    for (stage, accumulation, gradient_bytes), counted in COUNTED_BYTES.items():
        predicted = predicted_bytes(stage, accumulation, gradient_bytes)
        sent_in = "bf16" if gradient_bytes == 2 else "fp32"
        yield (str(stage), str(accumulation), sent_in, f"{counted:g}", f"{predicted:g}")


def figures_of(each: Prediction, batch: Batch) -> dict[str, Any]:
    """One prediction as JSON values."""
    names = ("compute", "exposed", "stragglers", "optimizer", "data", "total")
    return {
        "batch": batch,
        "nodes": each.ranks.nodes,
        "gpus": each.ranks.world,
        "images_per_gpu": each.work.images_per_rank,
        "step_s": {name: getattr(each.step, name) for name in names},
        "images_per_s": each.images_per_s,
        "efficiency": each.efficiency,
        "start_s": each.recovery.start,
        "checkpoint_s": {"stall": each.recovery.stall, "write": each.recovery.write},
        "mtbf_s": each.recovery.mtbf,
        "best_every_steps": each.best_steps,
        "goodput": each.goodput,
        "goodput_as_configured": each.configured_goodput,
    }


def draw(path: Path, model: Model, nodes: Sequence[int], cluster: Cluster) -> None:
    """Rates over nodes, parts of a step, and what each input changes, as a PNG."""
    import matplotlib.pyplot as plt

    from launch.studies.figure import COLOURS, PNG_DPI, STYLE

    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(12, 9), layout="constrained")
        above, below = figure.subfigures(2, 1)
        rates, parts = above.subplots(1, 2)
        _draw_rates(rates, model, nodes, cluster, COLOURS)
        _draw_parts(parts, model, nodes, cluster, COLOURS)
        counts = (nodes[2 * len(nodes) // 3], nodes[-1])
        for axis, number in zip(below.subplots(1, 2), counts, strict=True):
            _draw_sensitivity(axis, model, number, cluster, COLOURS)
        figure.savefig(path, dpi=PNG_DPI)
        plt.close(figure)


def _draw_rates(
    axis: Any, model: Model, nodes: Sequence[int], cluster: Cluster, colours: Sequence[str]
) -> None:
    batches: tuple[Batch, ...] = ("per GPU", "global")
    for batch, colour in zip(batches, colours, strict=False):
        found, _ = table(model, nodes, cluster, batch)
        counts = [each.ranks.nodes for each in found]
        label = f"global batch {model.run.data.global_batch:,}"
        if batch == "per GPU":
            label = f"{found[0].work.images_per_rank} images per GPU"
            ideal = [found[0].images_per_s * count / counts[0] for count in counts]
            axis.plot(counts, ideal, ":", color="0.5", label="linear")
        axis.plot(counts, [each.images_per_s for each in found], "-o", color=colour, label=label)
        effective = [each.effective_images_per_s for each in found]
        axis.plot(counts, effective, "--", color=colour, label=f"{label}, with failures")
    axis.set(yscale="log", xlabel="nodes", ylabel="images/s", title="Throughput")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.legend(loc="upper left", fontsize=9)


def _draw_parts(
    axis: Any, model: Model, nodes: Sequence[int], cluster: Cluster, colours: Sequence[str]
) -> None:
    found, _ = table(model, nodes, cluster, "per GPU")
    counts = [str(each.ranks.nodes) for each in found]
    bottom = [0.0] * len(found)
    for name, colour in zip(("compute", "exposed", "stragglers"), colours, strict=False):
        heights = [1e3 * getattr(each.step, name) for each in found]
        label = {"exposed": "exposed communication"}.get(name, name)
        axis.bar(counts, heights, bottom=bottom, color=colour, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.plot(counts, [1e3 * each.step.data for each in found], "k_", ms=18, label="data ready")
    title = f"A step, {found[0].work.images_per_rank} images per GPU"
    axis.set(xlabel="nodes", ylabel="ms", title=title)
    axis.legend()


def _draw_sensitivity(
    axis: Any, model: Model, number: int, cluster: Cluster, colours: Sequence[str]
) -> None:
    """Bars of the effective rate over that of the default inputs."""
    batch: Batch = "per GPU"
    usual = model.at(number, cluster, batch).effective_images_per_s
    changes = {}
    for name, values in RANGES.items():
        rates = [
            model.at(number, cluster.model_copy(update={name: value}), batch).effective_images_per_s
            for value in values
        ]
        changes[name] = [100 * (rate / usual - 1) for rate in rates]
    order = sorted(changes, key=lambda name: max(map(abs, changes[name])))
    for side, colour in ((0, colours[5]), (1, colours[2])):
        axis.barh(order, [changes[name][side] for name in order], color=colour, height=0.6)
    for place, name in enumerate(order):
        text = " … ".join(f"{value:g}" for value in RANGES[name])
        where = axis.get_yaxis_transform()
        axis.text(1.01, place, text, transform=where, va="center", fontsize=8)
    axis.axvline(0, color="0.3", lw=0.8)
    title = f"Inputs at {number} node(s), worse and better"
    axis.set(xlabel="images/s with failures, change in %", title=title)


def main() -> None:
    arguments = parse_arguments()
    cluster = load_run(Cluster, None, overrides=arguments.set, with_site=False).run
    if arguments.inputs:
        show_inputs(cluster)
        return
    nodes, model = node_counts(arguments.nodes), load_model(arguments)
    first = model.at(model.run.launch.nodes, cluster, "global")
    print(
        f"{model.run.name}: {first.work.parameters:,} parameters, "
        f"{first.work.flops_per_image / 1e9:,.1f} GFLOPs per image, ZeRO {first.work.zero_stage}, "
        f"weights of {first.work.weight_bytes} bytes; a model, nothing measured"
    )
    values = [f"{name[0]}={value}" for name, value in run_leaves(cluster)]
    print(textwrap.fill("inputs: " + " ".join(values), 100, break_on_hyphens=False))
    sent = update_bytes(first.work, world=2) / first.work.parameters
    print(f"{sent:.3g} bytes per parameter would be sent by each of two ranks for an update")
    results = []
    titles: dict[Batch, str] = {
        "global": f"global batch {model.run.data.global_batch:,}",
        "per GPU": f"{first.work.images_per_rank} images per GPU",
    }
    for batch, title in titles.items():
        found, notes = table(model, nodes, cluster, batch)
        show(title, HEADINGS, [row(each) for each in found])
        print("\n".join(notes), end="\n" if notes else "")
        results += [figures_of(each, batch) for each in found]
    print(f"\n{LEGEND}")
    headings = ("published", "nodes", "images/s", "predicted", "difference")
    show("check against published throughput", headings, list(published_rows(cluster)))
    headings = ("ZeRO", "micro-batches", "gradients in", "counted", "predicted")
    title = "check against bytes per parameter counted on the sockets of two gloo ranks"
    show(title, headings, list(counted_rows()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.figure is not None:
        draw(arguments.figure, model, nodes, cluster)


if __name__ == "__main__":
    run_script(main)
