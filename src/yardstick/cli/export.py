"""Export a packed checkpoint as a compressed-tensors folder, for transformers and vLLM."""

import sys
from collections.abc import Iterator
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import sha256_file, write_json
from yardstick.provenance import code_digest, package_versions
from yardstick.quantize.checkpoint import INDEX
from yardstick.report.markdown import table
from yardstick.rivals.export_ct import one_group
from yardstick.rivals.export_folder import export_folder
from yardstick.sources.packed import PackedSource

RECORD = "export.json"


def main(arguments) -> None:
    folder, output = arguments.folder, arguments.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise YardstickError(f"{output}: is there already; --output is a new folder")
    source = PackedSource(folder)
    exported = export_folder(source, arguments.base, output)
    record = {
        "recipe": {"method": "export", "format": "compressed-tensors"},
        "inputs": {"checkpoint": sha256_file(folder / INDEX)},
        "code_sha256": code_digest("yardstick.cli.export"),
        "versions": package_versions(),
        **exported,
    }
    write_json(arguments.record or output / RECORD, record)
    show(exported["tensors"], exported["relative_error"])
    for line in doubts(source.schemes):
        print(f"note: {line}", file=sys.stderr)


def show(reports: list[dict], total: float) -> None:
    header = ["tensor", "group size", "groups", "zero point clipped", "one value", "relative error"]
    rows = [
        [
            report["name"],
            *(str(report[key]) for key in ("group_size", "groups", "clipped_groups", "constant_groups")),
            f"{report['relative_error']:.2e}",
        ]
        for report in reports
    ]
    sums = [str(sum(report[key] for report in reports)) for key in ("groups", "clipped_groups", "constant_groups")]
    print(table(header, [*rows, ["all", "", *sums, f"{total:.2e}"]]))
    print(f"integer zero points change the weights by {total:.2e} of themselves", file=sys.stderr)


def doubts(schemes: dict[str, dict]) -> Iterator[str]:
    """What transformers loads and some versions or kernels of vLLM do not."""
    if "lm_head.weight" in schemes:
        yield "the head is quantized; vLLM reads that since March 2026"
    sizes = {scheme["group_size"] for scheme in schemes.values() if not one_group(scheme)}
    odd = sorted(sizes - {32, 64, 128})
    if odd:
        yield f"groups of {', '.join(map(str, odd))}; vLLM's Marlin kernels have 32, 64 and 128"
    narrow = next((name for name, scheme in schemes.items() if scheme["shape"][0] % 8), None)
    if narrow:
        yield f"{narrow} has {schemes[narrow]['shape'][0]} rows; vLLM asks for a multiple of 8"


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path, help="the packed checkpoint")
    arguments.add_argument("--output", type=Path, required=True, help="new folder for the exported checkpoint")
    arguments.add_argument("--record", type=Path, help=f"record to write; {RECORD} in the new folder if left out")
    arguments.add_argument("--base", type=Path, help="the original's folder, needed where it has a vision tower")
    run_step(main, arguments)
