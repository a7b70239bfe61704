r"""The final number of a generated answer, and what an answer counts as.

An answer is asked for in one of three forms: `\boxed{N}`, GSM8K's own last line `#### N`, or simply the last number. A
form that was not followed is "no answer", never the last number in its place. What is not plainly one decimal number
(a fraction, a power, a time of day, a list such as `1,2,3`) is no answer either: guessing at it would give a wrong
number that looks right. Words are not read: "1.5 million" is 1.5 and "minus three" is nothing.

Every regular expression here takes time linear in the text, whatever a model writes.
"""

import re
from collections import deque

from yardstick.gsm8k.generation import LENGTH, NOT_ASKED, STOP, Generation

FORMS = ("boxed", "hash", "last")
CORRECT, WRONG, NO_ANSWER, TRUNCATED = "correct", "wrong", "no_answer", "truncated"
CATEGORIES = (CORRECT, WRONG, NO_ANSWER, TRUNCATED, NOT_ASKED)

# a quantifier with a second + is possessive: it gives nothing back, so a long run is read once
MINUS = "\\-\u2212\u2013\ufe63\uff0d"  # hyphen, minus sign, en dash, and their small and wide forms
CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
THIN = "\u00a0\u2007\u2009\u202f"  # no-break and thin spaces; an ordinary space separates numbers
SEPARATOR = rf"(?:,(?:\\!)?|\{{,\}}|\\,|[{THIN}])"
RUN = rf"(?:(?<![\w.])\.)?[0-9]++(?:(?:{SEPARATOR}|\.)[0-9]++)*+"
ODD = r"\u00bc-\u00be\u2150-\u215f"  # one character that is a fraction
POWER = r"\u00b2\u00b3\u00b9\u2070-\u2079"
JOINT = (  # 1/2, 7:30, 10^3, 5**2, 1e5, 1_000, 1'234, and 12 000
    rf"(?: ?[/\u2044] ?\\?[{CURRENCY}]?|:|\^\{{?|\*\*|[eE][-+]?|\\?_|['\u2019]"
    r"|(?:\\[ ;:!]|[ ~])(?=[0-9]{3}(?![0-9])))"
)
NUMBER = re.compile(
    rf"(?<![0-9])(?<![A-Za-z]\^)(?<![A-Za-z]\^\{{)(?P<run>{RUN})(?P<odd>(?:{JOINT}{RUN})++|[{ODD}{POWER}])?|[{ODD}]"
)
WHOLE_NUMBER = re.compile(
    rf"(?P<first>[+{MINUS}]?+) ?(?:\\?[{CURRENCY}])?+(?P<second>[+{MINUS}]?+)(?P<run>{RUN})(?:\\?%)?+\.?"
)
PLAIN = re.compile(r"[0-9]*(?:\.[0-9]+)?")
GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?|[1-9][0-9]?(?:,[0-9]{2})+,[0-9]{3}(?:\.[0-9]+)?")

THOUGHT = re.compile(r"(</?think>)")
CALCULATOR = re.compile(r"<<[^<>\n]*+>>")  # GSM8K's own mark: "48/2 = <<48/2=24>>24"
NEXT_QUESTION = re.compile(r"\n[ \t*]*+(?:Question|Q|Problem|Human|User)[ \t]*+[0-9]*+[ \t*]*+:")
WORDS = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:bf|it|rm|sf)|mbox)[ ]*+\{([^{}]*+)\}(\^(?:[0-9]|\{[0-9]\}))?")
FRACTION = re.compile(r"\\[cdt]?frac\s*+(?:\{([^{}]*+)\}\s*+\{([^{}]*+)\}|([0-9])\s*+([0-9]))")
BRACES = re.compile(r"\\{1,2}boxed\s*+\{|\\.|[{}]", re.DOTALL)
HASH = re.compile(
    rf"(?<!#)#{{4,}}+[ \t*]*+"
    rf"(?:(?:the )?(?:final )?answer(?: is)?(?!\**+[ \t]++[{MINUS}][ \t])|(?-i:[A-Z]{{3}})(?= )"
    r"|(?P<label>[^\W\d_]{1,20}+(?: [^\W\d_]{1,20}+){0,2} ?[:=]))?+"
    rf"(?P<lead>(?:[ \t*_=:(\[{{`\"'~+\u2248{THIN}{CURRENCY}{MINUS}]|\\[(\[$]|\\boxed\{{)*+)",
    re.IGNORECASE,
)
NEXT_LINE = re.compile(rf"[\r\n]++[ \t*]*+({WHOLE_NUMBER.pattern})[ \t*]*+(?![^\r\n])")  # the number below "####"
HEADING = re.compile(  # "#### 2. Add them up", "#### 2 - Subtract" and "#### 2:" number a step
    rf"[.)]\**+[ \t]++[^\s*]|\**[ \t]?:|\**[ \t]++[{MINUS}\u2014][ \t]++[^\s0-9({CURRENCY}\\]"
)
BARE = re.compile(r"[.)]\**+[ \t]*+(?![^\r\n])")  # "#### 1." and nothing else numbers a step too, if more follows
LINE = re.compile(r"[^\n#]*+")
OPERATOR = re.compile(rf"[ \t]*+(?:[+*/x\u00d7\u00f7={MINUS}]|\\(?:times|cdot|div))[ \t]*+[(0-9{CURRENCY}\\]")
RELATION = re.compile("[|<>\u00b1\u221a\u2260\u2264\u2265]")
# what makes more of a number than its digits say: 5!, 2x, 2\pi, \sqrt{49}, A_1, x + 5, x - 5, -(5), {-}5
UNREAD = re.compile(
    rf"(?<=[0-9])[!A-Za-z\u03c0]|\\(?!(?:left|right|quad|qquad|circ|approx|boxed)(?![A-Za-z]))[A-Za-z]"
    rf"|(?<![A-Za-z])[A-Za-z]\s?[/(]\s?[0-9]|[0-9]\s?/\s?[A-Za-z](?![A-Za-z])|[A-Za-z_]\{{?[0-9]"
    rf"|(?!^)\+|[\w)}}]\s*+[{MINUS}]\s*+\\?[{CURRENCY}]?[0-9]|[{MINUS}]\s*+[({{}}]"
)


