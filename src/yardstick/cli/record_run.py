"""Keep a finished run where visitors see it: table, record and plots in docs/results, the table in the README."""

import datetime
import re
import shutil
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import write_text
from yardstick.provenance import machine, package_versions

BLOCK = re.compile(r"(<!-- table: begin -->\n).*?(<!-- table: end -->)", flags=re.S)


def main(arguments) -> None:
    for name in ("table.md", "quantization.md"):
        if not (arguments.results / name).is_file():
            raise YardstickError(f"{arguments.results / name}: no such file; run the experiment first")
    here = machine()
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    stamp = (
        f"Recorded {datetime.date.today().isoformat()} on {here['cpu']}, {here['system']}, "
        f"{arguments.cores} cores; {versions}.\n"
    )
    table = (arguments.results / "table.md").read_text(encoding="utf-8")
    write_text(arguments.output / "table.md", table + "\n" + stamp)
    record = (arguments.results / "quantization.md").read_text(encoding="utf-8")
    write_text(arguments.output / "quantization.md", record + "\n" + stamp)
    shutil.copytree(arguments.results / "plots", arguments.output / "plots", dirs_exist_ok=True)
    section = table[table.index("## ") :].replace("## ", "### ")
    readme = arguments.readme.read_text(encoding="utf-8")
    write_text(arguments.readme, BLOCK.sub(lambda found: found[1] + section + "\n" + stamp + found[2], readme))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--results", type=Path, required=True, help="folder of table.md and quantization.md")
    arguments.add_argument("--output", type=Path, required=True, help="folder to keep them in")
    arguments.add_argument("--readme", type=Path, default=Path("README.md"), help="README whose table is replaced")
    arguments.add_argument("--cores", type=int, required=True, help="cores that the run had")
    run_step(main, arguments)
