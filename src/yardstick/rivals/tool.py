"""Run somebody else's quantizer in its own environment, and keep what it made with its digests and versions."""

import json
import os
import subprocess
import sys
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import atomic_folder, canonical_json

SHOWN, LINES = 160, 400  # characters of a message; lines of output that are kept to find it
# runs inside the tool's environment, where nothing of ours can be imported
LAUNCH = """
import importlib.util, json, sys
from pathlib import Path
script, recipe, model, calibration, output = sys.argv[1:]
spec = importlib.util.spec_from_file_location("make", script)
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
make.main(json.loads(recipe), Path(model), Path(calibration) if calibration else None, Path(output))
"""


def run_tool(
    what: str, environment: Path, script: Path, recipe: dict, model: Path, calibration: Path | None, output: Path
) -> None:
    """Let `main(recipe, model, calibration, output)` of `script` write a checkpoint of the folder `model`, with the
    Python of `environment`. `calibration` is an .npy file of token ids [sequences, length], where the scheme uses one.

    It is written beside `output` and moved there when it is whole. What the tool prints goes to standard error.

    Raises:
        YardstickError: the tool failed; names its last word.
    """
    # absolute, but not resolved: the link's own place is what makes it the environment's Python
    command = [os.path.abspath(environment / "bin" / "python"), "-P", "-c", LAUNCH, str(script), canonical_json(recipe)]
    command += [str(model), str(calibration or "")]
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with atomic_folder(output) as temporary:
        process = subprocess.Popen(
            [*command, str(temporary)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=inherited | quiet | offline | threads,
        )
        lines = []
        for line in process.stdout:
            print(line.rstrip(), file=sys.stderr)
            lines = [*lines[-LINES:], line.rstrip()]
        if process.wait():
            raise YardstickError(f"{what}: {script.parent.name} failed ({last_word(lines)[:SHOWN]})")
        if not any(temporary.glob("*.safetensors")) and not any(temporary.glob("*.pt")):
            raise YardstickError(f"{what}: {script.parent.name} wrote no weights")


def last_word(lines: list[str]) -> str:
    """What a tool said when it failed: the first line of the exception after the last traceback, or its last line."""
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[starts[-1] + 1 :] if starts else []
    raised = [line for line in after if line.strip() and not line.startswith(" ")]
    said = [line.strip() for line in lines if line.strip()]
    return raised[0] if raised else said[-1] if said else "no message"


def tool_versions(environment: Path) -> dict[str, str]:
    """Versions of all packages of an environment, as they were installed.

    Raises:
        YardstickError: the environment has no record of them.
    """
    path = environment / "packages.json"
    if not path.is_file():
        raise YardstickError(f"{environment}: is not an environment; delete it to make it again")
    return {entry["name"]: entry["version"] for entry in json.loads(path.read_text(encoding="utf-8"))}
