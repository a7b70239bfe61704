"""Time the decoding of a packed checkpoint in one mode; a process of its own, since it tells its peak memory."""

from pathlib import Path

from yardstick.cli.common import parser, run_step
from yardstick.corpora.load import load_windows
from yardstick.engine.bench import bench_decode
from yardstick.errors import YardstickError
from yardstick.evaluate.candidate import open_candidate
from yardstick.files import write_json
from yardstick.models.folder import context_length, load_tokenizer, open_original, vocabulary_size
from yardstick.models.prefill import exact_arithmetic


def main(arguments) -> None:
    exact_arithmetic()
    recipe, original = arguments.recipe, open_original(arguments.model)
    source = open_candidate("packed", arguments.checkpoint, original)
    vocabulary = vocabulary_size(load_tokenizer(original.folder))
    ids = load_windows(arguments.chunks).ids.flatten()[: recipe["prompt"]].tolist()
    if len(ids) < recipe["prompt"]:
        raise YardstickError(f"engine: a prompt of {recipe['prompt']} ids is more than the evaluation text holds")
    room, needed = context_length(original.folder), len(ids) + recipe["steps"] + recipe["draft"] + 2
    if room is not None and needed > room:
        raise YardstickError(f"engine: prompt, steps and draft need {needed} positions, the model has {room}")
    settings = (recipe["mode"], recipe["dtype"], ids, recipe["steps"], recipe["draft"])
    write_json(arguments.output, bench_decode(source, original, vocabulary, *settings))


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="the model's manifest.json")
    arguments.add_argument("--checkpoint", type=Path, required=True, help="index of the packed checkpoint")
    arguments.add_argument(
        "--chunks", type=Path, required=True, help="evaluation windows; the prompt is their beginning"
    )
    arguments.add_argument("--output", type=Path, required=True, help="file to write")
    run_step(main, arguments)
