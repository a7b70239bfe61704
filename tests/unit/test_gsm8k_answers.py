import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yardstick.gsm8k.answers import (
    CORRECT,
    FORMS,
    NO_ANSWER,
    TRUNCATED,
    WRONG,
    canonical_number,
    cut_at_stops,
    cut_when_complete,
    extract_answer,
    is_complete,
    judge,
)
from yardstick.gsm8k.generation import LENGTH, NOT_ASKED, STOP, Generation


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        (" 1,080 ", "1080"),
        ("109,200,000", "109200000"),
        ("1,00,000", "100000"),  # lakh
        ("12\u202f345\u202f678", "12345678"),
        ("1{,}200", "1200"),
        ("1,\\!200", "1200"),
        ("$18.00", "18"),
        ("\\$18.50", "18.5"),
        ("25%", "25"),
        ("25\\%.", "25"),
        ("007", "7"),
        ("100", "100"),
        ("-0.0", "0"),
        ("0", "0"),
        (".5", "0.5"),
        ("-3", "-3"),
        ("\u22123", "-3"),
        ("-$3", "-3"),
        ("$-3", "-3"),
        ("--3", None),
        ("+-3", None),
        ("+5", "5"),
        ("- 10", "-10"),
        ("1/2", None),
        ("1,2,3", None),
        ("1,2", None),
        ("0,123", None),  # a decimal comma or a group: not guessed
        ("1.200.000", None),
        ("12 apples", None),
        ("1 200", None),
        (",", None),
        ("", None),
    ],
)
def test_one_way_to_write_a_number(text, number):
    assert canonical_number(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The total is 72 clips, altogether.", "72"),
        ("It is -3.", "-3"),
        ("rows 3-5", "5"),
        ("rows 3 -5", "5"),
        ("rows 3\u20135", "5"),
        ("day-3", "3"),
        ("x = -3", "-3"),
        ("(-3)", "-3"),
        ("He pays -$1,234.50 then", "-1234.5"),
        ("from $3-$5", "5"),
        ("Options:\n- 5 apples", "5"),
        ("48/2 = 24", "24"),
        ("It is half, 1/2", None),
        ("It is \\frac{1}{2}", None),
        ("It is \\dfrac12", None),
        ("It is 7\u00bd", None),
        ("the number is 10^3", None),
        ("the number is 1e5", None),
        ("at 7:30", None),
        ("the days 1,2,3", None),
        ("Step 1: 5", "5"),
        ("an area of 50 m^2", "50"),
        ("an area of 50 \\text{ cm}^{2}", "50"),
        ("an area of 50 m\u00b2", "50"),
        ("**1,080** coins", "1080"),
        ("It is 72.", "72"),
        ("It is 72!", "72"),
        ("It is 12 000", None),
        ("It is 12\\ 000", None),
        ("It is 1'234", None),
        ("It is 1_000.", None),
        ("It is 5**2", None),
        ("in 2010, 100 men", "100"),
        ("It is 42.\nHuman: 7", "42"),
        ("It is 42.\nUser: 7", "42"),
        ("It is 42.\n**Problem 2:** 7", "42"),
        ("nothing, at all.", None),
    ],
)
def test_last_number(text, answer):
    assert extract_answer(text, "last") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 42\nQuestion: x\n#### 7", "42"),
        ("#### 42\n\nAnother one.\n#### 7", "42"),
        ("####42", "42"),
        ("#### -3", "-3"),
        ("#### - 3", "-3"),
        ("#### -$1,080.00 left", "-1080"),
        ("#### **42** apples", "42"),
        ("#### $\\boxed{42}$", "42"),
        ("#### The final answer is: 42", "42"),
        ("#### 5 + 3 = 8", "8"),
        ("#### 20 - 30 minutes", None),
        ("#### 1/2\n#### 7", None),
        ("#### \n#### 7", "7"),
        ("#### 1. Count the boxes\n3 + 4\n#### 7", "7"),
        ("### 7", None),
        ("####\n42", "42"),
        ("####\n\n**42**\nso", "42"),
        ("####\n7 boxes\n#### 42", "42"),
        ("#### 1 1/2", None),
        ("#### 2 1/2 hours", None),
        ("#### 7 hours 30 minutes", None),
        ("#### $1 000", None),
        ("#### 1'234", None),
        ("#### 1_000", None),
        ("#### 1: First step\n#### 42", "42"),
        ("#### 2 - Subtract\n#### 42", "42"),
        ("#### 1. $5 each\n#### 42", "42"),
        ("#### 1.\n#### 42", "42"),
        ("#### 1.\n#### 2.\n#### 42", "42"),
        ("#### 1.\n#### 2.\n", None),
        ("#### First: 5 apples each\n#### 42", "42"),
        ("#### 1.", "1"),
        ("#### 42.", "42"),
        ("#### 42\n#### 7", "42"),
        ("#### 42.\n#### 7", "42"),
        ("#### 72: the total", None),
        ("#### 5**2", None),
        ("#### 5!", None),
        ("#### 2x", None),
        ("#### Answer - 42", None),
        ("#### --42", None),
        ("#### `42`", "42"),
        ('#### "42"', "42"),
        ("#### [42]", "42"),
        ("#### {42}", "42"),
        ("#### (42)", "42"),
        ("#### x = 42", "42"),
        ("#### x = -42", "-42"),
        ("#### Total: 42", "42"),
        ("#### USD 5", "5"),
        ("#### $5/hour", "5"),
        ("#### +5", "5"),
        ("#### <<40+2=42>>42", "42"),
        ("#### 42 m^2", "42"),
        ("#### 2 \u2014 Subtract\n#### 42", "42"),
        ("#### 1.\r\n#### 42\r\n", "42"),
        ("####\r\n42\r\n", "42"),
        ("#### 42 #### 7", "42"),
        ("#### \\(42\\)", "42"),
        ("#### 3 \\times 14 = 42", "42"),
        ("#### 10-20", None),
        ("#### 18 + tip", None),
        ("#### 42<|im_end|>", "42"),
        ("The answer is 7.", None),
    ],
)
def test_first_number_after_hashes(text, answer):
    assert extract_answer(text, "hash") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{42}.", "42"),
        ("\\boxed{41} no, \\boxed{42}", "42"),
        ("\\boxed{42}\nQuestion: x\n\\boxed{7}", "42"),
        ("\\boxed{\\$1{,}200}", "1200"),
        ("\\boxed{42 \\text{ cm}^2}", "42"),
        ("\\boxed{42\\text{ m}^{2}}", "42"),
        ("\\boxed{\\text{72 clips}}", "72"),
        ("\\boxed{\\text{\\$}42.50}", "42.5"),
        ("\\boxed{\\textbf{42}}", "42"),
        ("\\boxed{\\boxed{42}}", "42"),
        ("\\boxed{{4}2}", None),  # two runs of digits: not guessed
        ("\\boxed{x = -3}", "-3"),
        ("\\boxed{- \\$3}", "-3"),
        ("\\boxed{5 + 3 = 8}", "8"),
        ("\\boxed{25\\%}", "25"),
        ("\\boxed {42}", "42"),
        ("\\\\boxed{42}", "42"),
        ("\\boxed{42} goes into \\boxed{}", "42"),
        ("\\boxed{\\frac{10}{4}}", None),
        ("\\boxed{5, 6}", None),
        ("\\boxed{1_000}", None),
        ("\\boxed{1'234}", None),
        ("\\boxed{12 000}", None),
        ("\\boxed{\\sqrt{49}}", None),
        ("\\boxed{4!}", None),
        ("\\boxed{2x}", None),
        ("\\boxed{2\\pi}", None),
        ("\\boxed{\\log 100}", None),
        ("\\boxed{\\lfloor 3.7\\rfloor}", None),
        ("\\boxed{A_1}", None),
        ("\\boxed{|-5|}", None),
        ("\\boxed{x + 5}", None),
        ("\\boxed{x/2}", None),
        ("\\boxed{2/x}", None),
        ("\\boxed{f(3)}", None),
        ("\\boxed{f(3) = 9}", "9"),
        ("\\boxed{x \u2265 5}", None),
        ("\\boxed{2\u03c0}", None),
        ("\\boxed{42^\\circ}", "42"),
        ("\\boxed{x - 5}", None),
        ("\\boxed{-(5)}", None),
        ("\\boxed{{-}5}", None),
        ("\\boxed{\\left(42\\right)}", "42"),
        ("\\boxed{60 \\text{ km/h}}", "60"),
        ("\\boxed{7 \\text{ hours } 30 \\text{ minutes}}", None),
        ("72 \\boxed{\\text{yes}}", None),
        ("\\boxed{42", None),
        ("The answer is 42.", None),
    ],
)
def test_last_box(text, answer):
    assert extract_answer(text, "boxed") == answer


