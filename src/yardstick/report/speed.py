"""The engine's speed as tables and a roofline plot, all of numbers of one run."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from yardstick.report.markdown import table
from yardstick.report.plots import save

DENSE, WITHIN = "dense", 1.05
COLOURS = {"float32": "C0", "bfloat16": "C1"}

INTRODUCTION = """Every path multiplies the same packed weights (`engine/paths.py`); `dense` keeps them dequantized in
the inputs' type. Weights are taken in turn from as many copies as no cache holds (at most 1024, which for matrices of
less than 150 kB may be too few). MB are of the weight as the path keeps it, inputs and outputs; what `dequantize`
writes in between is not in it. The share is of the bandwidth of a large copy in the same run; above 1 the weights came
from a cache after all. Speeds are against dense weights in fp32 and bf16: 2 is twice as fast. The bold path is the
dispatcher's. The output head has fp32 inputs only, as logits are fp32.
"""


SPECULATION = """The same text, with a few ids drafted and verified by one forward (`models/speculate.py`). Its ids are
those of plain decoding, but for near-ties: one row and several are added up in another order. A model that repeats
itself is easy to draft for; other text gains less.
"""


def speed_document(record: dict) -> str:
    """speed.md of one model."""
    lines = [
        f"# Speed of the packed weights: {record['model']}, `{record['candidate']}`\n",
        f"{record['device']}; a copy moves {record['bandwidth'] / 1e9:.1f} GB/s. Times depend on the machine.\n",
        "## Products\n",
        INTRODUCTION,
    ]
    for dtype in dict.fromkeys(product["dtype"] for product in record["products"]):
        chosen = [product for product in record["products"] if product["dtype"] == dtype]
        lines += [f"### Inputs of {dtype}\n", product_table(chosen, record["products"]) + "\n", dispatch_line(chosen)]
    lines += ["## Decoding\n", decode_table(record) + "\n", decode_note(record)]
    if any(run["speculation"] for run in record["decode"]):
        lines += ["## Draft and verify\n", speculation_table(record) + "\n", SPECULATION]
    return "\n".join(lines)


def product_table(products: list[dict], every: list[dict]) -> str:
    """One row a shape, number of rows and path."""
    rows = []
    for product in products:
        name = f"**{product['path']}**" if product["chosen"] else product["path"]
        shape = f"{product['out_features']} x {product['in_features']}, g{product['group_size']}"
        cells = [shape, str(product["rows"]), name, f"{product['microseconds']:.0f}", f"{product['nbytes'] / 1e6:.3g}"]
        cells.append(f"{product['share']:.2g}")
        for dtype in ("float32", "bfloat16"):
            dense = find(every, product, path=DENSE, dtype=dtype)
            cells.append("–" if dense is None else f"{dense['microseconds'] / product['microseconds']:.2f}")
        rows.append(cells)
    header = ["out x in", "rows", "path", "µs", "MB moved", "share of bandwidth"]
    return table([*header, "speed, dense fp32 = 1", "dense bf16 = 1"], rows, left=3)


def find(products: list[dict], like: dict, **changes) -> dict | None:
    """The product of the same shape and rows with another path or type."""
    keys = ("name", "rows", "dtype", "path")
    wanted = {key: like[key] for key in keys} | changes
    return next((product for product in products if all(product[key] == wanted[key] for key in keys)), None)


def dispatch_line(products: list[dict]) -> str:
    """How far the dispatcher's choice is from the fastest path, where that is more than 5 %."""
    late = []
    for product in products:
        if product["chosen"]:
            same = [p for p in products if (p["name"], p["rows"]) == (product["name"], product["rows"])]
            best = min(same, key=lambda p: p["microseconds"])
            if product["microseconds"] > WITHIN * best["microseconds"]:
                ratio = product["microseconds"] / best["microseconds"]
                shape = f"{product['out_features']} x {product['in_features']}, {product['rows']} rows"
                late.append(f"{shape}: {product['path']} takes {ratio:.2f} times as long as {best['path']}")
    if not late:
        return "The dispatcher's choice is within 5 % of the fastest path everywhere.\n"
    return "The dispatcher's choice is not within 5 % of the fastest path at " + "; ".join(late) + ".\n"


