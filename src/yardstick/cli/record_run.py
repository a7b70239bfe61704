"""Keep a finished run in the repository: table, record and plots, where asked the table in the README, and figures that
later runs are printed beside."""

import datetime
import re
import shutil
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.experiment import NOISE_FLOORS
from yardstick.files import read_json, write_json, write_text
from yardstick.provenance import machine, package_versions

BLOCK = re.compile(r"(<!-- table: begin -->\n).*?(<!-- table: end -->)", flags=re.S)


def main(arguments) -> None:
    for name in ("table.md", "quantization.md"):
        if not (arguments.results / name).is_file():
            raise YardstickError(f"{arguments.results / name}: no such file; run the experiment first")
    here = machine()
    versions = ", ".join(
        f"{name} {version}" for name, version in (package_versions() | tools(arguments.results)).items()
    )
    today = datetime.date.today().isoformat()
    stamp = f"Recorded {today} on {here['cpu']}, {here['system']}, {arguments.cores} cores; {versions}.\n"
    table = (arguments.results / "table.md").read_text(encoding="utf-8")
    write_text(arguments.output / "table.md", table + "\n" + stamp)
    record = (arguments.results / "quantization.md").read_text(encoding="utf-8")
    write_text(arguments.output / "quantization.md", record + "\n" + stamp)
    shutil.copytree(arguments.results / "plots", arguments.output / "plots", dirs_exist_ok=True)
    section = table[table.index("## ") :].replace("## ", "### ")
    if arguments.readme:
        readme = arguments.readme.read_text(encoding="utf-8")
        write_text(arguments.readme, BLOCK.sub(lambda found: found[1] + section + "\n" + stamp + found[2], readme))
    if arguments.figures:
        origin = f"of a run on {today}, {arguments.cores} cores of {here['cpu']}; they are not limits that must be met."
        write_json(arguments.figures, {"origin": origin, "candidates": figures(arguments.results)})


def measured(results: Path) -> dict[str, dict]:
    """Summary of each candidate of the one model in `results` that the table names.

    Raises:
        YardstickError: there are several models, whose candidates have the same names.
    """
    table = (results / "table.md").read_text(encoding="utf-8")
    models = re.findall(r"^## (\S+)$", table, flags=re.M)
    if len(models) != 1:
        raise YardstickError(f"{results}: figures are kept of one model, these are of {', '.join(models)}")
    names = re.findall(r"^\| [`*]([^`*]+)[`*]", table, flags=re.M)
    return {name: read_json(results / models[0] / name / "summary.json") for name in names}


def figures(results: Path) -> dict[str, dict[str, float]]:
    """Bits, mean KL and top-1 of each candidate that did not fail and is no noise floor, in the form of recorded
    figures."""
    return {
        name: {
            "bits_per_weight.all": round(summary["bits_per_weight"]["all"], 4),
            "kl.mean": round(summary["kl"]["mean"], 6),
            "top1": round(summary["top1"], 6),
        }
        for name, summary in measured(results).items()
        if not summary["failed"] and name not in NOISE_FLOORS
    }


def tools(results: Path) -> dict[str, str]:
    """Versions of the tools that made rivals, by the name of the package that a tool's folder is called after."""
    found = {}
    for path in sorted(results.glob("*/*/quantize.json")):
        record = read_json(path)
        if record.get("recipe", {}).get("kind") == "made":
            tool = record["recipe"]["tool"]
            same = [name for name in record["versions"] if re.sub(r"[-_.]", "", name.lower()) == tool]
            found |= {name: record["versions"][name] for name in same}
    return found


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--results", type=Path, required=True, help="folder of table.md and quantization.md")
    arguments.add_argument("--output", type=Path, required=True, help="folder to keep them in")
    arguments.add_argument("--readme", type=Path, help="README whose table is replaced")
    arguments.add_argument("--figures", type=Path, help="also write figures that a config can name under `recorded`")
    arguments.add_argument("--cores", type=int, required=True, help="cores that the run had")
    run_step(main, arguments)
