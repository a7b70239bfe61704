"""Let a server that speaks OpenAI's protocol answer the problems of the GSM8K task."""

import json
import sys
from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.files import canonical_json, sha256_file, sha256_text, write_json
from yardstick.gsm8k.kept import KeptAnswers
from yardstick.gsm8k.prompts import as_text, conversation
from yardstick.gsm8k.run import answer_all, not_asked, read_problems, write_generations
from yardstick.gsm8k.server import Server
from yardstick.progress import progress
from yardstick.provenance import code_digest, package_versions


def main(arguments) -> None:
    settings = arguments.recipe["answer"]
    examples, problems = read_problems(arguments.problems)
    conversations = [conversation(problem, examples, settings["answer"]) for problem in problems]
    proof = {
        "recipe_sha256": sha256_text(canonical_json(arguments.recipe)),
        "inputs": {"problems": sha256_file(arguments.problems)},
        "code_sha256": code_digest("yardstick.cli.ask_server"),
        "versions": package_versions(),
    }
    kept = KeptAnswers(arguments.kept, sha256_text(canonical_json(proof)))
    server = Server(arguments.name, settings["server"] | arguments.connection)

    def ask(indices: list[int]):
        asked = [conversations[index] for index in indices]
        answers = server.answer(asked, settings["max_new_tokens"], [], answered=bool(kept.found))
        return ((indices[place], generation) for place, generation in answers)

    with progress(f"ask {arguments.name}", len(problems), "problem") as done:
        answer_all(len(problems), kept, ask, False, done)
    write_generations(arguments.generations, [as_text(messages) for messages in conversations], kept.found)
    record = {"model": arguments.recipe["model"], "name": arguments.name, "failed": None, "recipe": arguments.recipe}
    write_json(arguments.output, record | {"provenance": proof})
    if missed := not_asked(kept.found):
        print(
            f"{arguments.name}: {missed} of {len(problems)} problems could not be asked; snakemake -f with "
            f"{arguments.generations} asks these again and keeps the others",
            file=sys.stderr,
        )


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--name", required=True, help="the server's name")
    arguments.add_argument("--problems", type=Path, required=True, help="problems.json")
    arguments.add_argument("--connection", type=json.loads, default={}, help="what changes no answer, as JSON")
    arguments.add_argument("--kept", type=Path, required=True, help="file that keeps answers until all are there")
    arguments.add_argument("--generations", type=Path, required=True, help="generations.parquet to write")
    arguments.add_argument("--output", type=Path, required=True, help="generation.json to write")
    run_step(main, arguments)
