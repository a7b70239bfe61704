"""Write table.md: one section a model, candidates sorted by mean KL, with the bar and whether it is met."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.experiment import NOISE_FLOORS
from yardstick.files import write_text
from yardstick.report.markdown import fidelity_table, not_measured_line, reference_line
from yardstick.report.recorded import recorded_section
from yardstick.report.results import best_line, load_results, verdict

INTRODUCTION = """# Fidelity of quantized checkpoints

KL divergence (nats) from the original model over the whole vocabulary, at every position; lower is more faithful.
This is a ranking of fidelity, not of quality. Bits are those of the stored tensors, scales and zero points included:
`body` is the matrices of all layers, `all` adds the output head. The difference column is paired with the baseline,
position by position; intervals resample whole chunks.
"""


def main(arguments) -> None:
    recipe = arguments.recipe
    sections = [INTRODUCTION]
    for model in recipe["models"]:
        results = load_results(arguments.results, model, recipe)
        floors = "; ".join(f"*{name}* is {text}" for name, text in NOISE_FLOORS.items())
        sections += [f"## {model}\n", reference_line(results) + "\n", fidelity_table(results) + "\n"]
        sections += not_measured_line(results)
        sections += [verdict(results) + "\n", *best_line(results), f"Noise floors: {floors}.\n"]
        if model in recipe["recorded"]:
            sections += recorded_section(results, Path(recipe["recorded"][model]))
    write_text(arguments.output, "\n".join(sections))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument(
        "--results", type=Path, required=True, help="folder that holds <model>/<candidate>/summary.json"
    )
    arguments.add_argument("--output", type=Path, required=True, help="table.md to write")
    run_step(main, arguments)
