"""Let one candidate answer the problems of the GSM8K task."""

import importlib
import sys
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.engine import PACKED_MODEL
from yardstick.errors import YardstickError
from yardstick.evaluate.candidate import open_candidate
from yardstick.files import canonical_json, sha256_file, sha256_text, write_json
from yardstick.gsm8k.backends import BACKENDS
from yardstick.gsm8k.kept import KeptAnswers
from yardstick.gsm8k.prompts import Renderer, conversation
from yardstick.gsm8k.run import answer_all, read_problems, write_generations
from yardstick.models.folder import context_length, open_original
from yardstick.models.generate import NotFiniteError
from yardstick.models.prefill import exact_arithmetic, expected_tensors, pick_device
from yardstick.progress import progress
from yardstick.provenance import code_digest, machine, package_versions
from yardstick.sources import KINDS, audit_source


def main(arguments) -> None:
    exact_arithmetic()
    settings, original = arguments.recipe["answer"], open_original(arguments.model)
    examples, problems = read_problems(arguments.problems)
    renderer = Renderer(original.folder)
    prompts = [renderer.render(conversation(problem, examples, settings["answer"])) for problem in problems]
    require_room(renderer, prompts, settings["max_new_tokens"])
    source = open_candidate(settings["source"], arguments.checkpoint, original)
    audit_source(source, expected_tensors(original.config, source))
    modules = ["yardstick.cli.answer_problems", BACKENDS[settings["backend"]], KINDS[settings["source"]][0]]
    if settings.get("weights") == "packed":
        modules.append(PACKED_MODEL)
    inputs = {"model": original.digest, "problems": sha256_file(arguments.problems)}
    if arguments.checkpoint:
        inputs["checkpoint"] = sha256_file(arguments.checkpoint)
    proof = {
        "recipe_sha256": sha256_text(canonical_json(arguments.recipe)),
        "inputs": inputs,
        "code_sha256": code_digest(*modules),
        "versions": package_versions(),
        "device": str(pick_device()),
        "dtype": settings["dtype"],
    }
    kept = KeptAnswers(arguments.kept, sha256_text(canonical_json(proof)))
    backend = importlib.import_module(BACKENDS[settings["backend"]])

    def ask(indices: list[int]):
        return backend.answer(source, original, renderer, prompts, indices, settings)

    failed = None
    with progress(f"answer {arguments.name}", len(prompts), "problem") as done:
        try:
            answer_all(len(prompts), kept, ask, settings.get("reverse", False), done)
        except NotFiniteError as error:
            failed = str(error)
            print(f"{arguments.name}: {failed}", file=sys.stderr)
    write_generations(arguments.generations, prompts, kept.found, failed)
    record = {"model": arguments.recipe["model"], "name": arguments.name, "failed": failed, "recipe": arguments.recipe}
    write_json(arguments.output, record | {"provenance": proof | {"machine": machine()}})
    kept.finish()


def require_room(renderer: Renderer, prompts: list[str], max_new_tokens: int) -> None:
    """Refuse prompts that with their answers are longer than the model's context.

    Raises:
        YardstickError: says what is needed and what there is.
    """
    longest, room = max(len(renderer.encode(prompt)) for prompt in prompts), context_length(renderer.folder)
    if room is not None and longest + max_new_tokens > room:
        raise YardstickError(
            f"gsm8k: the longest prompt has {longest} ids, with max_new_tokens {max_new_tokens} that is more than the "
            f"{room} positions of the model; ask with fewer examples or for shorter answers"
        )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the candidate's name")
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--checkpoint", type=Path, help="the candidate's file or index; the original if left out")
    arguments.add_argument("--problems", type=Path, required=True, help="problems.json")
    arguments.add_argument("--kept", type=Path, required=True, help="file that keeps answers until all are there")
    arguments.add_argument("--generations", type=Path, required=True, help="generations.parquet to write")
    arguments.add_argument("--output", type=Path, required=True, help="generation.json to write")
    run_step(main, arguments)
