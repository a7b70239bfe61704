"""What the Snakefile checks before Snakemake builds its graph: target names, and locks that a killed run left."""

import fcntl
import re
import shutil
import sys
from pathlib import Path

from yardstick.cli.common import LOCK_FILE
from yardstick.errors import YardstickError
from yardstick.experiment import Experiment

# calls that run no job must not take part in locking
WITHOUT_JOBS = {"-n", "--dry-run", "--dryrun", "--lint", "--report", "--dag", "--rulegraph", "--filegraph", "--d3dag"}
WITHOUT_JOBS |= {"-l", "--list", "--list-rules", "--summary", "-D", "--detailed-summary", "--unlock", "--archive"}


def check_targets(arguments: list[str], experiment: Experiment) -> None:
    """Refuse a target of a model or candidate that the config does not name, before Snakemake does so less clearly.

    Raises:
        YardstickError: names it, and what there is.
    """
    for argument in arguments:
        found = re.match(r"results/quality/([^/]+)/(?:([^/]+)/)?[^/]*\.\w+", argument)
        if not found:
            continue
        model, candidate = found.groups()
        if model == "plots":
            continue
        if model not in experiment.models:
            known = ", ".join(experiment.models)
            raise YardstickError(f"target {argument}: the config has no model {model} (known: {known})")
        if candidate and candidate != "reference" and candidate not in experiment.candidates:
            known = ", ".join(experiment.candidates)
            raise YardstickError(f"target {argument}: the config has no candidate {candidate} (known: {known})")


def release_stale_lock(arguments: list[str]):
    """Hold a shared lock for the life of a run; where nobody else holds it, remove the locks of a killed run.

    Snakemake's own locks say nothing about whether their owner lives. Every run and every step of it holds ours, and
    the kernel lets go of it when they die: if it can be had alone, nothing is alive, and what Snakemake left is stale.

    Returns:
        the open lock file, to be kept; None for calls that run no job.
    """
    if WITHOUT_JOBS & set(arguments) or any(a.startswith("--report=") for a in arguments):
        return None
    LOCK_FILE.parent.mkdir(exist_ok=True)
    handle = open(LOCK_FILE, "a")  # noqa: SIM115 (held for the life of the run)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(handle, fcntl.LOCK_SH)
        return handle
    stale = sorted((Path(".snakemake") / "locks").glob("*.lock"))
    for lock in stale:
        lock.unlink()
    if stale:
        print("yardstick: removed the lock of a run that was killed", file=sys.stderr)
    remove_temporary_files()
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


def remove_temporary_files() -> None:
    """Delete what a killed step was writing: every output is written under a `.tmp-` name and moved when whole."""
    for root in ("data", "results"):
        for path in Path(root).rglob(".tmp-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
