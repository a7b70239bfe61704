"""EXL3: what a checkpoint stores. Its values can only be had from its own tool (workflow/envs/exllamav3/decode.py).

A matrix [out, in] is a trellis of 16 x 16 tiles, `trellis` int16 [in / 16, out / 16, 16 K] for K bits a weight, with
signs and scales of the input and output channels (`suh`, `svh` fp16, or packed signs `su`, `sv`) and a marker of its
codebook (`mcg`, `mul1`). Sizes are padded to multiples of 128; the padding is stored, so it counts.
"""

from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.sources.safetensors_file import SafetensorsReader, checkpoint_files

PARTS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
TILE = 16


def stored_tensors(folder: Path) -> dict[str, dict]:
    """Scheme and stored bits of every quantized matrix, by the name of its weight.

    Raises:
        YardstickError: there is none, or a trellis has another form.
    """
    reader = SafetensorsReader(checkpoint_files(folder))
    found = {}
    for name, header in reader.headers.items():
        stem, _, part = name.rpartition(".")
        if part != "trellis":
            continue
        shape = header["shape"]
        if header["dtype"] != "I16" or len(shape) != 3 or shape[2] % (TILE // 2) or not shape[2]:
            raise YardstickError(
                f"{folder}: tensor {name} of type {header['dtype']} and shape {shape} is no EXL3 trellis"
            )
        parts = [f"{stem}.{other}" for other in PARTS if f"{stem}.{other}" in reader.headers]
        bits = sum(reader.stored_bits(other) for other in parts)
        found[f"{stem}.weight"] = {"scheme": f"exl3-{shape[2] / TILE:g}bit", "bits": bits}
    if not found:
        raise YardstickError(f"{folder}: holds no trellis; is it an EXL3 checkpoint?")
    return found
