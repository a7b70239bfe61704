"""The experiment that a config describes: validated, defaults filled in, candidates by name."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from yardstick.errors import YardstickError
from yardstick.formats import DECODED_BY, KINDS
from yardstick.quantize.methods import FORMATS
from yardstick.schema import check, extended

TOOLS = Path(__file__).parents[2] / "workflow" / "envs"
SCHEMA_PATH = Path(__file__).parents[2] / "workflow" / "schemas" / "config.schema.yaml"

# rows that every table has: how much of a difference is the ruler's own
NOISE_FLOORS = {
    "noise-hf": "Hugging Face's forward on the original weights",
    "noise-arithmetic": "our forward on the original weights in the other of fp32 and bf16",
    "noise-decode": "our forward on the original weights, the last quarter of each chunk one position at a time "
    "through the caches of generation",
}
# runs of the original that show how many answers flip by themselves
TASK_FLOORS = {
    "noise-repeat": "the original once more, the problems in reverse order and half as many at a time",
    "noise-arithmetic": "the original in the other of fp32 and bf16",
    "noise-hf": "the original through Hugging Face's generate",
}
ORIGINAL = "reference"
DECODE_CHUNKS = 10  # decoded together: a step is a product with that many rows
OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32"}
RESERVED = {ORIGINAL, *NOISE_FLOORS, *TASK_FLOORS}
# keys of models and rivals that say nothing about how they are made
USED_ELSEWHERE = {"corpora_pin", "recorded", "architecture", "bytes", "models"}
# keys of a server that can change an answer
SERVED = ("base_url", "model", "thinking_switch")
RESERVED_MODELS = {"plots", "table.md", "quantization.md"}


@dataclass(frozen=True)
class Experiment:
    """A checked config."""

    config: dict[str, Any]

    @property
    def models(self) -> dict[str, dict]:
        return self.config["models"]

    @property
    def variants(self) -> dict[str, dict]:
        return self.config["variants"]

    @property
    def rivals(self) -> dict[str, dict]:
        return self.config["rivals"]

    @property
    def parts(self) -> dict[str, dict]:
        return self.config["parts"]

    @property
    def candidates(self) -> list[str]:
        """Every name that is a row of some table: variants, rivals and noise floors."""
        return [*self.variants, *self.rivals, *NOISE_FLOORS]

    def candidates_of(self, model: str) -> list[str]:
        """Rows of one model's table; a rival may be limited to some models, and one that cannot be read is no row."""
        return [name for name in self.candidates if model in self.models_of(name) and name not in self.unreadable]

    def parts_of(self, model: str) -> list[str]:
        """Rows of one model that are made of parts of two; those whose both candidates are made for it."""
        return [name for name in self.parts if model in self.models_of(name)]

    def attributed(self, model: str) -> list[str]:
        """Candidates of one model whose loss is told apart by module."""
        return self.chosen("attribution", model)

    def whole(self, candidate: str) -> str:
        """The candidate that a row of parts changes; any other candidate is its own."""
        return self.parts[candidate]["candidate"] if candidate in self.parts else candidate

    @property
    def unreadable(self) -> dict[str, str]:
        """Rivals of formats that have no reader, with the reason; the table names them and goes on without them."""
        formats = {name: rival.get("format", rival["kind"]) for name, rival in self.rivals.items()}
        known = {*KINDS, *DECODED_BY}
        return {
            name: f"there is no reader for the format {kind}" for name, kind in formats.items() if kind not in known
        }

    def decoder(self, rival: str) -> str | None:
        """The tool that has to spell a rival's weights out before they can be read, where its format has one."""
        return DECODED_BY.get(self.rivals.get(rival, {}).get("format", ""))

    def tools(self) -> list[str]:
        """Tools with an environment of their own that the experiment needs."""
        made = {rival["tool"] for rival in self.rivals.values() if rival["kind"] == "made"}
        return sorted(made | {self.decoder(name) for name in self.rivals} - {None})

    def rivals_of(self, *kinds: str) -> list[str]:
        """Rivals of these kinds."""
        return [name for name, rival in self.rivals.items() if rival["kind"] in kinds]

    def models_of(self, candidate: str) -> list[str]:
        """Models that a candidate is measured for; parts are for the models that all of their candidates are for."""
        if candidate in self.parts:
            both = [self.models_of(name) for name in part_candidates(self.parts[candidate])]
            return [model for model in self.models if all(model in models for models in both)]
        return self.rivals.get(candidate, {}).get("models") or list(self.models)

    def format_of(self, variant: str) -> str:
        """The kind of source that reads a variant's checkpoint."""
        return FORMATS.get(self.variants[variant]["method"], "packed")

    @property
    def engine(self) -> dict:
        """What the engine's speed is measured with: a variant, the baseline or else the first, and settings."""
        settings = self.config["engine"]
        named = settings["candidate"] or self.config["baseline"]
        packed = [name for name in self.variants if self.format_of(name) == "packed"]
        return settings | {"candidate": named if named in packed else next(iter(packed), None)}

    @property
    def probe(self) -> dict | None:
        """Settings of the layer probe; None where the config asks for none."""
        return self.config.get("probe")

    def probed_of(self, model: str) -> list[str]:
        """Candidates of a model whose matrices are probed; a noise floor has the original's, which need no probe."""
        return self.chosen("probe", model)

    def probe_inputs_recipe(self) -> dict:
        """What the probed matrices read: how much text, which layers, the arithmetic; empty without a probe."""
        settings, probe = self.config["evaluation"], self.probe
        if probe is None:
            return {}
        recipe = {key: probe[key] for key in ("positions", "layers")}
        return recipe | {key: settings[key] for key in ("dtype", "batch_chunks")} | {"own_texts": list(self.own_texts)}

    def probe_recipe(self, candidate: str) -> dict:
        """How the candidate is made, and the kind of source that reads it."""
        return {"candidate": self.recipe(candidate), "source": self.evaluation_recipe(candidate)["source"]}

    def pairs(self, *groups: dict) -> list[tuple[str, str]]:
        """(model, candidate) of every row, or of those whose candidate is in one of `groups`."""
        return [
            (model, name)
            for model in self.models
            for name in self.candidates_of(model)
            if not groups or any(name in group for group in groups)
        ]

    @property
    def own_texts(self) -> dict[str, dict]:
        """Evaluation texts that the model itself writes, by name; figures over all texts leave them out."""
        texts = self.config["corpora"]["evaluation"]["texts"]
        return {name: text for name, text in texts.items() if text["source"]["kind"] == "generated"}

    def generation_recipe(self) -> dict:
        """What `own_texts` are made by."""
        length, dtype = self.config["corpora"]["evaluation"]["length"], self.config["evaluation"]["dtype"]
        texts = {name: {"chunks": text["chunks"]} | text["source"] for name, text in self.own_texts.items()}
        return {"length": length, "dtype": dtype, "texts": texts}

    def chosen(self, key: str, model: str) -> list[str]:
        """Candidates of a model that the part `key` of the config is for: those it names, else all but noise floors."""
        if key not in self.config:
            return []
        named = self.config[key]["candidates"]
        rows = [name for name in self.candidates_of(model) if name not in NOISE_FLOORS]
        return rows if named is None else [name for name in rows if name in named]

    @property
    def servers(self) -> dict[str, dict]:
        """Servers that answer the problems."""
        return self.config.get("gsm8k", {}).get("servers", {})

    def answering(self, model: str) -> list[str]:
        """Rows of a model's GSM8K table: the original, its repeats, candidates and servers."""
        if "gsm8k" not in self.config:
            return []
        servers = [name for name, server in self.servers.items() if model in (server["models"] or self.models)]
        return [ORIGINAL, *self.config["gsm8k"]["floors"], *self.chosen("gsm8k", model), *servers]

    def answering_recipe(self, name: str) -> dict:
        """How a row of the GSM8K table is answered."""
        task = self.config["gsm8k"]
        recipe = {key: task[key] for key in ("examples", "answer", "max_new_tokens")}
        if name in self.servers:
            return recipe | {"server": {key: self.servers[name][key] for key in SERVED}}
        dtype, batch = self.config["evaluation"]["dtype"], task["batch"]
        recipe |= {"backend": task["backend"], "dtype": dtype, "batch": batch, "source": "hf"}
        if name in self.variants or name in self.rivals:
            recipe["source"] = self.evaluation_recipe(name)["source"]
        changes = {
            "noise-repeat": {"reverse": True, "batch": max(1, batch // 2)},
            "noise-arithmetic": {"dtype": OTHER_DTYPE[dtype]},
            "noise-hf": {"backend": "transformers"},
        }
        return recipe | changes.get(name, {})

    def connection(self, server: str) -> dict:
        """How a server is talked to; nothing of it changes an answer."""
        return {key: value for key, value in self.servers[server].items() if key not in (*SERVED, "models")}

    def model_recipe(self, model: str) -> dict:
        """Where a model comes from, without the keys that other steps use."""
        return {key: value for key, value in self.models[model].items() if key not in USED_ELSEWHERE}

    def recipe(self, candidate: str) -> dict:
        """How the candidate itself is made; where else it is used changes nothing about it."""
        if candidate in self.variants:
            return self.variants[candidate]
        if candidate in self.rivals:
            return {key: value for key, value in self.rivals[candidate].items() if key not in USED_ELSEWHERE}
        if candidate in self.parts:
            return {"kind": "part"} | self.parts[candidate]
        return {"kind": candidate}

    def evaluation_recipe(self, candidate: str) -> dict:
        """How the candidate is measured: source kind, forward, arithmetic, batch."""
        candidate, settings = self.whole(candidate), self.config["evaluation"]
        recipe = {"batch_chunks": settings["batch_chunks"], "dtype": settings["dtype"], "forward": "yardstick"}
        if candidate in self.variants:
            return recipe | {"source": self.format_of(candidate)}
        if candidate in self.rivals:
            rival = self.rivals[candidate]
            kind = "bf16dir" if self.decoder(candidate) else rival.get("format", rival["kind"])
            return recipe | {"source": kind}
        recipe["source"] = "hf"
        if candidate == "noise-hf":
            return recipe | {"forward": "transformers"}
        if candidate == "noise-decode":
            start = self.config["corpora"]["evaluation"]["length"] * 3 // 4
            return recipe | {"batch_chunks": DECODE_CHUNKS, "decode_from": start}
        return recipe | {"dtype": OTHER_DTYPE[settings["dtype"]]}


def part_candidates(part: dict) -> list[str]:
    """The candidates that a row of parts is made of."""
    return [part["candidate"], *([part["head_from"]] if part["head_from"] else [])]


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
        _require_measured(experiment, name, "attribution.candidates")
    return experiment


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
    for name, server in experiment.servers.items():
        if name in RESERVED or name in rows:
            raise YardstickError(f"config: gsm8k.servers: the name {name} is taken")
        missing = sorted(set(server["models"] or []) - set(experiment.models))
        if missing:
            known = ", ".join(experiment.models)
            raise YardstickError(
                f"config: gsm8k.servers.{name}.models: there is no model {missing[0]} (known: {known})"
            )


def _require_packed(experiment: Experiment, name: str, where: str) -> None:
    """Refuse a name that is no variant in packed int4.

    Raises:
        YardstickError: names it.
    """
    packed = [other for other in experiment.variants if experiment.format_of(other) == "packed"]
    if name not in packed:
        known, stored = ", ".join(packed) or "none", name in experiment.variants
        wrong = f"{name} is stored as {experiment.format_of(name)}" if stored else f"there is no variant {name}"
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
            _require_measured(experiment, part[key], f"{where}.{key}")
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
