"""The plot of an attribution: a heat map by layer and kind, with bars for whole layers and whole kinds beside it."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

from yardstick.report.plots import save

DECADES = 4  # of colour below the largest KL; less is drawn as the least


def plot_attribution(record: dict, path: Path) -> None:
    """Single matrices as a heat map (log colour), layers as bars on the right, kinds as bars on top, each where it was
    measured. Head and embedding, which are of no layer, are bars of their kind only."""
    figure, grid = plt.subplots(
        2,
        2,
        figsize=(9, 8),
        width_ratios=(3, 1),
        height_ratios=(1, 4),
        sharex="col",
        sharey="row",
        layout="constrained",
    )
    (top, corner), (centre, right) = grid
    corner.axis("off")
    if record["failed"]:
        corner.text(0, 0.5, "failed", fontsize=12)
    branches = record["branches"]
    groups = {group: [b for b in branches if b["group"] == group] for group in ("kind", "layer", "matrix")}
    kinds = list(dict.fromkeys(b["kind"] for b in [*groups["kind"], *groups["matrix"]]))
    layers = sorted({b["layer"] for b in [*groups["layer"], *groups["matrix"]] if b["layer"] is not None})
    values = heat_map(groups["matrix"], layers, kinds)
    if np.isfinite(values).any() and np.nanmax(values) > 0:
        largest = float(np.nanmax(values))
        scale = LogNorm(largest * 10.0**-DECADES, largest, clip=True)
        image = centre.imshow(np.clip(values, scale.vmin, None), aspect="auto", origin="lower", norm=scale)
        figure.colorbar(image, ax=corner, label="KL of one matrix (nats)", fraction=0.5)
    bars = [(top.bar, kinds, groups["kind"], "kind"), (right.barh, layers, groups["layer"], "layer")]
    for draw, places, entries, key in bars:
        heights = {entry[key]: entry["kl"] for entry in entries}
        draw(range(len(places)), [max(heights.get(place, 0.0), 0.0) for place in places], color="C0")
    centre.set_xticks(range(len(kinds)), kinds, rotation=45)
    step = max(1, len(layers) // 30)
    centre.set_yticks(range(0, len(layers), step), layers[::step])
    centre.set_xlabel("kind of matrix")
    centre.set_ylabel("layer")
    top.set_ylabel("KL, all of a kind")
    right.set_xlabel("KL, a whole layer")
    figure.suptitle(f"{record['model']}: where the loss of {record['candidate']} comes from")
    save(figure, path)


def heat_map(entries: list[dict], layers: list[int], kinds: list[str]) -> np.ndarray:
    """KL of single matrices [layers, kinds]; NaN where a layer has no matrix of the kind."""
    values = np.full((len(layers), len(kinds)), np.nan)
    for entry in entries:
        if entry["layer"] is not None:
            values[layers.index(entry["layer"]), kinds.index(entry["kind"])] = entry["kl"]
    return values
