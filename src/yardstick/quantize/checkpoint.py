"""Write packed checkpoints shard by shard, so that a stopped run resumes at the layer where it was.

A shard is one layer (or the rest of the model). Each is written whole and carries the digest of the recipe, inputs
and code it was made by; one with another digest is made again. The index is written last: it marks the end, and
holds the digest of every shard.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from yardstick.files import atomic_path, one_key_metadata, read_json, sha256_file, write_json
from yardstick.models.config import ModelConfig
from yardstick.models.prefill import expected_tensors
from yardstick.quantize.pack import pack_nibbles
from yardstick.sources.base import TensorSource
from yardstick.sources.packed import CODES, MINIMA, SCALES

INDEX = "model.safetensors.index.json"


class PackedWriter:
    """A packed checkpoint under construction."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder, self.digest = folder, digest
        self._tensors: dict[str, torch.Tensor] = {}
        self._schemes: dict[str, dict] = {}
        self._reports: list[dict] = []
        # what else the record says of the checkpoint, by key; kept in every shard that is finished after
        self.facts: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add_quantized(
        self, name: str, codes, scales, minima, group_size: int, report: dict | None = None, terms: int = 1
    ) -> None:
        """Put a matrix into the shard that is being built, with the rows of its terms behind each other. `report` goes
        into the checkpoint's record."""
        parts = {CODES: pack_nibbles(codes), SCALES: scales, MINIMA: minima}
        scheme = {"group_size": group_size, "shape": [len(codes) // terms, codes.shape[1]]}
        self.add_encoded(name, parts, scheme if terms == 1 else scheme | {"terms": terms}, report)

    def add_encoded(self, name: str, parts: dict[str, torch.Tensor], scheme: dict, report: dict | None = None) -> None:
        """Put a matrix of any format: stored tensors by the ends of their names, and the scheme that decodes them."""
        for end, tensor in parts.items():
            self.add_plain(name.removesuffix(".weight") + end, tensor)
        self._schemes[name] = scheme
        if report:
            self._reports.append({"name": name, **report})

    def add_plain(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor as it is into the shard that is being built."""
        self._tensors[name] = tensor.cpu().contiguous()

    def add_kept(self, name: str, tensor: torch.Tensor, tied: bool = False) -> None:
        """Put a matrix that the recipe leaves in bf16; a tied head that stays bf16 stays tied and is not stored."""
        if not tied:
            self.add_plain(name, tensor.bfloat16())

    def finish_shard(self, shard: str) -> None:
        """Write the shard and forget its tensors."""
        record = {"digest": self.digest, "schemes": self._schemes, "reports": self._reports}
        if self.facts:
            record["facts"] = self.facts
        with atomic_path(self._path(shard)) as temporary:
            save_file(self._tensors, temporary, metadata=one_key_metadata(record))
        self._tensors, self._schemes, self._reports = {}, {}, []

    def has_shard(self, shard: str) -> bool:
        """Whether a whole shard with our digest is there."""
        try:
            with safe_open(self._path(shard), framework="pt") as bundle:
                return _record(bundle).get("digest") == self.digest
        except (FileNotFoundError, SafetensorError):
            return False

    def read_shard(self, shard: str) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
        """Stored tensors and packing schemes of a finished shard."""
        with safe_open(self._path(shard), framework="pt") as bundle:
            names = list(bundle.keys())
            return {name: bundle.get_tensor(name) for name in names}, _record(bundle)["schemes"]

    def save_state(self, name: str, tensors: dict[str, torch.Tensor], record: dict) -> None:
        """Keep what a stopped run goes on with beside the shards, until they are finished."""
        tensors = {key: value.cpu().contiguous() for key, value in tensors.items()}
        with atomic_path(self._path(name)) as temporary:
            save_file(tensors, temporary, metadata=one_key_metadata({"digest": self.digest} | record))

    def load_state(self, name: str) -> tuple[dict[str, torch.Tensor], dict] | None:
        """Tensors and record of `save_state`, where they are whole and carry our digest."""
        if not self.has_shard(name):
            return None
        with safe_open(self._path(name), framework="pt") as bundle:
            names = list(bundle.keys())
            return {key: bundle.get_tensor(key) for key in names}, _record(bundle)

    def finish(self, shards: Iterable[str], recipe: dict, model_folder: Path, own_head: bool = False) -> list[dict]:
        """Write config.json, tokenizer and the index; delete shards of earlier runs. Returns the reports.

        With `own_head` the config says that the head is no copy of the embedding, whatever the original's says.
        """
        weight_map, schemes, digests, reports, total = {}, {}, {}, [], 0
        for shard in shards:
            path = self._path(shard)
            with safe_open(path, framework="pt") as bundle:
                weight_map.update(dict.fromkeys(bundle.keys(), path.name))
                record = _record(bundle)
                schemes.update(record["schemes"])
                reports.extend(record["reports"])
                self.facts |= record.get("facts", {})
            digests[path.name] = sha256_file(path)
            total += path.stat().st_size
        for path in self.folder.glob("*.safetensors"):
            if path.name not in digests:
                path.unlink()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (model_folder / name).is_file():
                shutil.copyfile(model_folder / name, self.folder / name)
        if own_head:
            raw = read_json(self.folder / "config.json")
            untie(raw)
            write_json(self.folder / "config.json", raw)
        packing = {"recipe": recipe, "tensors": schemes, "sha256": digests}
        write_json(
            self.folder / INDEX,
            {"metadata": {"total_size": total, "yardstick": packing}, "weight_map": weight_map},
        )
        return reports

    def _path(self, shard: str) -> Path:
        return self.folder / f"{shard}.safetensors"


def shards_of(config: ModelConfig, source: TensorSource) -> dict[str, list[str]]:
    """Shards of a checkpoint that holds what `source` does, and the tensors of each: one a layer, and the rest."""
    waiting = dict.fromkeys(expected_tensors(config, source))
    shards = {}
    for layer in range(config.num_layers):
        names = [config.layer_name(layer, name) for name in config.layer_tensors(layer)]
        shards[f"layer-{layer:05d}"] = names
        for name in names:
            del waiting[name]
    return shards | {"rest": list(waiting)}


def untie(raw: dict) -> None:
    """Let a config say that the head is a tensor of its own."""
    raw["tie_word_embeddings"] = False
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"]["tie_word_embeddings"] = False


def _record(bundle) -> dict:
    """What a shard says of itself; empty for a file that is not ours."""
    return json.loads((bundle.metadata() or {}).get("yardstick", "{}"))
