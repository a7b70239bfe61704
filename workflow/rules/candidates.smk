# What the rules that measure look up: files and code of a candidate, of rows of parts, of attribution, of answers.

from yardstick.experiment import part_candidates

TASK = EXPERIMENT.config.get("gsm8k", {})
ENGINE = EXPERIMENT.engine
ANSWERING = {model: EXPERIMENT.answering(model) for model in EXPERIMENT.models}
ANSWERING_NAMES = {name for names in ANSWERING.values() for name in names}


def checkpoint_of(model, candidate):
    """The candidate's checkpoint; a noise floor has none, it runs the original weights."""
    folder = f"results/quality/{model}/{candidate}"
    if candidate in EXPERIMENT.variants:
        return [f"{folder}/checkpoint/model.safetensors.index.json"]
    if EXPERIMENT.decoder(candidate):
        return [f"{folder}/decoded/manifest.json"]
    return [f"{folder}/checkpoint/manifest.json"] if candidate in EXPERIMENT.rivals else []


def content_of(model, candidate):
    """What lies beside the manifest under a name that is known beforehand: a GGUF file, whose change is measured again
    or refused, or a folder that is there only while it is needed."""
    kind = EXPERIMENT.recipe(candidate).get("kind")
    folder = f"results/quality/{model}/{candidate}"
    if EXPERIMENT.decoder(candidate):
        return [f"{folder}/decoded/files"]
    if kind == "hub":
        return [f"{folder}/checkpoint/files"]
    return [f"{folder}/checkpoint/model.gguf"] if kind == "gguf" else []


def checkpoint(wildcards):
    """Of a row of parts, the checkpoint of the candidate that it changes."""
    return checkpoint_of(wildcards.model, EXPERIMENT.whole(wildcards.candidate))


def checkpoint_content(wildcards):
    return content_of(wildcards.model, EXPERIMENT.whole(wildcards.candidate))


def head_candidate(wildcards):
    """The candidate whose head a row of parts takes, as a list of at most one."""
    return part_candidates(EXPERIMENT.parts[wildcards.candidate])[1:] if wildcards.candidate in EXPERIMENT.parts else []


def head_checkpoint(wildcards):
    return [path for name in head_candidate(wildcards) for path in checkpoint_of(wildcards.model, name)]


def head_content(wildcards):
    return [path for name in head_candidate(wildcards) for path in content_of(wildcards.model, name)]


def mixing(wildcards):
    """Options of the evaluation that make a row of parts; none for any other candidate."""
    keep = EXPERIMENT.parts.get(wildcards.candidate, {}).get("keep_bf16")
    options = [f"--keep-bf16={shlex.quote(keep)}"] if keep else []
    for name in head_candidate(wildcards):
        kind, (path,) = EXPERIMENT.evaluation_recipe(name)["source"], checkpoint_of(wildcards.model, name)
        options.append(f"--head-from {kind}:{path}")
    return " ".join(options)


def beside_in_parts(model, rival):
    """Checkpoints that a fetched rival is measured together with: made before it is fetched, so that it need not
    wait for them on the disk."""
    parts = [part_candidates(EXPERIMENT.parts[name]) for name in EXPERIMENT.parts_of(model)]
    others = {name for names in parts if rival in names for name in names} - {rival}
    return sorted(path for name in others for path in checkpoint_of(model, name))


def evaluation_code(wildcards):
    recipe = EXPERIMENT.evaluation_recipe(wildcards.candidate)
    extra = ["yardstick.evaluate.hugging_face"] if recipe["forward"] == "transformers" else []
    extra += [PACKED_MODEL] if recipe.get("weights") == "packed" else []
    if wildcards.candidate in EXPERIMENT.parts:
        heads = [KINDS[EXPERIMENT.evaluation_recipe(name)["source"]][0] for name in head_candidate(wildcards)]
        extra += ["yardstick.sources.mixed", *heads]
    return code("yardstick.cli.evaluate", KINDS[recipe["source"]][0], *extra)


def evaluation_params(wildcards):
    return {
        "model": wildcards.model,
        "candidate": EXPERIMENT.recipe(wildcards.candidate),
        "evaluate": EXPERIMENT.evaluation_recipe(wildcards.candidate),
    }


def attribution_code(wildcards):
    return code("yardstick.cli.attribute", KINDS[EXPERIMENT.evaluation_recipe(wildcards.candidate)["source"]][0])


def attribution_params(wildcards):
    settings = EXPERIMENT.config["attribution"]
    return {
        "model": wildcards.model,
        "candidate": EXPERIMENT.recipe(wildcards.candidate),
        "source": EXPERIMENT.evaluation_recipe(wildcards.candidate)["source"],
        "positions": settings["positions"],
        "by": settings["by"],
        "own_texts": list(EXPERIMENT.own_texts),
    }


def of_parts(file):
    """That file of every row of parts."""
    models = EXPERIMENT.models
    return [f"results/quality/{model}/{name}/{file}" for model in models for name in EXPERIMENT.parts_of(model)]


def of_attributed(pattern):
    """The files of that pattern of every candidate whose loss is told apart."""
    models = EXPERIMENT.models
    return [pattern.format(model=model, name=name) for model in models for name in EXPERIMENT.attributed(model)]


def problem_file(wildcards):
    """Problems that lie on this machine: an edit of them reruns everything that follows."""
    path = TASK["problems"].get("path", "")
    return [path] if os.path.isfile(path) else []  # one that is missing is for the step to tell


def answering_params(wildcards):
    name = wildcards.candidate
    made = EXPERIMENT.recipe(name) if name in EXPERIMENT.candidates else {"kind": name}
    return {"model": wildcards.model, "candidate": made, "answer": EXPERIMENT.answering_recipe(name)}


def answering_code(wildcards):
    recipe = EXPERIMENT.answering_recipe(wildcards.candidate)
    extra = [PACKED_MODEL] if recipe.get("weights") == "packed" else []
    return code("yardstick.cli.answer_problems", KINDS[recipe["source"]][0], BACKENDS[recipe["backend"]], *extra)


def original_answers(wildcards):
    """What a run is paired with; the original itself is paired with nothing."""
    return [f"results/gsm8k/{wildcards.model}/{ORIGINAL}/generations.parquet"] * (wildcards.answering != ORIGINAL)


def timed_checkpoint(wildcards):
    """The packed checkpoint whose shapes and decoding are timed."""
    return checkpoint_of(wildcards.model, ENGINE["candidate"])


def timed_decoding(wildcards):
    kinds = [f"{weights}-{dtype}" for dtype in ENGINE["dtypes"] for weights in ("packed", "dense")]
    return [f"results/engine/{wildcards.model}/decode-{kind}.json" for kind in kinds]


RECORD_RECIPE = as_json(
    TABLE
    | {
        "parts": {model: EXPERIMENT.parts_of(model) for model in EXPERIMENT.models},
        "ablation": {model: EXPERIMENT.ablation_of(model) for model in EXPERIMENT.models},
        "attribution": {model: EXPERIMENT.attributed(model) for model in EXPERIMENT.models},
        "probed": PROBED,
        "answering": ANSWERING,
    }
)
