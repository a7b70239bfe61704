"""The two plots of a model: mean KL against bits, and the tail of the KL."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from yardstick.files import atomic_path
from yardstick.report.results import ModelResults

FAMILIES = (("gptq", "o", "C0"), ("rtn", "s", "C7"), ("gguf", "^", "C1"), ("", "D", "C2"))


def family_style(name: str) -> tuple[str, str]:
    """Marker and colour by the beginning of a candidate's name."""
    return next((marker, colour) for prefix, marker, colour in FAMILIES if name.startswith(prefix))


def save(figure, path: Path) -> None:
    """Write a PNG without the time or the version in it: the same results give the same bytes."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def plot_kl_against_bits(results: ModelResults, path: Path) -> None:
    """Scatter of mean KL (log scale) with its interval over bits per weight of all matrices read for a token."""
    figure, axes = plt.subplots(figsize=(7.5, 5))
    points = {}
    for row in results.measured:
        if row.is_noise:
            continue
        marker, colour = family_style(row.name)
        bits, kl = row.summary["bits_per_weight"]["all"], row.summary["kl"]
        error = None
        if kl["interval"]:
            error = [[max(kl["mean"] - kl["interval"][0], 0)], [max(kl["interval"][1] - kl["mean"], 0)]]
        axes.errorbar(bits, kl["mean"], yerr=error, fmt=marker, color=colour, capsize=3, markersize=7)
        points[row.name] = (bits, kl["mean"])
    axes.set_yscale("log")
    axes.set_xlabel("stored bits per weight (body and head)")
    axes.set_ylabel("mean KL from the original (nats)")
    axes.set_title(f"{results.model}: fidelity against size")
    axes.margins(x=0.25)
    axes.grid(True, which="both", alpha=0.25)
    label_points(axes, points)
    save(figure, path)


def label_points(axes, points: dict[str, tuple[float, float]]) -> None:
    """Name each point, at the first of eight places where the name covers no other name."""
    places = [(side * 8, height) for height in (-3, 6, -12, 14) for side in (1, -1)]
    taken = []
    for name, point in points.items():
        for x, y in places:
            label = axes.annotate(
                name, point, (x, y), textcoords="offset points", fontsize=8, ha="left" if x > 0 else "right"
            )
            box = label.get_window_extent(axes.figure.canvas.get_renderer())
            if not any(box.overlaps(other) for other in taken):
                break
            if (x, y) != places[-1]:
                label.remove()
        taken.append(box)


def plot_kl_tail(results: ModelResults, path: Path) -> None:
    """Share of positions with a KL above x, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(7.5, 5))
    styles = ("-", "--", ":", "-.")
    for index, row in enumerate(row for row in results.measured if not row.is_noise):
        kl = np.sort(row.positions["kl"].to_numpy())
        share = 1 - np.arange(len(kl)) / len(kl)
        shown = kl > 1e-5
        axes.plot(kl[shown], share[shown], styles[index // 10 % 4], label=row.name, linewidth=1.3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=1e-4)
    axes.set_xlabel("KL from the original (nats)")
    axes.set_ylabel("share of positions above")
    axes.set_title(f"{results.model}: how often a candidate goes wrong, and how badly")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    save(figure, path)
