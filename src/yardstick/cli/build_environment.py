"""Make the environment of a tool whose dependencies clash with ours, from its pinned requirements."""

import shutil
import subprocess
import sys
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.errors import YardstickError
from yardstick.files import write_text


def main(arguments) -> None:
    folder = arguments.output.parent
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(folder)], arguments.requirements)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    # not compiled: of thousands of modules the tool imports some, which are then compiled once
    install = [*pip, "install", "--quiet", "--no-compile", "--requirement", str(arguments.requirements)]
    run(install, arguments.requirements)
    write_text(arguments.output, run([*pip, "list", "--format", "json"], arguments.requirements))


def run(command: list[str], requirements: Path) -> str:
    """Output of a command.

    Raises:
        YardstickError: it failed; gives the last line it said.
    """
    result = subprocess.run(command, capture_output=True, text=True)
    print(result.stderr, file=sys.stderr, end="")
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        raise YardstickError(f"environment of {requirements}: cannot be made ({said[-1].strip()[:200]})")
    return result.stdout


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--requirements", type=Path, required=True, help="pinned requirements")
    arguments.add_argument("--output", type=Path, required=True, help="packages.json of the environment to write")
    run_step(main, arguments)
