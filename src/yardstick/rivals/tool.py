"""Run somebody else's quantizer in its own environment, and keep what it made with its digests and versions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.files import canonical_json

SHOWN = 160


def run_tool(
    what: str, environment: Path, script: Path, recipe: dict, model: Path, calibration: Path | None, output: Path
) -> None:
    """Let `script` write a checkpoint of `model` into `output`, with the Python of `environment`.

    It is written beside `output` and moved there when it is whole. What the tool prints goes to standard error.

    Raises:
        YardstickError: the tool failed; names its last word.
    """
    temporary = output.with_name(f".tmp-{output.name}")
    for folder in (temporary, output):
        shutil.rmtree(folder, ignore_errors=True)
    temporary.mkdir(parents=True)
    # absolute, but not resolved: the link's own place is what makes it the environment's Python
    command = [os.path.abspath(environment / "bin" / "python"), str(script), "--recipe", canonical_json(recipe)]
    command += ["--model", str(model), "--output", str(temporary)]
    command += ["--calibration", str(calibration)] if calibration else []
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=inherited | quiet | offline | threads,
    )
    last = ""
    for line in process.stdout:
        print(line.rstrip(), file=sys.stderr)
        last = line.strip() or last
    if process.wait():
        shutil.rmtree(temporary, ignore_errors=True)
        raise YardstickError(f"{what}: {script.parent.name} failed ({last[:SHOWN]})")
    if not any(temporary.rglob("*.safetensors")):
        shutil.rmtree(temporary, ignore_errors=True)
        raise YardstickError(f"{what}: {script.parent.name} wrote no safetensors file")
    os.replace(temporary, output)


def tool_versions(environment: Path) -> dict[str, str]:
    """Versions of all packages of an environment, as they were installed.

    Raises:
        YardstickError: the environment has no record of them.
    """
    path = environment / "packages.json"
    if not path.is_file():
        raise YardstickError(f"{environment}: is not an environment; delete it to make it again")
    return {entry["name"]: entry["version"] for entry in json.loads(path.read_text(encoding="utf-8"))}
