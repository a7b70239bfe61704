"""Source `bnb:`: bitsandbytes checkpoints as transformers saves them, NF4 and FP4 in flat blocks or LLM.int8 by rows.

4 bits: the weight is flattened by rows and cut into blocks; element i has code i of the bytes, high nibble first.

    w[i] = quant_map[code[i]] * absmax[i // blocksize]

Double quantization stores absmax in 8-bit codes: absmax[b] = nested_quant_map[q[b]] * nested_absmax[b // nested
blocksize] + nested_offset. Block sizes, shape and offset stand as JSON in a byte tensor of their own. All in fp32.

8 bits: w[r, c] = value[r, c] * SCB[r] / 127.
"""

import json
from functools import partial
from typing import Any

import torch

from yardstick.errors import YardstickError
from yardstick.sources.folder import FolderSource, Stored
from yardstick.sources.hf import PLAIN, not_measured
from yardstick.sources.safetensors_file import DTYPES

STATE, TYPES = ".quant_state.bitsandbytes__", ("nf4", "fp4")
# bitsandbytes multiplies by this, the fp32 value nearest to 1 / 127, and does not divide
RECIPROCAL = 7.874015718698502e-3
STORAGE = PLAIN | {"U8", "I8"}  # types under which transformers keeps the bytes of 4-bit codes
FORMATS = {1: "col32", 2: "col_turing", 3: "col_ampere"}  # 0 is row major; these are tiled for old GPU kernels


