"""Write a report on a shard folder: one HTML page without other files.

Owns: counts and histograms over the index, likely copies in pairs, rejected inputs by reason, the
contact sheet, and filling `report.html.j2`.
Leaves out: whether the folder is valid (`checks`), small pictures (`thumbnails`), the page's
design.

Names of classes, files and splits come from others: the template escapes all of them, and the page
forbids itself to load or run anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.duplicates.likely_copies import KINDS
from data_prep.images.check import CHANGES
from data_prep.shards.ledger import LEDGER_NAME, REASONS
from data_prep.verification.checks import BATCH_ROWS
from data_prep.verification.tar_checks import Finding
from data_prep.verification.thumbnails import rejected_thumbnail, stored_thumbnail
from vitscale.config.errors import UserError
from vitscale.data.index import INDEX_NAME, Manifest
from vitscale.distributed.atomic_files import write_text

MAX_FINDINGS = 200
EXAMPLES_PER_REASON = 8
CLASSES_SHOWN = 12
# Up to this number, every class has its own bar.
CLASSES_AS_BARS = 40
HISTOGRAM_BINS = 24


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: int
    share: float
    """Of the longest bar, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ReportPicture:
    """An image of the corpus or of the shards, as the report shows it."""

    title: str
    note: str
    data: str | None
    """JPEG in base64; None: cannot be shown."""


@dataclass(frozen=True, slots=True)
class Reason:
    name: str
    meaning: str
    count: int
    pictures: list[ReportPicture]


@dataclass(slots=True)
class Statistics:
    """Sums over the index; memory grows with the classes, not with the samples."""

    per_class: np.ndarray
    short_side: np.ndarray = field(default_factory=lambda: np.zeros(1 << 16, np.int64))
    """Images by length of their short side; all longer ones in the last place."""
    file_kib: np.ndarray = field(default_factory=lambda: np.zeros(1 << 16, np.int64))
    formats: Counter[str] = field(default_factory=Counter)
    chosen: list[dict[str, Any]] = field(default_factory=list)


def write_report(
    path: Path,
    *,
    folder: Path,
    manifest: Manifest,
    findings: Sequence[Finding],
    source: Path | None,
    num_samples: int,
    seed: int,
) -> None:
    """Write the page atomically; content that cannot be read is left out."""
    import jinja2

    statistics = gather_statistics(folder, manifest, num_samples=num_samples, seed=seed)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    counts = statistics.per_class
    order = np.argsort(-counts, kind="stable")
    page = environment.get_template("report.html.j2").render(
        name=folder.resolve().name,
        manifest=manifest,
        findings=findings[:MAX_FINDINGS],
        num_findings=len(findings),
        num_samples=int(statistics.short_side.sum()),
        num_empty=int(np.count_nonzero(counts == 0)),
        charts=_charts(statistics, manifest),
        formats=statistics.formats.most_common(),
        largest=[(manifest.classes[i], int(counts[i])) for i in order[:CLASSES_SHOWN]],
        smallest=[(manifest.classes[i], int(counts[i])) for i in order[::-1][:CLASSES_SHOWN]],
        **_ledger(folder, source),
        **_likely_copies(manifest, source),
        has_source=source is not None,
        sheet=[_sheet_picture(folder, manifest, row) for row in statistics.chosen],
        mib=lambda num_bytes: f"{num_bytes / 2**20:,.1f}",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, page)
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror})", where=str(path), next_step="choose --report"
        ) from None


def gather_statistics(
    folder: Path, manifest: Manifest, *, num_samples: int, seed: int
) -> Statistics:
    """Gather statistics in one pass over the index, as far as it can be read."""
    found = Statistics(per_class=np.zeros(len(manifest.classes), np.int64))
    total = sum(entry.num_samples for entry in manifest.splits.values())
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(total, size=min(num_samples, total), replace=False))
    start = 0
    for table in _batches(folder / INDEX_NAME):
        labels = table.column("label").to_numpy()
        labels = labels[(labels >= 0) & (labels < len(manifest.classes))]
        found.per_class += np.bincount(labels, minlength=len(manifest.classes))
        sides = np.minimum(table.column("width").to_numpy(), table.column("height").to_numpy())
        found.short_side += _counted(sides)
        found.file_kib += _counted(table.column("length").to_numpy() >> 10)
        found.formats.update(table.column("format").to_pylist())
        here = chosen[(chosen >= start) & (chosen < start + len(table))] - start
        found.chosen += table.take(here).to_pylist()
        start += len(table)
    rng.shuffle(found.chosen)
    return found


def _batches(path: Path, columns: list[str] | None = None) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                yield pa.Table.from_batches([batch]).drop_null() if columns is None else batch
    except (OSError, KeyError, pa.ArrowException):
        return  # `checks` reports it


