# The checked experiment, and what all rules look up in it.

import json
import os
import re
import shlex
import sys
from pathlib import Path

from yardstick.cli.targets import check_targets, release_stale_lock
from yardstick.engine import PACKED_MODEL
from yardstick.errors import YardstickError
from yardstick.experiment import ORIGINAL
from yardstick.formats import KINDS
from yardstick.gsm8k.backends import BACKENDS
from yardstick.load_experiment import load_experiment
from yardstick.provenance import stage_files
from yardstick.quantize.methods import modules_of, needs_text, starts_of

try:
    EXPERIMENT = load_experiment(config)
    check_targets(sys.argv[1:], EXPERIMENT)
except YardstickError as error:
    sys.exit(f"yardstick: {error}")
LOCK = release_stale_lock(sys.argv[1:])  # held until this process ends

# steps run in the environment of this Snakemake, whether or not it is activated; a thread that waits sleeps, since on a
# machine that does other work too, one that spins keeps the other from coming (docs/log.md); no number depends on it
shell.prefix(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH OMP_WAIT_POLICY=passive; ")


def closed_list(names):
    """Regular expression for exactly these names; matches nothing where there are none."""
    return "|".join(re.escape(name) for name in sorted(names)) or "(?!)"


wildcard_constraints:
    model=closed_list(EXPERIMENT.models),
    candidate=closed_list([*EXPERIMENT.candidates, *EXPERIMENT.parts]),
    variant=closed_list(EXPERIMENT.variants),
    rival=closed_list(EXPERIMENT.rivals),


def as_json(recipe):
    """A recipe as the one parameter of a rule: text with sorted keys, so any change of it is seen."""
    return json.dumps(recipe, sort_keys=True)


def code(*modules):
    """Source files that a step's result depends on, by paths that stay the same when the repository is moved."""
    return [os.path.relpath(path) for path in stage_files("yardstick.cli.common", *modules)]


# Input functions only look up what the config says.


def local_files(wildcards):
    """Files of a model that lies on this machine: an edit of them reruns everything that follows."""
    recipe = EXPERIMENT.models[wildcards.model]
    return sorted(map(str, Path(recipe["path"]).glob("*.[sj]*"))) if recipe["kind"] == "local" else []


def pinned_manifest(wildcards):
    pin = EXPERIMENT.models[wildcards.model]["corpora_pin"]
    return [pin] if pin else []


def own_text(wildcards):
    """Windows that the model itself writes, where the config asks for them."""
    return [f"data/quality/{wildcards.model}/generated.npz"] if EXPERIMENT.own_texts else []


def text_files(wildcards):
    """Texts that lie on this machine: an edit of them reruns everything that follows."""
    corpora = EXPERIMENT.config["corpora"]
    texts = [text for part in ("evaluation", "calibration") for text in corpora[part]["texts"].values()]
    return [text["source"]["path"] for text in texts if text["source"]["kind"] == "file"]


def method_code(wildcards):
    return code("yardstick.cli.quantize", *modules_of(EXPERIMENT.variants[wildcards.variant]))


def calibration_sequences(wildcards):
    """RTN looks at no text."""
    needed = needs_text(EXPERIMENT.variants[wildcards.variant])
    return [f"data/quality/{wildcards.model}/calib.npz"] if needed else []


def start_checkpoints(wildcards):
    """The checkpoints that a method works on, where it needs other variants'."""
    folder = f"results/quality/{wildcards.model}"
    starts = starts_of(EXPERIMENT.variants[wildcards.variant])
    return [f"{folder}/{start}/checkpoint/model.safetensors.index.json" for start in starts]


def stamps(paths):
    """Sizes and times of files: one that is replaced by an older one is seen too."""
    found = [(path, os.stat(path)) for path in paths if os.path.exists(path)]
    return as_json({path: [stat.st_size, stat.st_mtime_ns] for path, stat in found})


def local_rival(wildcards):
    """Files of a rival that lies on this machine."""
    path = Path(EXPERIMENT.rivals[wildcards.rival].get("path", ""))
    if path.is_dir():
        return sorted(str(file) for file in path.iterdir() if file.is_file())
    return [str(path)] if path.is_file() else []  # one that is missing is for the step to tell


def rival_code(wildcards):
    kind = EXPERIMENT.rivals[wildcards.rival]["format"]
    return code("yardstick.cli.retrieve_rival", *([KINDS[kind][0]] if kind in KINDS else []))


def tool_script(wildcards):
    """What runs in the tool's environment: it makes a checkpoint, or spells out one that only it can decode."""
    decoder = EXPERIMENT.decoder(wildcards.rival)
    if decoder:
        return f"workflow/envs/{decoder}/decode.py"
    return f"workflow/envs/{EXPERIMENT.rivals[wildcards.rival]['tool']}/make.py"


def tool_packages(wildcards):
    tool = EXPERIMENT.decoder(wildcards.rival) or EXPERIMENT.rivals[wildcards.rival]["tool"]
    return f"data/environments/{tool}/packages.json"


def ready_to_measure(wildcards):
    """What has to be there before a rival is fetched, so that it is measured at once; a change of it fetches nothing."""
    decoder = EXPERIMENT.decoder(wildcards.rival)
    tools = [f"data/environments/{decoder}/packages.json"] if decoder else []
    tools += beside_in_parts(wildcards.model, wildcards.rival)
    tools += ["data/gsm8k/problems.json"] * (wildcards.rival in EXPERIMENT.chosen("gsm8k", wildcards.model))
    names = ["manifest.json"] + ["probe_manifest.json"] * (wildcards.rival in PROBED[wildcards.model])
    return [ancient(path) for path in [f"results/quality/{wildcards.model}/reference/{name}" for name in names] + tools]


def fetched_files(wildcards):
    """The folder of a fetched rival, which is there only while it is needed."""
    fetched = EXPERIMENT.rivals[wildcards.rival]["kind"] == "hub"
    return [f"results/quality/{wildcards.model}/{wildcards.rival}/checkpoint/files"] if fetched else []


def exported_variant(wildcards):
    variant = EXPERIMENT.rivals[wildcards.rival]["variant"]
    return f"results/quality/{wildcards.model}/{variant}/checkpoint/model.safetensors.index.json"


def tool_calibration(wildcards):
    """Schemes that use no text name no sequences."""
    needed = "sequences" in EXPERIMENT.rivals[wildcards.rival]
    return [f"data/quality/{wildcards.model}/calib.npz"] if needed else []


def importance_matrix(wildcards):
    needed = EXPERIMENT.rivals[wildcards.rival].get("imatrix", False)
    return [f"results/quality/{wildcards.model}/reference/imatrix.gguf"] if needed else []


def of_all(file, *groups):
    """That file of every candidate of every model, or of the candidates in `groups`."""
    return [f"results/quality/{model}/{candidate}/{file}" for model, candidate in EXPERIMENT.pairs(*groups)]


def recorded_figures(wildcards):
    return sorted({model["recorded"] for model in EXPERIMENT.models.values() if model["recorded"]})


PROBED = {model: EXPERIMENT.probed_of(model) for model in EXPERIMENT.models}
TABLE = {
    "models": {model: EXPERIMENT.candidates_of(model) for model in EXPERIMENT.models},
    "not_measured": EXPERIMENT.unreadable,
    "recorded": {name: model["recorded"] for name, model in EXPERIMENT.models.items() if model["recorded"]},
    "baseline": EXPERIMENT.config["baseline"],
    "bar": EXPERIMENT.config["bar"],
    "seed": EXPERIMENT.config["evaluation"]["seed"],
    "own_texts": list(EXPERIMENT.own_texts),
}
TABLE_RECIPE = as_json(TABLE)
