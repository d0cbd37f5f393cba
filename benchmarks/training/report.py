"""Print what the sections of gpu_training found, beside goals and predictions.

Owns: the tables at the end. Needs no torch.
Leaves out: goals and predictions themselves (`plan`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.training.plan import GOALS, VARIANTS, value_at
from benchmarks.training.scale import read_results
from vitscale.distributed.atomic_files import write_json

SHOWN = (
    *("images_per_s", "of_matmul", "of_datasheet", "of_products", "wrappers", "wrapper"),
    *("loss_gaps", "decoder", "loader_images_per_s_and_worker", "real_over_synthetic"),
    *("stall_over_torch_save", "idle_share", "first_step_s", "steps_taken", "steps_left"),
)


def print_summary(out: Path, names: list[str]) -> bool:
    """The sections of a call and their goals; writes OUT/results.json. Whether one failed."""
    sections = read_results(out)
    write_json(out / "results.json", {"sections": sections})
    print("\nsection      status     seconds  results")
    failed = False
    for name in names:
        values = sections.get(name, {})
        status, seconds = values.get("status", "failed"), values.get("process_s", 0.0)
        print(f"{name:12} {status:10} {seconds:7.0f}  {summary(values)}")
        wrong = values.get("wrong", [])
        for line in [*wrong, *([values["error"]] if "error" in values else [])]:
            print(f"{'':12} {line.splitlines()[0][:200]}")
        if values.get("hit_recompile_limit"):
            print(f"{'':12} torch's limit of recompiling was hit: something ran uncompiled")
        failed = failed or bool(wrong) or status == "failed"
    print_report({name: sections.get(name, {}) for name in names})
    print(f"all results: {out / 'results.json'}", flush=True)
    return failed


def print_report(sections: dict[str, dict[str, Any]]) -> None:
    """Goals, then variants: prediction and outcome."""
    print("\n" + "\n".join(goal_rows(sections)))
    rows = variant_rows(sections.get("variants", {}))
    if rows:
        print("\n" + "\n".join(rows))


def goal_rows(sections: dict[str, dict[str, Any]]) -> list[str]:
    rows = [f"{'goal':38} {'needed':>11} {'expected':>12} {'measured':>9}"]
    for goal in GOALS:
        if goal.section not in sections:
            continue
        value = value_at(sections[goal.section], goal.path)
        shown = "-" if value is None else f"{value:.3f}"
        verdict = "" if value is None else ("reached" if goal.reached(value) else "missed")
        row = f"{goal.what:38} {goal.needed():>11} {between(goal.expected):>12} {shown:>9}"
        rows.append(f"{row} {verdict}".rstrip())
    return rows


def variant_rows(values: dict[str, Any]) -> list[str]:
    found, left_out = values.get("rows", {}), values.get("left_out", {})
    rows = [f"{'variant':44} {'predicted':>12} {'measured':>9}  interval"]
    for variant in VARIANTS:
        name = f"{variant.model} {variant.what}"
        predicted = between(variant.predicted)
        if name in found:
            speed = found[name]["speed_over_base"]
            interval = f"{speed['low']:.3f} to {speed['high']:.3f}"
            rows.append(f"{name:44} {predicted:>12} {speed['median']:9.3f}  {interval}")
        elif name in left_out:
            why = " ".join(left_out[name].split())[:80]
            rows.append(f"{name:44} {predicted:>12} {'-':>9}  {why}")
    return rows if len(rows) > 1 else []


def between(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{values[0]:.2f}-{values[1]:.2f}"


def summary(values: dict[str, Any]) -> str:
    """The main results of a section in one line."""
    words = []
    for key in SHOWN:
        value = values.get(key)
        if isinstance(value, dict):
            words.append(f"{key} ({', '.join(f'{k} {short(v)}' for k, v in value.items())})")
        elif value is not None:
            words.append(f"{key} {short(value)}")
    return "; ".join(words)


def short(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("median", value.get("s"))
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]
