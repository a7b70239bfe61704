"""One step of an experiment, and the rates that its estimates are made of."""

from dataclasses import dataclass
from pathlib import Path

WIDTH = {"float32": 4, "bfloat16": 2}
PROCESS, START_SECONDS = 0.35e9, 4  # Python, torch and its libraries
HEAP = 1.3  # what the heap keeps of freed layers beside those that are alive
# shares of the plain product rate that the steps reached on the default experiment (docs/log.md)
FORWARD_SHARE, GPTQ_SHARE, DECODE_SHARE = 0.65, 0.45, 0.5
# seconds for each weight on one core, from the default experiment: round to nearest, and ggml's quantizers
RTN_SECONDS, GGUF_SECONDS = 1.2e-8, 2.0e-8
TRELLIS_SECONDS = 1.6e-10  # for each weight and state of the search
# and of generation: answers in batches, own text a few windows at a time
ANSWER_SHARE, OWN_TEXT_SHARE = 0.3, 0.05


@dataclass(frozen=True)
class Rates:
    """Operations a second of matrix products by arithmetic, and bytes a second, of the machine."""

    products: dict[str, float]
    disk: float
    network: float


@dataclass(frozen=True)
class Step:
    """One step of the workflow: bytes that it reads and writes to disk, peak memory in bytes, seconds; `temporary` is
    deleted again when the candidate has been measured."""

    name: str
    output: Path
    reads: float
    disk: float
    memory: float
    seconds: float
    temporary: bool = False
