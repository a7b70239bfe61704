"""Read the experiment that a config describes, and refuse what it cannot mean."""

import re
from pathlib import Path
from typing import Any

import yaml

from yardstick.errors import YardstickError
from yardstick.experiment import RESERVED, Experiment, part_candidates
from yardstick.formats import DECODED_BY
from yardstick.quantize.methods import is_folded, starts_of
from yardstick.schema import check, extended

TOOLS = Path(__file__).parents[2] / "workflow" / "envs"
SCHEMA_PATH = Path(__file__).parents[2] / "workflow" / "schemas" / "config.schema.yaml"
ARCHIVE_KEYS = ("package", "version", "sha256", "member")
RESERVED_MODELS = {"plots", "table.md", "quantization.md"}


def load_experiment(config: dict[str, Any]) -> Experiment:
    """Check a config against the schema and against itself, and fill in defaults.

    Raises:
        YardstickError: one line that names the key and what is wrong with it.
    """
    schema = yaml.safe_load(SCHEMA_PATH.read_text(encoding="utf-8"))
    config = extended(config)
    check(config, schema, schema, "config")
    experiment = Experiment(config)
    for name, model in experiment.models.items():
        if name in RESERVED_MODELS:
            raise YardstickError(f"config: model name {name} is reserved")
        if model["kind"] == "pypi_gguf":
            _check_release(f"config.models.{name}", model)
        for key in ("corpora_pin", "recorded", "architecture"):
            if model[key] and not Path(model[key]).is_file():
                raise YardstickError(f"config: models.{name}.{key}: {model[key]}: no such file")
    for part in ("evaluation", "calibration"):
        if "file" in config["corpora"][part]["texts"]:  # numpy keeps that name for itself
            raise YardstickError(f"config: corpora.{part}.texts: name file is reserved")
    names = [*experiment.variants, *experiment.rivals]
    for name in names:
        if name in RESERVED:
            raise YardstickError(f"config: candidate name {name} is reserved")
    for name in set(experiment.variants) & set(experiment.rivals):
        raise YardstickError(f"config: {name} is both in variants and in rivals")
    for name, rival in experiment.rivals.items():
        unknown = sorted(set(rival["models"] or []) - set(experiment.models))
        if unknown:
            known = ", ".join(experiment.models)
            raise YardstickError(f"config: rivals.{name}.models: there is no model {unknown[0]} (known: {known})")
        files = ("make.py", "requirements.txt")
        if rival["kind"] == "made" and not all((TOOLS / rival["tool"] / file).is_file() for file in files):
            known = ", ".join(sorted(path.parent.name for path in TOOLS.glob("*/make.py")))
            raise YardstickError(f"config: rivals.{name}.tool: there is no tool {rival['tool']} (known: {known})")
        if rival["kind"] == "exported":
            _require_packed(experiment, rival["variant"], f"rivals.{name}.variant")
        if rival["kind"] == "made" and rival["format"] in DECODED_BY:
            raise YardstickError(f"config: rivals.{name}.format: {rival['format']} is for rivals of kind hub or local")
    _resolve_starts(experiment)
    _check_tasks(experiment)
    for key in ("baseline", "bar"):
        if config[key] not in names:
            raise YardstickError(
                f"config: {key}: {config[key]!r} is not a variant or rival (known: {', '.join(names)})"
            )
    missing = [model for model in experiment.models if config["baseline"] not in experiment.candidates_of(model)]
    if missing:
        raise YardstickError(f"config: baseline: {config['baseline']!r} is not made for the model {missing[0]}")
    for name, recipe in experiment.variants.items():
        try:
            re.compile(recipe["keep_bf16"] or "")
        except re.error as error:
            raise YardstickError(f"config: variants.{name}.keep_bf16: not a regular expression ({error})") from None
    for name, part in experiment.parts.items():
        _check_part(experiment, name, part)
    for name in config.get("attribution", {}).get("candidates", []):
        _require_mixable(experiment, name, "attribution.candidates")
    for name in config.get("ablation", []):
        _require_measured(experiment, name, "ablation")
    return experiment


