"""The steps of an experiment: what each reads, stores, needs and takes.

Bytes follow from shapes and formats. Memory and time are estimates: memory is the sum of the large tensors that are
alive at once, time is operations over a measured matrix-product rate plus bytes over assumed rates of disk and network.
"""

from math import prod
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.evaluate.divergence import POSITION_TILE, VOCAB_TILE
from yardstick.experiment import NOISE_FLOORS, Experiment
from yardstick.models.config import ModelConfig, read_config
from yardstick.plan.sizes import (
    Weights,
    activation_bytes,
    candidate_weights,
    forward_operations,
    layer_bytes,
    matrices,
    parameters,
    stages_of,
)
from yardstick.plan.step import (
    DECODE_SHARE,
    FORWARD_SHARE,
    GGUF_SECONDS,
    GPTQ_SHARE,
    HEAP,
    PROCESS,
    RTN_SECONDS,
    START_SECONDS,
    TRELLIS_SECONDS,
    WIDTH,
    Rates,
    Step,
)
from yardstick.plan.tasks import TaskSteps
from yardstick.quantize.methods import needs_text, search_steps, starts_of
from yardstick.quantize.run_distill import GRAPH_BYTES, graph_bytes
from yardstick.quantize.run_gptq import SEQUENCES_AT_ONCE
from yardstick.quantize.scales import MOST_ROWS


def model_shapes(experiment: Experiment, model: str) -> ModelConfig:
    """Shapes of a model: of the folder where it is here already, else of the config's `architecture`.

    Raises:
        YardstickError: neither is there, or the two disagree.
    """
    entry = experiment.models[model]
    here = Path(f"data/models/{model}/model/config.json")
    if entry["kind"] == "local":
        here = Path(entry["path"]) / "config.json"
        if not here.is_file():
            raise YardstickError(f"plan: {here}: no such file; is models.{model}.path a Hugging Face folder?")
    known = [read_config(path) for path in (here, Path(entry["architecture"] or "")) if path.is_file()]
    if not known:
        raise YardstickError(
            f"plan: the shapes of {model} are not known before it is here; name a copy of its config.json under "
            f"models.{model}.architecture, or fetch it first: snakemake -j1 data/models/{model}/manifest.json"
        )
    if any(other != known[0] for other in known):
        raise YardstickError(f"plan: {entry['architecture']} is not the architecture of {here}; correct it")
    return known[0]


