"""The formats that can be read. Nothing is imported: the workflow and the tables only need the names."""

# kind -> (module, class); imported on use, so a result depends on the code of its own format only
KINDS = {
    "hf": ("yardstick.sources.hf", "HuggingFaceSource"),
    "packed": ("yardstick.sources.packed", "PackedSource"),
    "trellis": ("yardstick.sources.trellis", "TrellisSource"),
    "gguf": ("yardstick.sources.gguf", "GgufSource"),
    "ct": ("yardstick.sources.compressed_tensors", "CompressedTensorsSource"),
    "gptq": ("yardstick.sources.gptq", "GptqSource"),
    "awq": ("yardstick.sources.awq", "AwqSource"),
    "quark": ("yardstick.sources.quark", "QuarkSource"),
    "modelopt": ("yardstick.sources.modelopt", "ModelOptSource"),
    "bnb": ("yardstick.sources.bitsandbytes", "BitsAndBytesSource"),
    "hqq": ("yardstick.sources.hqq", "HqqSource"),
    "fp8": ("yardstick.sources.fp8", "BlockFp8Source"),
    "bf16dir": ("yardstick.sources.decoded", "DecodedSource"),
}

# formats that only their own tool can decode, on a GPU: the folder of workflow/envs/ whose decode.py spells the weights
# out, which are then read as bf16dir
DECODED_BY = {"exl3": "exllamav3"}
