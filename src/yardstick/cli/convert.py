"""Turn somebody else's int4 checkpoint into our packing: the same codes, with bf16 scales and minima."""

import sys
from pathlib import Path

import torch

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from yardstick.models.config import load_config
from yardstick.models.prefill import expected_tensors
from yardstick.provenance import code_digest, package_versions
from yardstick.quantize.checkpoint import INDEX, PackedWriter, shards_of
from yardstick.quantize.repack import check_read_back, repack_model
from yardstick.report.markdown import table
from yardstick.sources import KINDS, TensorSource, audit_source, open_source
from yardstick.sources.hf import HuggingFaceSource
from yardstick.sources.packed import PackedSource
from yardstick.sources.safetensors_file import checkpoint_files

INTEGER_KINDS = ("ct", "gptq", "awq", "quark")
RECORD = "convert.json"


def main(arguments) -> None:
    torch.set_num_threads(1)  # nothing but small pieces; sums of several threads differ in their last digit
    kind = arguments.spec.partition(":")[0]
    if kind not in INTEGER_KINDS:
        raise YardstickError(
            f"source {arguments.spec}: only int4 checkpoints can be converted: "
            f"{', '.join(f'{known}:FOLDER' for known in INTEGER_KINDS)}"
        )
    if not arguments.base.is_dir():
        raise YardstickError(f"{arguments.base}: no such folder; --base is the original's Hugging Face folder")
    config = load_config(arguments.base)
    # the original need not be here in full for this; where it is, it helps to read a wrong label
    weights = [*arguments.base.glob("model.safetensors"), *arguments.base.glob(INDEX)]
    base = HuggingFaceSource(arguments.base) if weights else None
    source = open_source(arguments.spec, config, base)
    expected = expected_tensors(config, source)
    audit_source(source, expected)
    shards = shards_of(config, source)
    recipe = {"method": "convert", "kind": kind, "exact": arguments.exact}
    record_path = arguments.record or arguments.output / RECORD
    require_new(arguments.output, shards, recipe, record_path)
    files = {path.name: sha256_file(path) for path in [source.path / "config.json", *checkpoint_files(source.path)]}
    inputs = {"candidate": sha256_text(canonical_json(files)), "config": sha256_file(arguments.base / "config.json")}
    code = code_digest("yardstick.cli.convert", KINDS[kind][0])
    proof = {"recipe": recipe, "inputs": inputs, "code_sha256": code}
    writer = PackedWriter(arguments.output, sha256_text(canonical_json(proof)))
    repack_model(source, shards, writer, arguments.exact)
    reports = writer.finish(shards, recipe, arguments.base)

    packed = PackedSource(arguments.output)
    audit_source(packed, expected_tensors(config, packed))
    check_read_back(source, packed, list(expected), reports)
    record = {**proof, "files": files, "versions": package_versions(), "tensors": reports}
    write_json(record_path, record)
    show(reports, source)


def require_new(output: Path, shards: dict[str, list[str]], recipe: dict, record: Path) -> None:
    """Refuse a folder that holds something else than a conversion that was stopped, be it in its last check.

    Raises:
        YardstickError: it does.
    """
    ours = {f"{shard}.safetensors" for shard in shards}
    found = [path.name for path in sorted(output.glob("*.safetensors")) if path.name not in ours]
    whole = (output / INDEX).exists()
    if whole and not record.exists():
        metadata = read_json(output / INDEX).get("metadata") or {}
        whole = (metadata.get("yardstick") or {}).get("recipe") != recipe
    if found or whole:
        raise YardstickError(
            f"{output}: holds a checkpoint already ({(found or [INDEX])[0]}); --output is a new folder"
        )


def show(reports: list[dict], source: TensorSource) -> None:
    """A row for each tensor that bf16 changes, and what it comes to."""
    changed = [report for report in reports if report["inexact_groups"]]
    rows = [
        [
            report["name"],
            source.infos()[report["name"]].scheme,
            f"{report['inexact_groups']} of {report['groups']}",
            f"{report['greatest_change']:.2e}",
            f"{report['relative_error']:.2e}",
        ]
        for report in changed
    ]
    if rows:
        header = ["tensor", "scheme", "inexact groups", "greatest change of a weight", "relative error"]
        print(table(header, rows, left=2))
    print(
        f"{len(reports) - len(changed)} of {len(reports)} quantized tensors are exact, bit for bit"
        + (f"; the others change a weight by up to {max(r['greatest_change'] for r in changed):.2e}" if rows else "")
        + " of the greatest weight of its group" * bool(rows),
        file=sys.stderr,
    )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("spec", help="the checkpoint as kind:folder, with kind ct, gptq, awq or quark")
    arguments.add_argument("--base", type=Path, required=True, help="folder of the original: config.json and tokenizer")
    arguments.add_argument("--output", type=Path, required=True, help="new folder for the packed checkpoint")
    arguments.add_argument("--record", type=Path, help=f"record to write; {RECORD} in the new folder if left out")
    arguments.add_argument("--exact", action="store_true", help="refuse a checkpoint that bf16 would change")
    run_step(main, arguments)
