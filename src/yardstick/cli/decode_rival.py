"""Let a rival's own tool spell its weights out, for a format that nothing else can decode, and write their manifest."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import sha256_file, write_json
from yardstick.manifest import checked_files, write_manifest
from yardstick.models.folder import open_original
from yardstick.models.prefill import expected_tensors
from yardstick.provenance import code_digest
from yardstick.rivals.tool import run_tool, tool_versions
from yardstick.sources import audit_source, open_source
from yardstick.sources.decoded import STORED
from yardstick.sources.exl3 import stored_tensors


def main(arguments) -> None:
    original, manifest = open_original(arguments.model), arguments.output
    published, _ = checked_files(arguments.checkpoint)
    stored = stored_tensors(published)
    environment, folder = arguments.packages.parent, manifest.parent / "files"
    run_tool(
        f"rival {arguments.name}", environment, arguments.script, arguments.recipe, published.resolve(), None, folder
    )
    write_json(folder / STORED, {"tensors": stored})
    source = open_source(f"bf16dir:{folder}")
    audit_source(source, expected_tensors(original.config, source))
    write_manifest(
        manifest,
        folder,
        [path.name for path in folder.iterdir() if path.is_file()],
        decoded_from=sha256_file(arguments.checkpoint),
        script=sha256_file(arguments.script),
        code_sha256=code_digest("yardstick.cli.decode_rival"),
        versions=tool_versions(environment),
    )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the rival's name")
    arguments.add_argument("--model", type=Path, required=True, help="manifest.json of the model it is a rival of")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="manifest.json of the rival's files")
    arguments.add_argument("--packages", type=Path, required=True, help="packages.json of the tool's environment")
    arguments.add_argument("--script", type=Path, required=True, help="decode.py of the tool")
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json of the decoded weights")
    run_step(main, arguments)