def canonical_number(text: str) -> str | None:
    """The one way to write the number that `text` is, so that equal numbers are equal texts; None if it is none.

    Thousands separators, currency, a percent sign, a final full stop, leading zeros and trailing zeros of decimals go;
    the sign stays, except of zero: "$1,080.50" is "1080.5" and "-0.0" is "0".
    """
    match = WHOLE_NUMBER.fullmatch(text.strip())
    if match is None or (match["first"] and match["second"]):
        return None
    return _canonical(match["run"], (match["first"] or match["second"]) not in ("", "+"))


def _canonical(run: str, negative: bool) -> str | None:
    plain = re.sub(SEPARATOR, ",", run)
    if not (PLAIN.fullmatch(plain) or GROUPED.fullmatch(plain)):
        return None
    whole, _, decimals = plain.replace(",", "").partition(".")
    number = (whole.lstrip("0") or "0") + ("." + decimals).rstrip("0").rstrip(".")
    return "-" + number if negative and number != "0" else number


def _is_negative(text: str, start: int) -> bool:
    """Is the minus before the number at `start` its sign? Not in "rows 3-5", "day-3" or "10 -3"."""
    head = re.sub(rf"\\?[{CURRENCY}]$", "", text[max(0, start - 32) : start])
    if not head or not re.match(f"[{MINUS}]", head[-1]):
        return False
    left = head[:-1].rstrip(" \t")
    if left and (left[-1].isdigit() or left[-1] in ")]}%"):
        return False
    touches = left == head[:-1]
    return not (touches and re.match(rf"[\w{MINUS}]", left[-1:]))


def _value(match: re.Match) -> str | None:
    if match["run"] is None or match["odd"]:
        return None
    return _canonical(match["run"], _is_negative(match.string, match.start()))


def _only_number(text: str) -> str | None:
    """The one number of `text`, or the one after its last equals sign; None where there are none or several."""
    text = re.sub(rf"^\s*+([{MINUS}])\s++", r"\1", text.rpartition("=")[2]).strip()
    if UNREAD.search(text) or RELATION.search(text):
        return None
    found = [match for match, _ in zip(NUMBER.finditer(text), range(2), strict=False)]
    return _value(found[0]) if len(found) == 1 else None


def _own_text(text: str) -> str:
    """The answer's own text: without `<think>` thoughts (all of it, if one is not closed) and what follows a next
    question. A thought may have been opened by the prompt, so that only its end is here."""
    kept, thinking = [], False
    for part in THOUGHT.split(text):
        if part == "<think>":
            thinking = True
        elif part == "</think>":
            if not thinking:
                kept.clear()
            thinking = False
        elif not thinking:
            kept.append(part)
    own = "" if thinking else "".join(kept)
    following = NEXT_QUESTION.search(own, len(own) - len(own.lstrip()))
    return own[: following.start()] if following else own


def _without_latex_words(text: str) -> str:
    r"""`\text{ cm}^2` is its words without the power, `\frac{a}{b}` is a/b."""

    def words(match: re.Match) -> str:
        inside, power = match[1], match[2] or ""
        return f" {inside} " if re.search("[A-Za-z]", inside) else inside + power

    text = WORDS.sub(words, text)
    return FRACTION.sub(lambda match: f" {match[1] or match[3]}/{match[2] or match[4]} ", text)