class BitsAndBytesSource(FolderSource):
    """Dequantized to fp32; what quantizes a tensor is what stands beside it in the file, not the config."""

    def quantized(self) -> dict[str, Stored]:
        method = self.settings.get("quant_method", "bitsandbytes")  # old releases wrote none
        if method != "bitsandbytes":
            raise YardstickError(f"{self.path / 'config.json'}: quant_method is {method!r}, must be 'bitsandbytes'")
        names = [name for name in self.reader.headers if not not_measured([name])]
        stored = {}
        for name in names:
            if STATE in name:
                weight, _, kind = name.partition(STATE)
                if kind not in TYPES or weight in stored:
                    raise YardstickError(
                        f"{self.path}: tensor {name} is not the one state of {' or '.join(TYPES)} weights"
                    )
                stored[weight] = self._blocks(weight, kind)
        for name in names:
            weight = name.removesuffix(".absmax")
            if weight != name and weight not in stored:
                raise YardstickError(f"{self.path}: tensor {weight}{STATE}{TYPES[0]} is missing")
            if self.reader.headers[name]["dtype"] == "I8" and name not in stored:
                stored[name] = self._rows(name)
        return stored

    def _blocks(self, weight: str, kind: str) -> Stored:
        """NF4 or FP4, checked against its state."""
        state = self._state(weight, kind)
        nested = self.reader.headers.get(weight + ".absmax", {}).get("dtype") == "U8"
        shape, size = state.get("shape"), self._block_size(weight, state, "blocksize")
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(s) is int and s > 0 for s in shape)):
            raise YardstickError(f"{self.path}: tensor {weight}: its state names no shape [out, in] ({shape})")
        count = shape[0] * shape[1]
        blocks = -(-count // size)
        parts = [weight, weight + ".absmax", weight + ".quant_map"]
        self._require(weight, -(-count // 2), STORAGE, in_bytes=True)
        self._require(weight + ".absmax", blocks, {"U8"} if nested else PLAIN)
        self._require(weight + ".quant_map", 16, PLAIN)
        if nested:
            size = self._block_size(weight, state, "nested_blocksize")
            if type(state.get("nested_offset")) is not float:
                raise YardstickError(f"{self.path}: tensor {weight}: its state holds no number nested_offset")
            self._require(weight + ".nested_absmax", -(-blocks // size), PLAIN)
            self._require(weight + ".nested_quant_map", 256, PLAIN)
            parts += [weight + ".nested_absmax", weight + ".nested_quant_map"]
        scheme = f"{kind}-g{state['blocksize']}" + ("-nested" if nested else "")
        decode = partial(self._decode_blocks, weight, state, nested)
        return Stored(tuple(shape), scheme, (*parts, weight + STATE + kind), decode)

    def _state(self, weight: str, kind: str) -> dict[str, Any]:
        name = weight + STATE + kind
        found = self.reader.headers[name]["dtype"]
        if found != "U8":
            raise YardstickError(f"{self.path}: tensor {name} has type {found}, must be U8")
        try:
            state = json.loads(self.reader.tensor(name).numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise YardstickError(f"{self.path}: tensor {name} is damaged: not valid JSON ({error})") from None
        if not isinstance(state, dict) or state.get("quant_type") != kind:
            raise YardstickError(f"{self.path}: tensor {name} is damaged: not the state of {kind} weights")
        return state

    def _block_size(self, weight: str, state: dict[str, Any], key: str) -> int:
        size = state.get(key)
        if type(size) is not int or size < 1:
            raise YardstickError(f"{self.path}: tensor {weight}: its state has {key} = {size}, must be 1 or more")
        return size

    def _require(self, name: str, count: int, kinds: set[str], in_bytes: bool = False) -> None:
        """Refuse a part that is missing, of another type or size."""
        self.shape(name)
        kind = self.reader.headers[name]["dtype"]
        if kind not in kinds:
            raise YardstickError(f"{self.path}: tensor {name} has type {kind}, must be {' or '.join(sorted(kinds))}")
        size = 1 if in_bytes else DTYPES[kind].itemsize
        if self.reader.stored_bits(name) != 8 * size * count:
            found = self.reader.stored_bits(name) // 8 // size
            unit = "bytes" if in_bytes else "elements"
            raise YardstickError(f"{self.path}: tensor {name} has {found} {unit}, shape and block size ask for {count}")

    def _decode_blocks(self, weight: str, state: dict[str, Any], nested: bool) -> torch.Tensor:
        absmax = self.reader.tensor(weight + ".absmax").flatten()
        if nested:
            table, scales = self._floats(weight + ".nested_quant_map"), self._floats(weight + ".nested_absmax")
            absmax = dequantize_blocks(absmax, table, scales, state["nested_blocksize"]) + state["nested_offset"]
        packed = self.reader.tensor(weight).flatten().view(torch.uint8)  # some keep the bytes as a 16-bit type
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()[: state["shape"][0] * state["shape"][1]]
        values = dequantize_blocks(codes, self._floats(weight + ".quant_map"), absmax.float(), state["blocksize"])
        return values.reshape(state["shape"])

    def _floats(self, name: str) -> torch.Tensor:
        return self.reader.tensor(name).flatten().float()

    def _rows(self, weight: str) -> Stored:
        """LLM.int8: a scale per row, and a byte that says how the rows lie."""
        stem, shape = weight.removesuffix(".weight"), self.shape(weight)
        scale, layout = stem + ".SCB", stem + ".weight_format"
        scale_shape, kind = self.shape(scale), self.reader.headers[scale]["dtype"]
        if len(shape) != 2 or scale_shape != shape[:1] or kind not in PLAIN:
            raise YardstickError(
                f"{self.path}: tensor {scale} must be one float per row of {weight}, {list(shape)} "
                f"(got {kind} {list(scale_shape)})"
            )
        parts = [weight, scale]
        if layout in self.reader.headers:  # the first releases wrote none, and rows
            parts.append(layout)
            self._require(layout, 1, {"U8"})
            kind = int(self.reader.tensor(layout))
            if kind:
                what = FORMATS.get(kind, "unknown")
                raise YardstickError(f"{self.path}: tensor {layout} is {kind} ({what}); only 0 (rows) is supported")
        return Stored(shape, "llm-int8", tuple(parts), lambda: self._decode_rows(weight, scale))

    def _decode_rows(self, weight: str, scale: str) -> torch.Tensor:
        return self.reader.tensor(weight).float().mul_(self._floats(scale)[:, None]).mul_(RECIPROCAL)


def dequantize_blocks(codes: torch.Tensor, table: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """fp32 table[codes[i]] * scales[i // block] of flat codes; the last block may be short."""
    values = table.index_select(0, codes.to(torch.int32))
    whole = len(values) // block * block
    if whole:
        values[:whole].view(-1, block).mul_(scales[: whole // block, None])
    values[whole:].mul_(scales[-1])
    return values