def _counted(values: np.ndarray) -> np.ndarray:
    return np.bincount(np.clip(values, 0, (1 << 16) - 1), minlength=1 << 16)


def _charts(found: Statistics, manifest: Manifest) -> list[tuple[str, list[Bar]]]:
    charts = [
        ("Short side, pixels", histogram(found.short_side)),
        ("Image file, KiB", histogram(found.file_kib)),
    ]
    counts = found.per_class
    if len(counts) <= CLASSES_AS_BARS:
        named = [(name, int(num)) for name, num in zip(manifest.classes, counts, strict=True)]
        charts.append(("Images of each class", bars(named)))
    else:
        sizes = histogram(_counted(counts))
        charts.append(("Classes by number of images", sizes))
    return [(title, shown) for title, shown in charts if shown]


def bars(named: Sequence[tuple[str, int]]) -> list[Bar]:
    longest = max((value for _, value in named), default=0) or 1
    return [Bar(label, value, value / longest) for label, value in named]


def histogram(counts: np.ndarray) -> list[Bar]:
    """Bars over the occupied range: equal steps when it is narrow, equal ratios when it is wide."""
    places = np.flatnonzero(counts)
    if not len(places):
        return []
    low, high = int(places[0]), int(places[-1])
    num_bins = min(HISTOGRAM_BINS, high - low + 1)
    if high > 16 * max(low, 1) and num_bins == HISTOGRAM_BINS:
        edges = np.geomspace(max(low, 1), high + 1, num_bins + 1).round()
        edges[0] = low
    else:
        edges = np.linspace(low, high + 1, num_bins + 1).round()
    edges = np.unique(edges.astype(np.int64))
    named = []
    for first, after in zip(edges[:-1], edges[1:], strict=True):
        label = f"{first:,}" if after - first == 1 else f"{first:,} – {after - 1:,}"
        named.append((label, int(counts[first:after].sum())))
    return bars(named)


def _ledger(folder: Path, source: Path | None) -> dict[str, Any]:
    """Counts by status; rejected inputs by reason, with examples; repairs by kind."""
    statuses: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    examples: dict[str, list[tuple[str, str]]] = {}
    columns = ["path", "class", "status", "reason"]
    for batch in _batches(folder / LEDGER_NAME, columns):
        statuses.update(batch.column("status").to_pylist())
        for row in batch.to_pylist():
            if row["status"] == "repaired":
                changes.update((row["reason"] or "?").split(","))
            elif row["status"] == "rejected":
                reason = row["reason"] or "?"
                reasons[reason] += 1
                shown = examples.setdefault(reason, [])
                if len(shown) < EXAMPLES_PER_REASON:
                    shown.append((row["path"], row["class"] or ""))
    rejected = [
        Reason(
            name,
            REASONS.get(name, ""),
            count,
            [_rejected_picture(source, name, path, note) for path, note in examples[name]],
        )
        for name, count in reasons.most_common()
    ]
    known = [(name, changes[name]) for name in CHANGES if changes[name]]
    other = [(name, num) for name, num in changes.items() if name not in CHANGES]
    return {"statuses": statuses, "rejected": rejected, "changes": known + other}


def _likely_copies(manifest: Manifest, source: Path | None) -> dict[str, Any]:
    """Counts of likely copies by kind, and examples: each picture beside what it looks like."""
    stored = manifest.inputs.get("likely_copies")
    if stored is None:
        return {"compared": False, "copies": []}
    copies = [
        Reason(
            kind,
            meaning,
            stored["counts"].get(kind, 0),
            [
                _source_picture(source, path, name)
                for pair in stored["examples"].get(kind, [])
                for path, name in (pair[:2], pair[2:])
            ],
        )
        for kind, meaning in KINDS.items()
    ]
    return {"compared": True, "copies": [one for one in copies if one.count]}


def _source_picture(source: Path | None, path: str, class_name: str) -> ReportPicture:
    data = None if source is None else rejected_thumbnail(source, path, reason="similar_duplicate")
    return ReportPicture(path, class_name, data)


def _rejected_picture(source: Path | None, reason: str, path: str, note: str) -> ReportPicture:
    data = None if source is None else rejected_thumbnail(source, path, reason=reason)
    return ReportPicture(path, note, data)


def _sheet_picture(folder: Path, manifest: Manifest, row: dict[str, Any]) -> ReportPicture:
    path = folder / manifest.shards_root / row["shard"]
    label = row["label"]
    known = 0 <= label < len(manifest.classes)
    title = manifest.classes[label] if known else f"label {label}"
    data = stored_thumbnail(path, offset=row["offset"], num_bytes=row["length"])
    note = f"{row['width']} × {row['height']} · {row['split']} · {row['key']}"
    if not manifest.classes:
        return ReportPicture("no label", note, data)
    note = f"{label} · {note}"
    return ReportPicture(title, note, data)