@pytest.mark.parametrize("form", FORMS)
def test_a_thought_is_not_an_answer(form):
    def write(number):
        return {"boxed": f"\\boxed{{{number}}}", "hash": f"#### {number}", "last": f"{number}"}[form] + "\n"

    assert extract_answer(f"<think>{write(7)}</think>{write(42)}", form) == "42"
    assert extract_answer(f"{write(7)}</think>{write(42)}", form) == "42"  # the prompt opened it
    assert extract_answer(f"{write(42)}<think>{write(7)}</think>", form) == "42"
    assert extract_answer(f"<think>{write(7)}", form) is None
    assert extract_answer(f"{write(42)}<think>{write(7)}", form) is None
    assert extract_answer(f"<think>{write(7)}</think>", form) is None


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="form 'Boxed' is none of boxed, hash, last"):
        extract_answer("7", "Boxed")


def write_in(form: str, number: str) -> str:
    return {
        "boxed": f"first 12, then \\boxed{{{number}}}.",
        "hash": f"first 12.\n#### {number}\n\nNext: 99\n#### 98",
        "last": f"first 12, then {number}.",
    }[form]


@settings(deadline=None)
@given(st.integers(-(10**15), 10**15), st.sampled_from(FORMS), st.sampled_from(["{}", "${}", "{}.00", "{}%", "{} men"]))
def test_any_integer_with_commas_comes_back(value, form, around):
    assert extract_answer(write_in(form, around.format(f"{value:,}")), form) == str(value)


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(1, 9999), st.sampled_from(FORMS))
def test_any_decimal_comes_back(whole, decimals, form):
    expected = f"{whole}.{decimals:04}".rstrip("0") if whole else f"0.{decimals:04}".rstrip("0")
    assert extract_answer(write_in(form, f"{whole:,}.{decimals:04}"), form) == expected


