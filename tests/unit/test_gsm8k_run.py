"""The GSM8K task step by step: prompts, answers that are kept, backends that agree, scores that pair."""

import http.server
import json
import threading
from argparse import Namespace

import pandas as pd
import pytest
import torch

from tests.tiny import write_tiny_model
from yardstick.cli import answer_problems, ask_server, build_problems, score_answers, tabulate_answers
from yardstick.errors import YardstickError
from yardstick.files import canonical_json
from yardstick.gsm8k.generation import NOT_ASKED, STOP, Generation
from yardstick.gsm8k.hugging_face import require_finite
from yardstick.gsm8k.kept import KeptAnswers
from yardstick.gsm8k.problems import Problem
from yardstick.gsm8k.prompts import QUESTION, Renderer, conversation
from yardstick.gsm8k.run import read_generations
from yardstick.manifest import write_manifest
from yardstick.models.generate import NotFiniteError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
ANSWER = {"source": "hf", "answer": "hash", "backend": "yardstick", "dtype": "float32", "batch": 4}
ANSWER["max_new_tokens"] = 20
ENDS = {"llama": range(100, 200), "qwen3_5": range(100, 130)}
PROBLEM = Problem("What is 2 + 3?", "It is 2 + 3 = 5.\n#### 5", "5")


