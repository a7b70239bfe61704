import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from tests.tiny import tiny_tokenizer
from yardstick.corpora.arithmetic import word_problems
from yardstick.corpora.manifest import build_windows, ids_sha256, require_same
from yardstick.corpora.texts import decode, keep_between, load_text
from yardstick.corpora.windows import bos_id, cut_sequences, cut_windows, find_shared_window
from yardstick.errors import YardstickError
from yardstick.files import write_json


def test_every_token_of_contiguous_windows_is_predicted_once():
    ids = np.arange(13)
    windows = cut_windows(ids, 3, 4, None, "t")
    assert windows[:, 1:].ravel().tolist() == list(range(1, 13))
    assert windows[:, :-1].ravel().tolist() == list(range(0, 12))


def test_windows_with_bos_begin_with_exactly_one():
    windows = cut_windows(np.arange(10, 22), 3, 4, 1, "t")
    assert windows[:, 0].tolist() == [1, 1, 1]
    assert windows[:, 1:].ravel().tolist() == list(range(10, 22))


def test_spread_windows_reach_from_start_to_end_and_do_not_overlap_more_than_one_id():
    windows = cut_windows(np.arange(100), 3, 20, None, "t", spread=True)
    assert windows[0, 0] == 0 and windows[-1, -1] == 99
    tight = cut_windows(np.arange(61), 3, 20, None, "t", spread=True)
    assert tight[:, 0].tolist() == [0, 20, 40]


def test_too_little_text_is_an_error_with_both_counts():
    with pytest.raises(YardstickError, match="corpus prose: has 12 tokens, 3 windows of 4 need 13"):
        cut_windows(np.arange(12), 3, 4, None, "prose")
    with pytest.raises(YardstickError, match="has 30 tokens, 8 sequences of 4 need 32"):
        cut_sequences(np.arange(30), 8, 4, None, "prose")


def test_bos_is_what_the_tokenizer_itself_adds():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1}, merges=[]))
    assert bos_id(tokenizer) is None
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert bos_id(tokenizer) == 1


def test_shared_windows_are_found_at_any_offset():
    rng = np.random.default_rng(0)
    evaluation, calibration = rng.integers(0, 9, (3, 200)), rng.integers(0, 9, (4, 150))
    assert find_shared_window(evaluation, calibration) is None
    calibration[2, 31:95] = evaluation[1, 100:164]
    assert find_shared_window(evaluation, calibration) == (1, 2)
    calibration[2, 31] += 1  # 63 equal ids are not 64
    assert find_shared_window(evaluation, calibration) is None


def test_worked_solutions_are_right():
    problems = word_problems(500, seed=4)
    for problem in problems:
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (-?\d+)", problem.solution)
        assert steps
        for left, operator, right, result in steps:
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[operator]
            assert value(int(left), int(right)) == int(result)
        assert int(steps[-1][3]) == problem.answer
        assert problem.text.endswith(f"#### {problem.answer}")
    assert word_problems(500, seed=4) == problems != word_problems(500, seed=5)
    assert len({p.question for p in problems}) > 490


def test_markers_and_line_ends():
    text = decode(b"\xef\xbb\xbfhead\r\n*** START x\r\nkept\r\nalso\r\n*** END\r\ntail", "t")
    assert keep_between(text, "*** START", "*** END", "t") == "kept\nalso\n"
    with pytest.raises(YardstickError, match="t: no line begins with 'NOPE'"):
        keep_between(text, "NOPE", "*** END", "t")
    with pytest.raises(YardstickError, match="bad: not UTF-8"):
        decode(b"\xff\xfe\x00a", "bad")


def test_a_changed_text_is_named(tmp_path):
    (tmp_path / "t.txt").write_text("hello")
    source = {"kind": "file", "path": str(tmp_path / "t.txt"), "text_sha256": "0" * 64}
    with pytest.raises(YardstickError, match="corpus prose: the text of t.txt has sha256 2cf24dba"):
        load_text("prose", source, tmp_path)
    with pytest.raises(YardstickError, match="no-such.txt: no such file"):
        load_text("prose", {"kind": "file", "path": "no-such.txt"}, tmp_path)
    with pytest.raises(YardstickError, match="package torch has version .*, the corpus is pinned to 0.1"):
        load_text("code", {"kind": "package", "package": "torch", "version": "0.1", "files": ["torch/*.py"]}, tmp_path)


def recipe(evaluation_seed, calibration_seed):
    def text(key, seed):
        return {key: 2, "spread": True, "licence": "MIT", "source": {"kind": "synthetic", "problems": 40, "seed": seed}}

    return {
        "evaluation": {"length": 128, "texts": {"math": text("chunks", evaluation_seed)}},
        "calibration": {"length": 128, "texts": {"math": text("sequences", calibration_seed)}},
    }


def test_evaluation_text_that_was_calibrated_on_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    with pytest.raises(YardstickError, match="evaluation.math row 0 and calibration.math row 0 share a run of 64"):
        build_windows(recipe(1, 1), tokenizer, tmp_path)
    build_windows(recipe(1, 2), tokenizer, tmp_path)


def test_a_pin_says_which_corpus_changed_and_how(tmp_path):
    tokenizer = tiny_tokenizer()
    chunks, _, manifest = build_windows(recipe(1, 2), tokenizer, tmp_path)
    assert manifest["evaluation"]["math"]["ids_sha256"] == ids_sha256(chunks["math"])
    write_json(tmp_path / "pin.json", manifest)
    require_same(manifest, tmp_path / "pin.json")
    _, _, other = build_windows(recipe(3, 2), tokenizer, tmp_path)
    with pytest.raises(YardstickError, match="evaluation.math .*origin is arithmetic word problems, seed 3, .*seed 1"):
        require_same(other, tmp_path / "pin.json")


def test_text_of_the_models_own_is_no_part_of_a_pin(tmp_path):
    tokenizer, own = tiny_tokenizer(), recipe(1, 2)
    own["evaluation"]["texts"]["own"] = {
        "chunks": 2,
        "licence": "MIT",
        "spread": True,
        "source": {"kind": "generated", "seed": 7, "start": None},
    }
    rows = np.arange(2 * 129, dtype=np.int32).reshape(2, 129)
    chunks, _, manifest = build_windows(own, tokenizer, tmp_path, {"own": rows})
    entry = manifest["evaluation"]["own"]
    assert (chunks["own"] == rows).all() and entry["ids_sha256"] == ids_sha256(rows) and entry["tokens"] == 258
    assert entry["origin"] == "written by the model itself, seed 7"
    write_json(tmp_path / "pin.json", manifest)
    other = build_windows(own, tokenizer, tmp_path, {"own": rows[::-1].copy()})[2]
    assert other["evaluation"]["own"]["ids_sha256"] != entry["ids_sha256"]
    require_same(other, tmp_path / "pin.json")  # another machine's arithmetic may draw another text
    require_same(build_windows(recipe(1, 2), tokenizer, tmp_path)[2], tmp_path / "pin.json")
