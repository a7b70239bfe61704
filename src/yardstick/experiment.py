"""The experiment that a checked config describes: candidates by name, and what each step is told of them."""

from dataclasses import dataclass
from typing import Any

from yardstick.formats import DECODED_BY, KINDS
from yardstick.quantize.methods import FORMATS, starts_of

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

    def format_of(self, variant: str) -> str:
        """The kind of source that reads a variant's checkpoint."""
        return FORMATS.get(self.variants[variant]["method"], "packed")

    def ablation_of(self, model: str) -> list[str]:
        """Rows of one model that are the steps of a method, in their order."""
        return [name for name in self.config.get("ablation", []) if name in self.candidates_of(model)]

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
        """Candidates of a model whose matrices are probed; a noise floor has the original's, which need no probe, and
        a rotated variant none that could be held against them."""
        return [
            name for name in self.chosen("probe", model) if "rotate" not in self.variant_of(name).get("transform", {})
        ]

    def variant_of(self, candidate: str) -> dict:
        """The recipe of a variant, or of the one that an exported rival is, or that it starts from (of a mix, the
        first); empty for any other candidate."""
        recipe = self.variants.get(self.rivals.get(candidate, {}).get("variant", candidate), {})
        while starts_of(recipe):
            recipe = self.variants[starts_of(recipe)[0]]
        return recipe

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
        if (recipe["source"], task["backend"], task["weights"]) == ("packed", "yardstick", "packed"):
            recipe["weights"] = "packed"
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
        """How the candidate is measured: source kind, forward, arithmetic, batch, and weights that stay packed."""
        settings, is_part, candidate = self.config["evaluation"], candidate in self.parts, self.whole(candidate)
        recipe = {"batch_chunks": settings["batch_chunks"], "dtype": settings["dtype"], "forward": "yardstick"}
        if candidate in self.variants or candidate in self.rivals:
            made = self.rivals.get(candidate) or {"kind": self.format_of(candidate)}
            recipe["source"] = "bf16dir" if self.decoder(candidate) else made.get("format", made["kind"])
            if (recipe["source"], settings["weights"], is_part) == ("packed", "packed", False):
                recipe["weights"] = "packed"
            return recipe
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
