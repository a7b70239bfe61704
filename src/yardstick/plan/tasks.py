"""Steps beside fidelity: text of the model's own, the probe, attribution, answers."""

from math import prod
from pathlib import Path

from yardstick.evaluate.attribution import BATCH_POSITIONS, LONGEST
from yardstick.evaluate.divergence import POSITION_TILE, VOCAB_TILE
from yardstick.plan.sizes import forward_operations, layer_bytes, matrices, parameters, stages_of
from yardstick.plan.step import (
    ANSWER_SHARE,
    FORWARD_SHARE,
    OWN_TEXT_SHARE,
    PROCESS,
    RTN_SECONDS,
    START_SECONDS,
    WIDTH,
    Step,
)

# length of a prompt without its worked examples, and of each of them, in ids
PROMPT, EXAMPLE = 120, 120
GSM8K_TEST = 1319  # problems of GSM8K's test split


class TaskSteps:
    """The part of `ModelPlan` (steps.py) that is for these steps."""

    def own_text(self) -> list[Step]:
        """The model in memory writes its windows, an id of each at a time."""
        recipe = self.experiment.generation_recipe()
        count = sum(text["chunks"] for text in recipe["texts"].values())
        if not count:
            return []
        ids, width = count * recipe["length"], WIDTH[recipe["dtype"]]
        operations = 2 * parameters(self.config) * ids
        seconds = START_SECONDS + operations / (OWN_TEXT_SHARE * self.rates.products[recipe["dtype"]])
        output = Path("data/quality") / self.model / "generated.npz"
        memory = PROCESS + self.in_memory(width, count, recipe["length"])
        return [Step("write own text", output, self.model_bytes, 4 * ids, memory, seconds)]

    def in_memory(self, width: int, slots: int, length: int) -> float:
        """All weights in the compute type, the head in fp32 too, and the caches of a batch."""
        config = self.config
        weights = width * parameters(config) + layer_bytes(config, 2)
        caches = 2 * width * config.num_layers * config.num_kv_heads * config.head_dim * slots * length
        return weights + 4 * config.vocab_size * config.hidden_size + caches

    def answer(self, name: str) -> Step:
        """At most: every answer as long as it may be. A server's time is its own."""
        task, recipe = self.experiment.config["gsm8k"], self.experiment.answering_recipe(name)
        output = Path("results/gsm8k") / self.model / name / "generations.parquet"
        source = task["problems"]
        count = source.get("take") or source.get("problems") or GSM8K_TEST
        length = PROMPT + EXAMPLE * task["examples"] + task["max_new_tokens"]
        disk = 4 * count * length
        if "server" in recipe:
            return Step(f"ask {name}", output, 0, disk, PROCESS, START_SECONDS)
        width = WIDTH[recipe["dtype"]]
        operations = 2 * parameters(self.config) * count * (PROMPT + task["max_new_tokens"])
        seconds = START_SECONDS + operations / (ANSWER_SHARE * self.rates.products[recipe["dtype"]])
        size = self.candidate_size(name) if name in self.experiment.candidates else self.model_bytes
        reads = self.model_bytes + 2 * size
        memory = PROCESS + self.in_memory(width, recipe["batch"], length)
        return Step(f"answers of {name}", output, reads, disk, memory, seconds + reads / self.rates.disk)

    def probed(self) -> tuple[int, int, int]:
        """Positions that the probe takes, the widths of all its inputs together, and the weights that read them."""
        config, settings = self.config, self.experiment.probe
        texts = len(self.experiment.config["corpora"]["evaluation"]["texts"]) - len(self.experiment.own_texts)
        positions = -(-settings["positions"] // texts) * texts
        linears = [config.layer_linears(layer) for layer in range(config.num_layers)]
        if settings["layers"] == "first":
            first = stages_of(linears[0])[0]
            return positions, config.hidden_size, sum(prod(linears[0][name]) for name in first)
        widths = sum(layer[stage[0]][1] for layer in linears for stage in stages_of(layer)) + config.hidden_size
        return positions, widths, sum(prod(shape) for shape in matrices(config).values())

    def probe_inputs(self) -> Step:
        """A forward over little text; its inputs are held until they are written."""
        width, (positions, widths, weights) = WIDTH[self.settings["dtype"]], self.probed()
        size, reads = width * positions * widths, 2 * self.model_bytes
        seconds = START_SECONDS + 2 * positions * weights / (
            FORWARD_SHARE * self.rates.products[self.settings["dtype"]]
        )
        memory = self.forward_memory(width, self.settings["batch_chunks"], min(self.length, positions), 2 * size)
        place = self.results / "reference" / "probe.safetensors"
        return Step("probe inputs", place, reads, size, memory, reads / self.rates.disk + seconds)

    def probe(self, name: str) -> Step:
        """Each matrix beside the original's in fp32: both, their difference, what a fit takes; the head by rows."""
        width, (positions, widths, weights) = WIDTH[self.settings["dtype"]], self.probed()
        layers = range(self.config.num_layers)
        largest = max(prod(shape) for layer in layers for shape in self.config.layer_linears(layer).values())
        reads = 2 * (self.candidate_size(name) + self.model_bytes + width * positions * widths)
        operations = 2 * 2 * positions * weights
        seconds = START_SECONDS + reads / self.rates.disk + RTN_SECONDS * weights
        seconds += operations / (FORWARD_SHARE * self.rates.products["float32"])
        record = 300 * len(matrices(self.config))
        return Step(f"probe {name}", self.results / name / "probe.json", reads, record, PROCESS + 20 * largest, seconds)

    def attribute(self, name: str) -> Step:
        """Every matrix, kind and layer swapped alone: a branch costs the layers from its first swap on."""
        settings = self.experiment.config["attribution"]
        seconds, memory, branches = self.swaps(settings["positions"], settings["by"])
        reads = 3 * self.candidate_size(name) + 2 * self.model_bytes
        output = self.results / name / "attribution.json"
        seconds += START_SECONDS + reads / self.rates.disk
        return Step(f"attribute {name}", output, reads, 500 * branches, memory, seconds)

    def mix(self, name: str, recipe: dict) -> Step:
        """Every matrix of every variant alone, and a few whole models on what is held out."""
        seconds, memory, _ = self.swaps(recipe["positions"], ["matrix"])
        reads = 3 * sum(map(self.candidate_size, recipe["of"])) + 2 * self.model_bytes
        wholes = 2 + len(recipe["of"])
        held = max(1, round(recipe["held_out"] * self.sequences))
        seconds = len(recipe["of"]) * seconds + START_SECONDS + reads / self.rates.disk
        seconds += wholes * self.forward_seconds(held, self.calibration_length, "float32")
        return Step(f"quantize {name}", self.checkpoint(name), reads, self.candidate_size(name), memory, seconds)

    def swaps(self, positions: int, by: list[str]) -> tuple[float, float, int]:
        """Seconds, memory and branches of parts that are swapped alone, beside body and all."""
        config, layers = self.config, self.config.num_layers
        linears = [config.layer_linears(layer) for layer in range(layers)]
        kinds = len({kind for names in linears for kind in names})
        alone = {"matrix": [len(names) for names in linears], "layer": [1] * layers}
        passes = layers * (2 + (kinds if "kind" in by else 0))
        for group, counts in alone.items():
            if group in by:
                passes += sum(count * (layers - layer) for layer, count in enumerate(counts))
        branches = 2 + kinds + sum(sum(counts) for group, counts in alone.items() if group in by)
        operations = passes / layers * forward_operations(config, max(1, positions // LONGEST), min(positions, LONGEST))
        operations += 2 * (branches + 2) * positions * config.vocab_size * config.hidden_size
        states = 2 * 4 * branches * positions * config.hidden_size
        tile = 4 * (2 * VOCAB_TILE * config.hidden_size + 4 * POSITION_TILE * VOCAB_TILE)
        # both models' layers
        memory = 2 * self.forward_memory(4, BATCH_POSITIONS // LONGEST, LONGEST, 0) - PROCESS + states + tile
        return operations / (FORWARD_SHARE * self.rates.products["float32"]), memory, branches