def decode_table(record: dict) -> str:
    """One row a mode and type: what was reached, and what reading the weights alone allows."""
    rows = []
    for run in record["decode"]:
        ceiling = record["bandwidth"] / run["matrix_bytes"]
        reached = 1e3 / run["step_milliseconds"]
        rows.append(
            [
                run["mode"],
                run["dtype"],
                f"{run['step_milliseconds']:.1f}",
                f"{reached:.1f}",
                f"{run['read_bytes'] / 1e6:.3g}",
                f"{run['matrix_bytes'] / 1e6:.3g}",
                f"{ceiling:.3g}",
                f"{reached / ceiling:.2g}",
                f"{1e3 * run['prompt'] / run['prompt_milliseconds']:.0f}",
                f"{run['peak_memory'] / 1e9:.2f}",
            ]
        )
    header = ["weights", "dtype", "ms a step", "tokens/s", "MB read", "MB stored", "ceiling, tokens/s", "share reached"]
    return table([*header, "prompt, tokens/s", "peak memory, GB"], rows, left=2)


def speculation_table(record: dict) -> str:
    """One row a mode, type and draft."""
    rows = []
    for run in record["decode"]:
        for found in run["speculation"]:
            rows.append(
                [
                    run["mode"],
                    run["dtype"],
                    f"{found['draft']}, up to {found['most']}",
                    f"{found['milliseconds']:.1f}",
                    f"{found['plain_milliseconds']:.1f}",
                    f"{found['times_plain']:.2f}",
                    str(found["forwards"]),
                    f"{found['accepted']} of {found['drafted']}",
                    f"{found['same']} of {len(run['written'])}",
                ]
            )
    header = ["weights", "dtype", "draft", "ms an id", "plain", "speed, plain = 1", "forwards"]
    return table([*header, "drafts kept", "ids as plain"], rows, left=3)


def decode_note(record: dict) -> str:
    prompts = sorted({run["prompt"] for run in record["decode"]})
    steps = sorted({run["steps"] for run in record["decode"]})
    return (
        f"One text, greedy, after a prompt of {', '.join(map(str, prompts))} ids; the median of "
        f"{', '.join(map(str, steps))} steps. MB are of the matrices that a step needs: as the dispatcher's paths read "
        "them, and as they are stored (dense weights: in the compute type, the head in fp32). The ceiling is the "
        "copy's bandwidth over the stored bytes; where more is read, as by dense products with packed weights, it "
        "cannot be reached. Peak memory is that of the process on a CPU.\n"
    )


def plot_roofline(record: dict, path: Path) -> None:
    """Operations a second against operations a byte, each product of the dispatcher (circles) and of dense weights
    (crosses) a point, under the line that the copy's bandwidth draws."""
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    intensities = []
    for dtype, colour in COLOURS.items():
        for chosen, marker in ((True, "o"), (False, "x")):
            points = [p for p in record["products"] if p["dtype"] == dtype]
            points = [p for p in points if (p["chosen"] if chosen else p["path"] == DENSE)]
            operations = [2 * p["rows"] * p["out_features"] * p["in_features"] for p in points]
            x = [count / p["nbytes"] for count, p in zip(operations, points, strict=True)]
            y = [count / p["microseconds"] * 1e-3 for count, p in zip(operations, points, strict=True)]
            if points:
                label = f"{'dispatcher' if chosen else 'dense weights'}, {dtype}"
                axes.scatter(x, y, marker=marker, color=colour, label=label, alpha=0.7)
            intensities += x
    if intensities:
        ends = [min(intensities), max(intensities)]
        axes.plot(ends, [record["bandwidth"] * end * 1e-9 for end in ends], color="0.4", label="bandwidth of a copy")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte moved", ylabel="10^9 operations a second")
    axes.set_title(f"{record['model']}: products of the engine")
    axes.legend()
    save(figure, path)