def _last_box(text: str) -> str | None:
    r"""What the last closed `\boxed{}` that is not empty holds."""
    if "boxed" not in text:
        return None
    stack, best = [], (-1, "")
    for token in BRACES.finditer(text):
        kind = token[0]
        if kind == "{":
            stack.append(-1)
        elif kind == "}":
            start = stack.pop() if stack else -1
            if start > best[0] and text[start : token.start()].strip():
                best = (start, text[start : token.start()])
        elif kind[-1] == "{" and "boxed" in kind:
            stack.append(token.end())
    return best[1] if best[0] >= 0 else None


def _first_hash(text: str) -> tuple[str | None, bool]:
    """The number after the first `####` that has one, and whether a later `####` could no longer change it.

    A numbered heading's number is none. "#### 1." alone is a heading only where its number is the next step's and
    another number follows: "#### 42." is an answer. A line with several numbers has none, but "5 + 3 = 8" has 8.
    """
    text, headings, alone = CALCULATOR.sub("", text), 0, None
    for mark in HASH.finditer(text):
        number = NUMBER.match(text, mark.end())
        if number is None and not mark["lead"].strip() and (below := NEXT_LINE.match(text, mark.end())):
            return canonical_number(below[1]), True
        if number is None or HEADING.match(text, number.end()):
            headings, alone = (headings, alone) if number is None else (headings + 1, None)
            continue
        signs = re.findall(f"[{MINUS}]", mark["lead"])
        odd = number["run"] is None or number["odd"] or len(signs) > 1
        value = None if odd else _canonical(number["run"], bool(signs))
        bare = BARE.match(text, number.end()) and "(" not in mark["lead"]
        if bare and value == str(headings + 1):
            headings, alone = headings + 1, None if headings else value
            continue
        line = LINE.match(text, number.start())[0]
        if mark["label"] and re.search("[A-Za-z]", line):  # "#### First: 5 apples each"
            continue
        if not odd and OPERATOR.match(text, number.end()):
            return _only_number(mark["lead"] + line), True
        several = len([found for found, _ in zip(NUMBER.finditer(line), range(2), strict=False)]) > 1
        return (None if several or UNREAD.search(line) else value), True
    return alone, False


def extract_answer(text: str, form: str) -> str | None:
    r"""The final number of a generated text, canonical; None where `form` was not followed.

    Args:
        text: what the model wrote. Thoughts in <think> are not read, nor what follows a next "Question:".
        form: "boxed": the last `\boxed{}`, which must hold one number (units and words may stand with it);
            "hash": the first `####` with a number alone on its line (words may stand with it) or on the next line;
            headings such as "#### 72: the total" have none; "last": the last number.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r} is none of {', '.join(FORMS)}")
    plain = _without_latex_words(_own_text(text))
    if form == "hash":
        return _first_hash(plain)[0]
    if form == "boxed":
        inside = _last_box(plain)
        return None if inside is None else _only_number(inside)
    last = deque(NUMBER.finditer(plain), maxlen=1)
    return _value(last[0]) if last else None


def is_complete(text: str, form: str) -> bool:
    """Whether nothing that may follow can change the answer: the line of the first `####` with a number is ended.

    In the other forms the last answer counts, so that only the end of the text ends it. A thought that the prompt
    opened cannot be seen before its `</think>`: prompts are to be rendered with thinking off.
    """
    lines = text[: text.rfind("\n") + 1] if form == "hash" else ""
    answer, settled = _first_hash(_without_latex_words(_own_text(lines)))
    return settled and answer is not None


def cut_when_complete(text: str, form: str) -> str | None:
    """The text up to the end of the line that makes the answer complete; None where it is not."""
    ends = (end for end, letter in enumerate(text, 1) if letter == "\n")
    return next((text[:end] for end in ends if is_complete(text[:end], form)), None)


def cut_at_stops(text: str, stops: list[str]) -> str:
    """`text` before the first of any of the stop strings. An empty one stops nothing."""
    found = [text.find(stop) for stop in stops if stop]
    return text[: min((at for at in found if at >= 0), default=len(text))]


def judge(generation: Generation, gold: str, form: str) -> tuple[str, str | None]:
    """The category of an answer, and the number that was read from it.

    An answer that ran into the token limit is truncated, unless it was complete before, and a problem that was not
    asked is never wrong.

    Raises:
        ValueError: `gold` is not canonical (every answer would be wrong), or the generation ended in an unknown way.
    """
    if canonical_number(gold) != gold:
        raise ValueError(f"the gold answer {gold!r} is not a canonical number")
    if generation.finish_reason == NOT_ASKED:
        return NOT_ASKED, None
    extracted = extract_answer(generation.text, form)
    if generation.finish_reason == LENGTH and not is_complete(generation.text, form):
        return TRUNCATED, extracted
    if generation.finish_reason not in (STOP, LENGTH):
        raise ValueError(f"finish reason {generation.finish_reason!r} is not known")
    if extracted is None:
        return NO_ANSWER, None
    return (CORRECT if extracted == gold else WRONG), extracted