def _check_release(where: str, model: dict) -> None:
    """A release lies in one archive, or in the parts of several.

    Raises:
        YardstickError: both are given, or a key of the archive is missing.
    """
    given = [key for key in ARCHIVE_KEYS if key in model]
    if "parts" in model and given:
        raise YardstickError(f"{where}: {given[0]} names one archive and parts several; give either")
    missing = [key for key in ARCHIVE_KEYS if key not in given]
    if "parts" not in model and missing:
        raise YardstickError(f"{where}: key {missing[0]!r} is missing")


def _check_tasks(experiment: Experiment) -> None:
    """Names that the parts of a config beside fidelity use.

    Raises:
        YardstickError: one is not known, or is another thing's name.
    """
    config = experiment.config
    rows, known = [*experiment.variants, *experiment.rivals], ", ".join(experiment.models)
    if "generated" in {text["source"]["kind"] for text in config["corpora"]["calibration"]["texts"].values()}:
        raise YardstickError("config: corpora.calibration: text of kind generated is for evaluation")
    if len(experiment.own_texts) == len(config["corpora"]["evaluation"]["texts"]):
        raise YardstickError("config: corpora.evaluation.texts: there must be one that is not of kind generated")
    timed = config["engine"]["candidate"]
    if timed is not None:
        _require_packed(experiment, timed, "engine.candidate")
    for key in ("gsm8k", "probe"):
        unknown = sorted(set(config.get(key, {}).get("candidates") or []) - set(rows))
        if unknown:
            raise YardstickError(
                f"config: {key}.candidates: {unknown[0]!r} is not a variant or rival (known: {', '.join(rows)})"
            )
    for name in config.get("probe", {}).get("candidates") or []:
        if "rotate" in experiment.variant_of(name).get("transform", {}):
            raise YardstickError(f"config: probe.candidates: {name} is rotated: no matrix of it is like the original's")
    for name, server in experiment.servers.items():
        if name in RESERVED or name in rows:
            raise YardstickError(f"config: gsm8k.servers: the name {name} is taken")
        missing = sorted(set(server["models"] or []) - set(experiment.models))
        if missing:
            known = ", ".join(experiment.models)
            raise YardstickError(
                f"config: gsm8k.servers.{name}.models: there is no model {missing[0]} (known: {known})"
            )


def _resolve_starts(experiment: Experiment) -> None:
    """Give every variant that works on others' checkpoints their packing: group size, or what a mix takes at most, and
    what they keep in bf16.

    Raises:
        YardstickError: one of them is no variant, cannot be worked on, or leads back to where it came from.
    """
    for name in experiment.variants:
        _resolve_start(experiment, [name])


def _resolve_start(experiment: Experiment, path: list[str]) -> None:
    """Resolve the last variant of a path of starts; its own starts first."""
    variants, name = experiment.variants, path[-1]
    recipe = variants[name]
    key = "of" if "of" in recipe else "start"
    for start in starts_of(recipe):
        if start not in variants:
            known = ", ".join(other for other in variants if other != name)
            raise YardstickError(f"config: variants.{name}.{key}: {_not_a_variant(experiment, start)} (known: {known})")
        if start in path:
            chain = " -> ".join([*path, start])
            raise YardstickError(f"config: variants.{path[0]}.{key}: leads to itself ({chain})")
        _resolve_start(experiment, [*path, start])
        _require_packed(experiment, start, f"variants.{name}.{key}")
    if "start" in recipe:
        begun = variants[recipe["start"]]
        recipe |= {packing: begun[packing] for packing in ("group_size", "bits", "keep_bf16") if packing in begun}
    if "of" in recipe:
        _resolve_mix(experiment, name, recipe)