def write_model(folder, family="llama", template=TEMPLATE):
    """A tiny model with its manifest, which ends a text at one of many ids, so that random texts do end."""
    changes = {"layers": 4 if family == "qwen3_5" else 2, "max_position_embeddings": 1024}
    write_tiny_model(folder / "model", family, tied=family == "llama", **changes)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    settings |= {"chat_template": template} if template else {}
    (folder / "model/tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [0, *ENDS[family]]}))
    names = [path.name for path in (folder / "model").iterdir()]
    write_manifest(folder / "manifest.json", folder / "model", names)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def model(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gsm8k") / request.param, request.param)


@pytest.fixture
def problems(tmp_path):
    path = tmp_path / "problems.json"
    recipe = {"problems": {"kind": "synthetic", "problems": 15, "seed": 1}, "examples": 2}
    build_problems.main(Namespace(recipe=recipe, output=path))
    return path


def run(model, problems, folder, name="reference", checkpoint=None, **changes):
    """One run of a candidate; gives its generations."""
    folder.mkdir(exist_ok=True)
    paths = {"kept": folder / "kept.jsonl", "generations": folder / "generations.parquet"}
    with torch.no_grad():
        answer_problems.main(
            Namespace(
                recipe={"model": "m", "candidate": {"kind": name}, "answer": ANSWER | changes},
                name=name,
                model=model / "manifest.json",
                checkpoint=checkpoint,
                problems=problems,
                output=folder / "generation.json",
                **paths,
            )
        )
    return read_generations(folder / "generations.parquet", 13)


def score(problems, folder, reference=None, recipe=None):
    arguments = {"generations": folder / "generations.parquet", "record": folder / "generation.json"}
    recipe = recipe or {"answer": "hash", "margin": 0.05, "seed": 0}
    score_answers.main(
        Namespace(
            recipe=recipe,
            problems=problems,
            reference=reference and reference / "generations.parquet",
            answers=folder / "answers.parquet",
            output=folder / "summary.json",
            **arguments,
        )
    )
    return json.loads((folder / "summary.json").read_text())


def test_a_conversation_has_worked_examples_that_end_in_the_form_of_the_answer():
    other = Problem("What is 1 + 1?", "It is 1 + 1 = 2.\n#### 2", "2")
    for form, ending in (("hash", "\n#### 2"), ("boxed", "\nThe answer is \\boxed{2}."), ("last", "The answer is 2.")):
        messages = conversation(PROBLEM, [other], form)
        assert [m["role"] for m in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"].startswith("It is 1 + 1 = 2.\n") and messages[1]["content"].endswith(ending)
        assert messages[0]["content"].startswith("What is 1 + 1?\n") and "5." not in messages[2]["content"]


def test_the_template_is_rendered_with_thinking_off(model):
    renderer = Renderer(model / "model")
    prompt = renderer.render(conversation(PROBLEM, [], "boxed"))
    assert prompt.startswith("<user>What is 2 + 3?\n") and prompt.endswith("\n<assistant><think></think>")
    assert renderer.stops == [] and renderer.stop_ids >= {0, *range(100, 130)}
    assert renderer.decode(renderer.encode(prompt)) == prompt


def test_without_a_template_the_bare_text_is_asked_and_the_next_question_ends_it(tmp_path):
    renderer = Renderer(write_model(tmp_path / "plain", template=None) / "model")
    prompt = renderer.render(conversation(PROBLEM, [PROBLEM], "hash"))
    assert prompt.count("Question: What is 2 + 3?") == 2 and prompt.count("#### 5") == 1
    assert prompt.endswith("\n\nAnswer:") and renderer.stops == [QUESTION]


def test_a_template_that_refuses_and_a_model_without_an_end_are_one_line(tmp_path):
    folder = write_model(tmp_path / "refuses", template="{{ raise_exception('no users') }}") / "model"
    with pytest.raises(YardstickError, match=r"the chat template cannot be rendered \(no users\)"):
        Renderer(folder).render(conversation(PROBLEM, [], "hash"))
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": None}))
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(YardstickError, match="no eos_token_id in its configs"):
        Renderer(folder)


def test_both_backends_give_the_same_answers(model, problems, tmp_path):
    ours = run(model, problems, tmp_path / "ours")
    theirs = run(model, problems, tmp_path / "theirs", backend="transformers")
    assert [(g.text, g.finish_reason) for g in ours] == [(g.text, g.finish_reason) for g in theirs]
    assert STOP in {g.finish_reason for g in ours} and len({g.text for g in ours}) > 3
    assert run(model, problems, tmp_path / "other", batch=1, reverse=True) == ours


def test_an_interrupted_run_goes_on_from_the_answers_that_are_kept(model, problems, tmp_path, monkeypatch):
    whole, folder = run(model, problems, tmp_path / "whole"), tmp_path / "stopped"
    add, asked = KeptAnswers.add, []

    def stop_at_the_sixth(self, index, generation):
        asked.append(index)
        if len(asked) == 6:
            raise KeyboardInterrupt
        add(self, index, generation)

    monkeypatch.setattr(KeptAnswers, "add", stop_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        run(model, problems, folder)
    with open(folder / "kept.jsonl", "a") as stream:
        stream.write('{"generation":{"te')  # what a kill leaves
    asked.clear()
    monkeypatch.setattr(KeptAnswers, "add", lambda *given: (asked.append(given[1]), add(*given)))
    assert run(model, problems, folder) == whole
    assert len(asked) == 13 - 5 and not (folder / "kept.jsonl").exists()


def test_kept_answers_of_other_settings_are_thrown_away(tmp_path):
    path = tmp_path / "kept.jsonl"
    kept = KeptAnswers(path, "one")
    kept.add(3, Generation("a\nb", STOP, 5))
    kept.add(4, Generation("", NOT_ASKED, fault="gone"))
    kept.finish()
    assert path.is_file()  # one is still to be asked
    assert KeptAnswers(path, "one").found == {3: Generation("a\nb", STOP, 5)}
    assert KeptAnswers(path, "two").found == {} and KeptAnswers(path, "one").found == {}
    path.write_text(canonical_json({"digest": "one"}) + "\nrubbish\n[1]\n")
    assert KeptAnswers(path, "one").found == {}


def test_a_kept_answer_that_was_changed_is_asked_again(tmp_path):
    path = tmp_path / "kept.jsonl"
    kept = KeptAnswers(path, "one")
    for index in range(3):
        kept.add(index, Generation(f"#### {index}", STOP, 5))
    text = path.read_text()
    for old, new in (("#### 1", "#### 7"), ('"tokens":5', '"tokenz":5'), ('"index":1', '"index":[]'), ("stop", "stap")):
        path.write_text(text.replace(old, new))
        assert 1 not in KeptAnswers(path, "one").found
    path.write_bytes(text.encode().replace(b"#### 2", b"#### \xff"))
    assert set(KeptAnswers(path, "one").found) == {0, 1}


def test_a_prompt_beyond_the_models_context_is_refused(model, problems, tmp_path):
    with pytest.raises(YardstickError, match="the longest prompt has .* ids, with max_new_tokens 1000 that is more"):
        run(model, problems, tmp_path / "long", max_new_tokens=1000)


def test_transformers_backend_refuses_logits_that_are_no_numbers():
    logits = torch.zeros(2, 5)
    assert require_finite(None, logits) is logits
    logits[1, 3] = float("nan")
    with pytest.raises(NotFiniteError, match="the logits of a batch of texts are not finite"):
        require_finite(None, logits)


def test_the_same_weights_have_no_flips(model, problems, tmp_path):
    """Golds are set to what the original answers in half of the problems, so that there is something to lose."""
    generations = run(model, problems, tmp_path / "reference")
    content = json.loads(problems.read_text())
    frame = pd.read_parquet(tmp_path / "reference/generations.parquet")
    for index, row in enumerate(content["problems"]):
        frame.loc[index, ["output", "finish_reason"]] = [f"{generations[index].text}\n#### {row['answer']}", STOP]
        if index % 2:
            frame.loc[index, "output"] = "no idea"
    frame.to_parquet(tmp_path / "reference/generations.parquet", index=False)
    pair = score(problems, tmp_path / "reference", tmp_path / "reference")["paired"]
    assert (pair["lost"], pair["gained"], pair["p"], pair["difference"]) == (0, 0, 1.0, 0.0)
    found = score(problems, tmp_path / "reference")
    assert found["gsm8k"]["counts"]["no_answer"] == 6 and found["gsm8k"]["asked"] == 13 and "paired" not in found
    answers = pd.read_parquet(tmp_path / "reference/answers.parquet")
    assert list(answers["category"]).count("no_answer") == 6
    assert {"prompt", "output", "finish_reason", "extracted", "gold", "question"} <= set(answers.columns)
    assert answers["extracted"][0] == content["problems"][0]["answer"]


def test_a_candidate_whose_logits_are_no_numbers_is_a_failed_row(model, problems, tmp_path, monkeypatch):
    from yardstick.gsm8k import decode
    from yardstick.models.generate import Model

    class Broken(Model):
        def __init__(self, *given):
            super().__init__(*given)
            self.gain = self.gain * float("inf")

    monkeypatch.setattr(decode, "Model", Broken)
    run(model, problems, tmp_path / "broken")
    monkeypatch.undo()
    run(model, problems, tmp_path / "reference")
    for name in ("broken", "reference"):
        found = score(problems, tmp_path / name, tmp_path / "reference" if name == "broken" else None)
        assert ("gsm8k" in found) == (name == "reference")
    (tmp_path / "m").symlink_to(tmp_path)
    output = tmp_path / "table.md"
    tabulate_answers.main(Namespace(recipe={"m": ["reference", "broken"]}, results=tmp_path, output=output))
    assert "| `broken` | **failed** | the logits after 0 ids of text 0 are not finite |" in output.read_text()


def test_problems_in_the_format_of_gsm8k_run_unchanged(model, tmp_path):
    rows = [
        {"question": f"What is {i} + {i}?", "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i:,}"}
        for i in range(495, 510)
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"problems": {"kind": "file", "path": str(path), "skip": 0}, "examples": 2}
    build_problems.main(Namespace(recipe=recipe, output=tmp_path / "problems.json"))
    run(model, tmp_path / "problems.json", tmp_path / "reference")
    score(tmp_path / "problems.json", tmp_path / "reference")
    answers = pd.read_parquet(tmp_path / "reference/answers.parquet")
    assert list(answers["gold"]) == [str(2 * i) for i in range(497, 510)]
    assert "What is 495 + 495?" in answers["prompt"][0] and "<<" not in answers["prompt"][0]


def test_too_few_problems_for_the_examples(tmp_path):
    recipe = {"problems": {"kind": "synthetic", "problems": 2, "seed": 1}, "examples": 2}
    with pytest.raises(YardstickError, match="2 problems leave none to ask beside 2 worked examples"):
        build_problems.main(Namespace(recipe=recipe, output=tmp_path / "problems.json"))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers every problem but those whose question holds a forbidden word."""

    forbidden, asked = None, []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        self.asked.append(question)
        if self.forbidden and question.startswith(self.forbidden):
            self.send_response(500)
            self.end_headers()
            return
        message = {"role": "assistant", "content": "That is\n#### 7"}
        reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 9}}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Handler.asked.clear()
    yield server
    server.shutdown()
    server.server_close()


def test_what_a_server_could_not_be_asked_is_asked_again_and_is_never_wrong(server, problems, tmp_path):
    questions = [problem["question"] for problem in json.loads(problems.read_text())["problems"]]
    Handler.forbidden = questions[4]
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    answer = {"answer": "hash", "max_new_tokens": 20, "server": {"base_url": url, "model": "x"}}
    arguments = Namespace(
        recipe={"model": "m", "answer": answer},
        connection={"concurrency": 3, "retries": 0, "timeout": 10},
        name="theirs",
        problems=problems,
        kept=tmp_path / "kept.jsonl",
        generations=tmp_path / "generations.parquet",
        output=tmp_path / "generation.json",
    )
    ask_server.main(arguments)
    found = score(problems, tmp_path)["gsm8k"]
    assert found["asked"] == 12 and found["problems"] == 13 and found["counts"]["not_asked"] == 1
    assert found["counts"]["wrong"] + found["counts"]["correct"] == 12
    assert len(Handler.asked) == 13
    Handler.forbidden = None
    ask_server.main(arguments)
    assert len(Handler.asked) == 14 and Handler.asked[-1].startswith(questions[4])
    assert score(problems, tmp_path)["gsm8k"]["asked"] == 13
    ask_server.main(arguments)  # such as with another timeout, which changes no answer
    assert len(Handler.asked) == 14
    assert json.loads(pd.read_parquet(tmp_path / "answers.parquet")["prompt"][0])[-1]["role"] == "user"