PIECES = ["\\boxed{", "}", "{", "####", " ", "1", ",", "23", ".", "-", "$", "<think>", "</think>", "\n", "Question:"]
PIECES += ["\\text{", "\\frac{", "^", "/", ":", "e", "\\", "%", "\u00bd", "\u2009", "Q", "answer", "=", "\u0663"]
RAGS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), RAGS), st.sampled_from(FORMS))
def test_any_text_gives_a_canonical_number_or_none(text, form):
    answer = extract_answer(text, form)
    assert answer is None or canonical_number(answer) == answer


LINES = ["#### 1.", "#### 2.", "#### 42", "#### 1: x", "####", "7", "#### x = 5", "#### 1/2", "Question: 3", "so 5", ""]


@settings(deadline=None)
@given(*[st.lists(st.one_of(st.sampled_from(LINES), RAGS), max_size=4).map("\n".join)] * 2)
def test_nothing_that_follows_changes_a_complete_answer(text, more):
    if is_complete(text + "\n", "hash") and "think" not in more:
        answer = extract_answer(text + "\n", "hash")
        assert answer is not None and extract_answer(text + "\n" + more, "hash") == answer


@settings(deadline=None)
@given(RAGS, st.lists(st.sampled_from(["\n", "Question:", "12", "}", "", "zz"]), max_size=4))
def test_nothing_is_kept_from_a_stop_on(text, stops):
    kept = cut_at_stops(text, stops)
    assert text.startswith(kept)
    assert not any(stop in kept for stop in stops if stop)
    if kept != text:  # and no more is cut than that
        assert any(text.startswith(stop, len(kept)) for stop in stops if stop)


