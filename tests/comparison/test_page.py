"""Page, CSV file and Markdown table of a comparison, from generated result documents."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

NAMES = (
    "off", "two_stream", "duplicate", "self_only", "mixup", "single_stream", "two_stream_until_three_quarters_of_it",
    "off_with_the_epochs_of_the_same_time_now", "before", "after", "first", "last",
)  # fmt: skip
METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AP/RBC", "AP/WBC", "AP/Platelets")


def span(values: list[float], width: float) -> dict[str, float | None]:
    """Return an interval of ``width`` standard errors to each side; without ends for one value."""
    if len(values) < 2:
        return {"low": None, "high": None}
    half = width * statistics.stdev(values) / len(values) ** 0.5
    return {"low": statistics.mean(values) - half, "high": statistics.mean(values) + half}


def difference(values: list[float], primary: bool, rng: np.random.Generator) -> dict[str, Any]:
    mean, both = statistics.mean(values), span(values, 3.5)
    low, high = both["low"], both["high"]
    verdict = "undecided" if low is None or high is None or low <= 0 <= high else "better" if mean > 0 else "worse"
    p = float(rng.uniform(0, 1)) if len(values) > 1 else None
    return {
        "mean": mean,
        "values": values,
        "seeds": span(values, 2.8),
        "images": {"low": mean - 0.0213, "high": mean + 0.0227},
        "both": both,
        "p": p,
        "p_holm": min(1.0, 2 * p) if primary and p is not None else None,
        "detectable": 0.0187 if len(values) > 1 else None,
        "verdict": verdict,
    }


def document(arms: int = 5, seeds: int = 5, seed: int = 0, epochs: int = 12) -> dict[str, Any]:
    """Return a result document with random but plausible numbers; the last arm has one cell fewer."""
    rng = np.random.default_rng(seed)
    names = NAMES[:arms]
    base = np.clip(rng.normal([0.45, 0.8, 0.47, 0.2, 0.4, 0.5, 0.55, 0.6, 0.2], 0.01, (seeds, len(METRICS))), 0, 1)
    results, differences = [], []
    for index, name in enumerate(names):
        cells = [[s, None] for s in range(max(1, seeds - (index == arms - 1 and arms > 1)))]
        effect = 0 if index == 0 else float(rng.normal(0, 0.012))
        values = base[: len(cells)] + (effect + rng.normal(0, 0.008, (len(cells), len(METRICS))) if index else 0)
        curve = []
        for epoch in range(1, epochs + 1):
            mean = float(values[:, 0].mean()) * (1 - np.exp(-epoch / 3))
            ends = {"low": mean - 0.012, "high": mean + 0.014} if len(cells) > 1 else {"low": None, "high": None}
            curve.append({"epoch": epoch, "mean": mean, **ends, "count": len(cells)})
        metrics = {
            metric: {"mean": float(column.mean()), **span(column.tolist(), 2.8), "values": column.tolist()}
            for metric, column in zip(METRICS, values.T, strict=True)
        }
        ratio = 1.0 + 0.31 * index
        cost = {
            "step_seconds_ratio": {"mean": ratio, "low": ratio - 0.02, "high": ratio + 0.03},
            "memory_ratio": {"mean": ratio * 0.9, "low": None, "high": None},
            "rows_ratio": 2.0 if index else 1.0,
        }
        overrides = [f"batch_former.mode={name}"]
        results.append(
            {"name": name, "overrides": overrides, "cells": cells, "metrics": metrics, "curve": curve, "cost": cost}
        )
        if index:
            change = values - base[: len(cells)]
            columns = zip(METRICS, change.T, strict=True)
            found = {metric: difference(column.tolist(), metric == "AP", rng) for metric, column in columns}
            differences.append({"arm": name, "against": names[0], "pairs": cells, "metrics": found})
    return {
        "format": "detr_bf comparison 1",
        "title": "Blood cells, Deformable DETR",
        "baseline": names[0],
        "primary": "AP",
        "confidence": 0.95,
        "resamples": 2000,
        "arms": results,
        "differences": differences,
        "settings": [
            {"key": "batch_former.enabled", "values": {name: bool(i) for i, name in enumerate(names)}},
            {"key": "batch_former.mode", "values": {name: name for name in names[1:]}},
            {"key": "optimizer.lr", "values": {name: 1e-4 * (i + 1) for i, name in enumerate(names)}},
        ],
        "circumstances": {
            "data": {
                "train": {"sha256": "ab" * 32, "images": 292, "objects": 3901},
                "val": {"sha256": "cd" * 32, "images": 72, "objects": 987},
            },
            "machines": [{"CPU": "Some CPU @ 2.5 GHz, 2 of 2 cores usable", "python": "3.11.9", "torch": "2.15.0"}],
            "commands": ["detr-bf compare run configs/compare/bccd.yaml"],
            "versions": {"detr_bf": "0.1.0", "torch": "2.15.0"},
        },
        "sentences": [
            "two_stream is undecided against off: AP +0.4, 95 % interval -0.9 to +1.7 over seeds and images.",
            "These five seeds would have shown a difference of 1.9 AP with a probability of 80 %.",
        ],
    }