def _resolve_mix(experiment: Experiment, name: str, recipe: dict) -> None:
    """Give a mix the transforms that its variants have in common. It has no group size: each matrix has its own.

    Raises:
        YardstickError: their matrices belong to different norms.
    """
    first, where = experiment.variant_of(recipe["of"][0]), f"config: variants.{name}.of"
    for start in recipe["of"]:
        made = experiment.variant_of(start)
        if made["method"] == "awq" or "awq" in made.get("transform", {}):
            raise YardstickError(f"{where}: {start} was smoothed by AWQ, and its matrices fit its own norms only")
        if made.get("transform") != first.get("transform"):
            raise YardstickError(f"{where}: {start} is not rotated as {recipe['of'][0]} is, so they do not mix")
    if "transform" in first:
        recipe["transform"] = first["transform"]
    recipe["keep_bf16"] = None


def _not_a_variant(experiment: Experiment, name: str) -> str:
    """What is wrong with a name where a variant's is needed."""
    return f"{name} is a rival" if name in experiment.rivals else f"there is no variant {name}"


def _require_packed(experiment: Experiment, name: str, where: str) -> None:
    """Refuse a name that is no variant in packed int4.

    Raises:
        YardstickError: names it.
    """
    packed = [other for other in experiment.variants if experiment.format_of(other) == "packed"]
    if name not in packed:
        known, stored = ", ".join(packed) or "none", name in experiment.variants
        wrong = f"{name} is stored as {experiment.format_of(name)}" if stored else _not_a_variant(experiment, name)
        raise YardstickError(f"config: {where}: {wrong} (packed variants: {known})")


def _check_part(experiment: Experiment, name: str, part: dict) -> None:
    """Refuse a row of parts that cannot be made.

    Raises:
        YardstickError: names the part and what is wrong with it.
    """
    where = f"parts.{name}"
    if name in RESERVED or name in experiment.candidates:
        raise YardstickError(f"config: {where}: {name} is the name of a candidate or reserved")
    if not (part["keep_bf16"] or part["head_from"]):
        raise YardstickError(f"config: {where}: needs keep_bf16 or head_from, or it is {part['candidate']} itself")
    for key in ("candidate", "head_from"):
        if part[key]:
            _require_mixable(experiment, part[key], f"{where}.{key}")
    if part["head_from"] == part["candidate"]:
        raise YardstickError(f"config: {where}.head_from: is the candidate itself")
    if len(part_candidates(part)) == 2 and set(part_candidates(part)) <= set(experiment.rivals_of("hub")):
        raise YardstickError(
            f"config: {where}: both are rivals of kind hub, of which one at a time is on the disk; read one as local"
        )
    if not experiment.models_of(name):
        raise YardstickError(f"config: {where}: there is no model that both candidates are made for")
    try:
        re.compile(part["keep_bf16"] or "")
    except re.error as error:
        raise YardstickError(f"config: {where}.keep_bf16: not a regular expression ({error})") from None


def _require_measured(experiment: Experiment, name: str, where: str) -> None:
    """Refuse a name that is no variant or rival, or a rival that cannot be read.

    Raises:
        YardstickError: names it.
    """
    if name not in {*experiment.variants, *experiment.rivals}:
        known = ", ".join([*experiment.variants, *experiment.rivals])
        raise YardstickError(f"config: {where}: {name!r} is not a variant or rival (known: {known})")
    if name in experiment.unreadable:
        raise YardstickError(f"config: {where}: {name}: {experiment.unreadable[name]}")


def _require_mixable(experiment: Experiment, name: str, where: str) -> None:
    """Refuse a name that `_require_measured` refuses, or a variant whose matrices fit its own norms only.

    Raises:
        YardstickError: names it.
    """
    _require_measured(experiment, name, where)
    made = experiment.variant_of(name)
    if made and is_folded(made):
        raise YardstickError(
            f"config: {where}: {name}: its norms are not the original's, so its matrices cannot be mixed with others"
        )