def test_cut_before_the_first_of_several_stops():
    assert cut_at_stops("ab\n\nQuestion: c</s>", ["</s>", "Question:", "\n\n"]) == "ab"
    assert cut_at_stops("ab", []) == "ab"
    assert cut_at_stops("ab", [""]) == "ab"


LONG = [(piece, 500_000) for piece in (",", "1", "{", "}", "#")]
PARTS = ["\\boxed{", "#### ", "1,", "1/", "1e", "<think>", "\\text{", "\\frac{1}{", " ", "\\", "#### (", "\n "]
PARTS += ["#### 1: ", "#### 1: x\n", "####\n", "#### a = ", "#### a: 1 b ", "#### a: 1 b\n", "1 000 ", "<<1", "- "]
LONG += [(piece, 100_000) for piece in PARTS]


@pytest.mark.parametrize(("piece", "length"), LONG)
def test_time_is_linear_in_the_text(piece, length):
    """A quadratic expression would take minutes; these take tenths of a second."""
    for start in ("", "\\boxed{#### "):
        text = start + piece * (length // len(piece))
        for form in FORMS:
            begin = time.process_time()
            extract_answer(text, form)
            assert time.process_time() - begin < 2, (start, form)
        begin = time.process_time()
        canonical_number(text)
        assert time.process_time() - begin < 2, start


def test_categories():
    def category(text, finish=STOP, gold="42", form="hash"):
        return judge(Generation(text, finish), gold, form)

    assert category("#### 42.00") == (CORRECT, "42")
    assert category("#### -42") == (WRONG, "-42")
    assert category("#### -3", gold="-3") == (CORRECT, "-3")
    assert category("#### 3", gold="-3") == (WRONG, "3")
    assert category("It is 42.") == (NO_ANSWER, None)
    assert category("It is 42.", form="last") == (CORRECT, "42")
    assert category("#### 42", LENGTH) == (TRUNCATED, "42")  # it may have been going to be 425
    assert category("#### 42\nand so", LENGTH) == (CORRECT, "42")  # a run-on changes nothing: the first one counts
    assert category("It is", LENGTH) == (TRUNCATED, None)
    assert category("", NOT_ASKED) == (NOT_ASKED, None)


def test_what_makes_an_answer_complete():
    text = "#### x\nso\n#### 4\n#### 5\n"
    assert cut_when_complete(text, "hash") == "#### x\nso\n#### 4\n"
    assert is_complete(text, "hash") and not is_complete("#### 4", "hash") and not is_complete("4\n", "hash")
    assert not is_complete("#### 1.\n", "hash") and is_complete("#### 1.\n#### 4\n", "hash")
    assert is_complete("####\n4\n", "hash") and not is_complete("####\n4", "hash")
    assert cut_when_complete("#### 4", "hash") is None and cut_when_complete("\\boxed{4}\n", "boxed") is None


def test_a_gold_answer_that_nothing_equals_is_refused():
    with pytest.raises(ValueError, match="gold answer '1,080' is not a canonical number"):
        judge(Generation("#### 1080", STOP), "1,080", "hash")
    with pytest.raises(ValueError, match="finish reason 'eos' is not known"):
        judge(Generation("#### 1080", "eos"), "1080", "hash")