class ModelPlan(TaskSteps):
    """Steps of one model of an experiment."""

    def __init__(self, experiment: Experiment, model: str, rates: Rates) -> None:
        self.experiment, self.model, self.rates = experiment, model, rates
        self.config = model_shapes(experiment, model)
        self.settings = experiment.config["evaluation"]
        corpora = experiment.config["corpora"]
        self.length = corpora["evaluation"]["length"]
        self.chunks = sum(text["chunks"] for text in corpora["evaluation"]["texts"].values())
        self.calibration_length = corpora["calibration"]["length"]
        self.sequences = sum(text["sequences"] for text in corpora["calibration"]["texts"].values())
        self.model_bytes = 2 * parameters(self.config)
        self.results = Path("results/quality") / model

    @property
    def states(self) -> int:
        """Bytes of the reference: final hidden states of every position."""
        return self.chunks * self.length * self.config.hidden_size * WIDTH[self.settings["dtype"]]

    def steps(self) -> list[Step]:
        """Every step that costs something, in the order of the chain."""
        steps = [self.retrieve(), *self.own_text(), self.corpora(), self.reference()]
        names = self.experiment.candidates_of(self.model)
        recipes = {name: self.experiment.recipe(name) for name in names}
        if any(recipe.get("imatrix") for recipe in recipes.values()):
            steps.append(self.imatrix())
        probed = self.experiment.probed_of(self.model)
        if probed:
            steps.append(self.probe_inputs())
        for name, recipe in recipes.items():
            if name in self.experiment.variants:
                calibrated = {"distill": self.distill, "mix": self.mix}.get(recipe["method"], self.gptq)
                steps.append(calibrated(name, recipe) if needs_text(recipe) else self.rtn(name, recipe))
            elif recipe["kind"] == "gguf":
                steps.append(self.gguf(name))
            elif recipe["kind"] == "hub":
                steps.append(self.download(name))
            elif recipe["kind"] == "made":
                steps.append(self.made(name, recipe))
            elif recipe["kind"] == "exported":
                steps.append(self.exported(name))
            elif recipe["kind"] == "local" and not Path(recipe["path"]).exists():
                raise YardstickError(f"plan: rival {name}: {recipe['path']}: no such file or folder")
            if self.experiment.decoder(name):
                steps.append(self.decoded(name))
            steps.append(self.evaluate(name))
            if name in probed:
                steps.append(self.probe(name))
        steps += [self.evaluate(name) for name in self.experiment.parts_of(self.model)]
        steps += [self.attribute(name) for name in self.experiment.attributed(self.model)]
        return steps + [self.answer(name) for name in self.experiment.answering(self.model)]

    def weights(self) -> list[Weights]:
        """Sizes of the original and of every candidate whose format is known beforehand."""
        found = [candidate_weights(self.config, "original (bf16)", {"kind": "original"})]
        for name in self.experiment.candidates_of(self.model):
            if name not in NOISE_FLOORS:
                found.append(self.candidate(name))
        return [weights for weights in found if weights]

    def retrieve(self) -> Step:
        entry = self.experiment.models[self.model]
        output = Path(f"data/models/{self.model}")
        if entry["kind"] == "local":
            size = sum(path.stat().st_size for path in Path(entry["path"]).glob("*.safetensors"))
            return Step("find the model", output, size, 0, PROCESS, size / self.rates.disk)
        size = entry.get("bytes", self.model_bytes)
        largest = max(prod(shape) for shape in self.config.tensors().values())
        seconds = size / self.rates.network + size / self.rates.disk
        if entry["kind"] == "hub":
            return Step("fetch the model", output, size, size, PROCESS, seconds)
        # the archive and what is unpacked from it stay in the cache beside the model made from them
        disk = self.model_bytes + (size if "bytes" in entry else 0)
        return Step("fetch the model", output, size, disk, PROCESS + 24 * largest, START_SECONDS + seconds)

    def corpora(self) -> Step:
        ids = 4 * (self.chunks * (self.length + 1) + self.sequences * self.calibration_length)
        return Step("build the corpora", Path("data/quality") / self.model, ids, ids, PROCESS, 10)

    def forward_memory(self, width: int, batch: int, length: int, states: float) -> float:
        """Two layers at once (one is read while the other computes), hidden states, the activations of a batch."""
        layers = 2 * layer_bytes(self.config, width) + layer_bytes(self.config, 2)
        return PROCESS + HEAP * layers + states + activation_bytes(self.config, batch * length, width)

    def forward_seconds(self, chunks: int, length: int, dtype: str) -> float:
        operations = forward_operations(self.config, chunks, length)
        return START_SECONDS + operations / (FORWARD_SHARE * self.rates.products[dtype])

    def reference(self) -> Step:
        width, batch = WIDTH[self.settings["dtype"]], self.settings["batch_chunks"]
        reads = 2 * self.model_bytes  # once for the digest, once for the forward
        return Step(
            "run the original",
            self.results / "reference" / "states.safetensors",
            reads,
            self.states,
            self.forward_memory(width, batch, self.length, 2 * self.states),
            reads / self.rates.disk + self.forward_seconds(self.chunks, self.length, self.settings["dtype"]),
        )

    def imatrix(self) -> Step:
        states = 4 * self.sequences * self.calibration_length * self.config.hidden_size
        columns = sum(shape[1] for shape in matrices(self.config).values())
        reads = 2 * self.model_bytes
        return Step(
            "importance matrix",
            self.results / "reference" / "imatrix.gguf",
            reads,
            4 * columns,
            self.forward_memory(4, SEQUENCES_AT_ONCE, self.calibration_length, states),
            reads / self.rates.disk + self.forward_seconds(self.sequences, self.calibration_length, "float32"),
        )

    def checkpoint(self, name: str) -> Path:
        return self.results / name / "checkpoint"

    def candidate_size(self, name: str) -> float:
        """Bytes of a candidate's files; of a fetched one as the config says, else about 5 bits a weight. Of a row of
        parts, those of the candidate that it changes."""
        name = self.experiment.whole(name)
        known = self.candidate(name)
        return known.stored if known else self.experiment.rivals[name].get("bytes", self.model_bytes * 5 / 16)

    def candidate(self, name: str) -> Weights | None:
        """Sizes of a candidate, where its format is known beforehand.

        Raises:
            YardstickError: it cannot be made of this model.
        """
        recipe = self.experiment.recipe(name)
        if recipe.get("kind") == "exported":
            recipe = recipe | {"variant": self.experiment.variants[recipe["variant"]]}
        try:
            return candidate_weights(self.config, name, recipe)
        except YardstickError as error:
            raise YardstickError(
                f"plan: rival {name}: {error}; name the models it is for under rivals.{name}.models"
            ) from None

    def rtn(self, name: str, recipe: dict) -> Step:
        largest = max(prod(shape) for shape in matrices(self.config).values())
        size, reads = self.candidate_size(name), 2 * self.model_bytes
        seconds = START_SECONDS + (33 if recipe["mse"] else 1) * RTN_SECONDS * parameters(self.config)
        # bf16, fp32, codes and packed codes of the largest matrix, beside the shard that is being built
        memory = PROCESS + 8 * largest + layer_bytes(self.config, 1)
        return Step(f"quantize {name}", self.checkpoint(name), reads, size, memory, reads / self.rates.disk + seconds)

    def gptq(self, name: str, recipe: dict) -> Step:
        config, tokens = self.config, self.sequences * self.calibration_length
        refined = recipe["method"] == "gptq-refined"  # a second stream of states, three moments of each input
        shapes = matrices(config).values()
        widest = max(shape[1] for shape in shapes)
        streams = 2 if refined else 1
        operations = streams * forward_operations(config, self.sequences, self.calibration_length)
        for layer in range(config.num_layers):
            linears = config.layer_linears(layer)
            inputs = sum({tuple(stage): linears[stage[0]][1] ** 2 for stage in stages_of(linears)}.values())
            operations += 2 * tokens * inputs * (3 if refined else 1)
        # a round is three whole products and a sweep
        operations += (1 + 8 * recipe.get("rounds", 0)) * sum(rows * columns**2 for rows, columns in shapes)
        # fp64 factors run at half of the rate; three of them, each a third of a product
        operations += 4 * sum(columns**3 for _, columns in shapes) / 2
        if steps := search_steps(recipe):  # a forward more, and two products for each step of the search
            operations += forward_operations(config, self.sequences, self.calibration_length)
            operations += 4 * (steps + 1) * sum(min(rows, MOST_ROWS) * columns**2 for rows, columns in shapes)
        states = 4 * tokens * config.hidden_size * (3 if refined else 1)
        # every batch waits inside the block with its input of the stage, the widest of which is down_proj's
        waiting = 4 * tokens * (config.hidden_size + max(config.intermediate_size, config.num_heads * config.head_dim))
        head = 3 * 4 * config.vocab_size * config.hidden_size
        memory = (
            PROCESS + states + max(streams * (waiting + layer_bytes(config, 4)), head) + 8 * 4 * widest**2 * streams
        )
        reads, size = 2 * self.model_bytes, self.candidate_size(name)
        seconds = START_SECONDS + reads / self.rates.disk + operations / (GPTQ_SHARE * self.rates.products["float32"])
        trials = 60 if refined else 33 * recipe.get("mse", False)
        if recipe["method"] == "trellis":
            seconds += TRELLIS_SECONDS * 2 ** recipe["state_bits"] * parameters(config)
        elif trials:  # they hold several copies of one group of all rows
            seconds += trials * RTN_SECONDS * parameters(config)
            memory += 16 * 4 * config.vocab_size * recipe["group_size"]
        return Step(f"quantize {name}", self.checkpoint(name), reads, size, memory, seconds)

    def finest_group(self, name: str) -> int:
        """The group size of a variant; of a mix the least that any of its matrices may have."""
        recipe = self.experiment.variants[name]
        return recipe.get("group_size") or min(self.finest_group(start) for start in starts_of(recipe))

    def distill(self, name: str, recipe: dict) -> Step:
        config, rates = self.config, self.rates
        batch = max(1, recipe["batch_tokens"] // self.calibration_length)
        held = max(1, round(self.sequences * recipe["held_out"]))
        scores = 1 + -(-recipe["steps"] // recipe["score_every"])
        body, head = (
            forward_operations(config, 1, self.calibration_length),
            prod((config.vocab_size, config.hidden_size)),
        )
        head *= 2 * self.calibration_length
        graph = graph_bytes(config, batch * self.calibration_length)
        whole = graph <= GRAPH_BYTES
        # a backward is two products for each of the forward; the teacher's logits are made anew each time
        operations = recipe["steps"] * batch * ((3 if whole else 4) * body + 4 * head)
        operations += scores * held * (body + 2 * head) + self.sequences * body
        weights = sum(prod(shape) for shape in matrices(config).values())
        groups = -(-weights // self.finest_group(name))
        heads = 3 * 4 * config.vocab_size * config.hidden_size
        states = 2 * 4 * self.sequences * self.calibration_length * config.hidden_size
        # codes; scales and minima with gradients, moments, sizes and the best, in fp32
        kept = weights + 4 * 10 * groups + heads + states
        memory = PROCESS + kept + (graph if whole else graph // config.num_layers + layer_bytes(config, 4))
        reads, size = 2 * self.model_bytes + self.candidate_size(name), self.candidate_size(name)
        seconds = START_SECONDS + reads / rates.disk + operations / (GPTQ_SHARE * rates.products["float32"])
        return Step(f"quantize {name}", self.checkpoint(name), reads, size, memory, seconds)

    def gguf(self, name: str) -> Step:
        size = self.candidate_size(name)
        largest = max(prod(shape) for shape in self.config.tensors().values())
        reads = 2 * self.model_bytes
        # the writer holds the whole file until it is written
        memory = PROCESS + size + 6 * largest
        seconds = START_SECONDS + reads / self.rates.disk + GGUF_SECONDS * parameters(self.config)
        return Step(f"make {name}", self.checkpoint(name), reads, size, memory, seconds)

    def made(self, name: str, recipe: dict) -> Step:
        """By somebody else's tool, which holds the whole model; its time is not known beforehand."""
        size, reads = self.candidate_size(name), 2 * self.model_bytes
        memory = 2 * PROCESS + 2 * self.model_bytes + size
        return Step(f"make {name}", self.checkpoint(name), reads, size, memory, 60 + reads / self.rates.disk)

    def exported(self, name: str) -> Step:
        size = self.candidate_size(name)
        largest = max(prod(shape) for shape in matrices(self.config).values())
        seconds = START_SECONDS + RTN_SECONDS * parameters(self.config) + 2 * size / self.rates.disk
        return Step(f"export {name}", self.checkpoint(name), size, size, PROCESS + 8 * largest, seconds)

    def download(self, name: str) -> Step:
        """Deleted when it has been measured, before the next is fetched."""
        size = self.candidate_size(name)
        seconds = size / self.rates.network + size / self.rates.disk
        return Step(f"fetch {name}", self.checkpoint(name), size, size, PROCESS, seconds, temporary=True)

    def decoded(self, name: str) -> Step:
        """Spelled out in fp16 by its own tool; deleted like a download."""
        size = self.model_bytes
        seconds = START_SECONDS + 2 * size / self.rates.disk
        place = self.results / name / "decoded"
        return Step(
            f"decode {name}", place, self.candidate_size(name), size, 2 * PROCESS + 4e9, seconds, temporary=True
        )

    def evaluate(self, name: str) -> Step:
        recipe, config = self.experiment.evaluation_recipe(name), self.config
        width = WIDTH[recipe["dtype"]]
        states = self.chunks * self.length * config.hidden_size * width
        tile = 4 * (2 * VOCAB_TILE * config.hidden_size + 4 * POSITION_TILE * VOCAB_TILE)
        memory = self.forward_memory(width, recipe["batch_chunks"], self.length, states + self.states) + tile
        if recipe["forward"] == "transformers":  # the whole model at once, and its plain attention
            attention = 2 * width * config.num_heads * self.length**2
            memory = PROCESS * 2 + width * parameters(config) + states + self.states + attention
        forward = self.forward_seconds(self.chunks, self.length, recipe["dtype"])
        heads = 2 * 2 * self.chunks * self.length * config.vocab_size * config.hidden_size
        seconds = forward + heads / (FORWARD_SHARE * self.rates.products["float32"])
        if "decode_from" in recipe:  # one position at a time uses little of the machine
            seconds += DECODE_SHARE * forward
        # twice, once for the digest; of the original only the head
        head = 2 * config.vocab_size * config.hidden_size
        reads = 2 * self.candidate_size(name) + 2 * head + self.states
        positions = 60 * self.chunks * self.length
        seconds += reads / self.rates.disk
        return Step(f"measure {name}", self.results / name / "positions.parquet", reads, positions, memory, seconds)


def missing_bytes(steps: list[Step]) -> float:
    """Disk that the steps still need: what they will write, less what is there already."""

    def there(path: Path) -> int:
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())

    missing = {step: max(0.0, step.disk - there(step.output)) for step in steps}
    kept = sum(size for step, size in missing.items() if not step.temporary)
    # of what is deleted again, one candidate's is there at a time: its download, and what was decoded from it
    passing: dict[Path, float] = {}
    for step, size in missing.items():
        if step.temporary:
            passing[step.output.parent] = passing.get(step.output.parent, 0.0) + size
    return kept + max(passing.values(), default=0.0)
