"""What the Snakefile checks before Snakemake builds its graph: target names, and locks that a killed run left."""

import fcntl
import shutil
import sys
from pathlib import Path

from yardstick.cli.common import LOCK_FILE
from yardstick.errors import YardstickError
from yardstick.experiment import Experiment

# calls that run no job must not take part in locking
WITHOUT_JOBS = {"-n", "--dry-run", "--dryrun", "--lint", "--report", "--dag", "--rulegraph", "--filegraph", "--d3dag"}
WITHOUT_JOBS |= {"-l", "--list", "--list-rules", "--summary", "-D", "--detailed-summary", "--unlock", "--archive"}


MEASURED_FILES = {"summary.json", "positions.parquet", "evaluation.json"}
CANDIDATE_FILES = MEASURED_FILES | {"quantize.json", "checkpoint", "decoded", "attribution.json", "probe.json"}
ANSWER_FILES = {"summary.json", "answers.parquet", "generations.parquet", "generation.json"}
ENGINE_FILES = ("speed.md", "speed.json", "roofline.png", "products.json")
QUALITY_FILES = {"table.md", "quantization.md"}


def check_targets(arguments: list[str], experiment: Experiment) -> None:
    """Refuse a target of a model, candidate or file that is not made, before Snakemake does so less clearly.

    Raises:
        YardstickError: names it, and what there is.
    """
    for argument in arguments:
        parts = Path(argument).parts  # also takes off a leading ./
        if parts[:2] == ("results", "gsm8k"):
            check_answers_target(argument, parts[2:], experiment)
        if parts[:2] == ("results", "engine"):
            check_engine_target(argument, parts[2:], experiment)
        if parts[:2] not in (("results", "quality"), ("data", "quality")) or len(parts) < 3:
            continue
        inside = parts[3:] if parts[2] == "plots" else parts[2:]
        if len(inside) == 1 and parts[0] == "results":
            if inside[0] not in QUALITY_FILES:
                raise YardstickError(
                    f"target {argument}: no such file is made there ({', '.join(sorted(QUALITY_FILES))})"
                )
            continue
        if inside and inside[0] not in experiment.models:
            known = ", ".join(experiment.models)
            raise YardstickError(f"target {argument}: the config has no model {inside[0]} (known: {known})")
        if parts[0] == "data" or parts[2] == "plots" or len(inside) < 3 or inside[1] == "reference":
            continue
        rows = [*experiment.candidates_of(inside[0]), *experiment.parts_of(inside[0])]
        if inside[1] not in rows:
            known = ", ".join(rows)
            if inside[1] in experiment.unreadable:
                raise YardstickError(f"target {argument}: {inside[1]}: {experiment.unreadable[inside[1]]}")
            where = f" for the model {inside[0]}" if inside[1] in {*experiment.candidates, *experiment.parts} else ""
            raise YardstickError(f"target {argument}: the config has no candidate {inside[1]}{where} (known: {known})")
        files = MEASURED_FILES if inside[1] in experiment.parts else CANDIDATE_FILES
        if inside[2] not in files:
            raise YardstickError(f"target {argument}: no such file is made there ({', '.join(sorted(files))})")
        for file, key in (("probe.json", "probe"), ("attribution.json", "attribution")):
            chosen = experiment.chosen(key, inside[0])
            if inside[2] == file and inside[1] not in chosen:
                known = ", ".join(chosen) or f"none, since it has no key {key}"
                raise YardstickError(f"target {argument}: no {key} of {inside[1]} is made (of: {known})")


def check_answers_target(argument: str, inside: tuple[str, ...], experiment: Experiment) -> None:
    """Refuse a target of the GSM8K task that is not made.

    Raises:
        YardstickError: names it, and what there is.
    """
    if "gsm8k" not in experiment.config:
        raise YardstickError(f"target {argument}: the config has no key gsm8k")
    if len(inside) == 1:
        if inside[0] != "table.md":
            raise YardstickError(f"target {argument}: no such file is made there (table.md)")
        return
    if inside and inside[0] not in experiment.models:
        known = ", ".join(experiment.models)
        raise YardstickError(f"target {argument}: the config has no model {inside[0]} (known: {known})")
    if len(inside) < 3:
        return
    if inside[1] not in experiment.answering(inside[0]):
        known = ", ".join(experiment.answering(inside[0]))
        raise YardstickError(f"target {argument}: nobody answers as {inside[1]} (known: {known})")
    if inside[2] not in ANSWER_FILES:
        raise YardstickError(f"target {argument}: no such file is made there ({', '.join(sorted(ANSWER_FILES))})")


def check_engine_target(argument: str, inside: tuple[str, ...], experiment: Experiment) -> None:
    """Refuse a target of the engine's speed that is not made.

    Raises:
        YardstickError: names it, and what there is.
    """
    if experiment.engine["candidate"] is None:
        raise YardstickError(f"target {argument}: the config has no variant whose speed could be measured")
    if inside and inside[0] not in experiment.models:
        known = ", ".join(experiment.models)
        raise YardstickError(f"target {argument}: the config has no model {inside[0]} (known: {known})")
    kinds = [f"decode-{mode}-{dtype}.json" for dtype in experiment.engine["dtypes"] for mode in ("packed", "dense")]
    known = [*ENGINE_FILES, *kinds]
    if len(inside) > 1 and inside[1] not in known:
        raise YardstickError(f"target {argument}: no such file is made there ({', '.join(known)})")


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
