"""A seeded generator of worded arithmetic with worked solutions that end in `#### N`.

`word_problems` makes text to measure distributions on, `task_problems` short problems with small numbers to be
answered. Templates are our own. Every step of a solution is a product, a quotient, a sum or a difference that is
computed, not written down, and the last one is the answer.
"""

import random
from dataclasses import dataclass

from yardstick.errors import YardstickError

# fmt: off
NAMES = [
    "Amara", "Bela", "Chidi", "Dora", "Emeka", "Farah", "Goran", "Hilda", "Ines", "Jonas", "Kofi", "Lena",
    "Milan", "Nadia", "Oskar", "Priya", "Quinn", "Rosa", "Samir", "Tomas", "Uma", "Viktor", "Wanda", "Yusuf",
    "Zora",
]
GOODS = [
    "apple", "book", "candle", "drum", "egg", "feather", "glove", "hat", "jar", "kite", "lamp", "mug", "needle",
    "onion", "pencil", "quilt", "ribbon", "spoon", "ticket", "vase",
]
# fmt: on
PLACES = ["market", "bakery", "harbour", "library", "garden", "workshop", "school", "museum", "station", "farm"]
BOXES = ["box", "crate", "basket", "bag", "shelf", "drawer", "tray", "sack"]
PLURALS = {"box": "boxes", "shelf": "shelves"}


@dataclass(frozen=True)
class WordProblem:
    """A question, its worked solution and the number it ends in."""

    question: str
    solution: str
    answer: int

    @property
    def worked(self) -> str:
        """The solution with the answer as GSM8K writes it."""
        return f"{self.solution}\n#### {self.answer}"

    @property
    def text(self) -> str:
        return f"Question: {self.question}\nAnswer: {self.worked}"


def plural(noun: str) -> str:
    return PLURALS.get(noun, noun + "s")


def _step(left: int, operator: str, right: int) -> tuple[str, int]:
    """The worked step `left operator right = result`, and the result."""
    value = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
    assert operator != "/" or left % right == 0
    return f"{left} {operator} {right} = {value}", value


def _packing(rng: random.Random) -> WordProblem:
    who, place, good, box = rng.choice(NAMES), rng.choice(PLACES), rng.choice(GOODS), rng.choice(BOXES)
    boxes, each = rng.randint(3, 24), rng.randint(4, 36)
    lost = rng.randint(1, each * 2)
    first, total = _step(boxes, "*", each)
    second, left = _step(total, "-", lost)
    return WordProblem(
        f"At the {place}, {who} fills {boxes} {plural(box)} with {each} {plural(good)} each. Later {lost} of the "
        f"{plural(good)} are given away. How many {plural(good)} are left?",
        f"The {plural(box)} hold {first} {plural(good)} at first.\nAfter {lost} are given away, {second} are left.",
        left,
    )


def _shopping(rng: random.Random) -> WordProblem:
    who, good, other = rng.choice(NAMES), *rng.sample(GOODS, 2)
    count, price, count2, price2 = (rng.randint(2, 15) for _ in range(4))
    first, cost = _step(count, "*", price)
    second, cost2 = _step(count2, "*", price2)
    third, total = _step(cost, "+", cost2)
    return WordProblem(
        f"{who} buys {count} {plural(good)} at {price} coins each and {count2} {plural(other)} at {price2} coins each. "
        "How many coins does that cost in all?",
        f"The {plural(good)} cost {first} coins.\nThe {plural(other)} cost {second} coins.\n"
        f"Together that makes {third} coins.",
        total,
    )


def _sharing(rng: random.Random) -> WordProblem:
    who, friend, good = *rng.sample(NAMES, 2), rng.choice(GOODS)
    people, each, own = rng.randint(2, 12), rng.randint(3, 30), rng.randint(1, 40)
    pile = people * each
    first, found = _step(pile, "/", people)
    second, total = _step(found, "+", own)
    return WordProblem(
        f"{friend} shares {pile} {plural(good)} equally among {people} people, and {who} is one of them. {who} already "
        f"had {own}. How many {plural(good)} does {who} have now?",
        f"Each person gets {first} {plural(good)}.\nWith the {own} from before, {who} has {second} {plural(good)}.",
        total,
    )


def _walking(rng: random.Random) -> WordProblem:
    who, place, other = rng.choice(NAMES), *rng.sample(PLACES, 2)
    days, out, extra = rng.randint(3, 14), rng.randint(2, 19), rng.randint(1, 25)
    first, there_and_back = _step(out, "*", 2)
    second, total = _step(there_and_back, "*", days)
    third, final = _step(total, "+", extra)
    return WordProblem(
        f"The {place} is {out} kilometres from the {other}. {who} goes there and back on each of {days} days, and "
        f"walks {extra} kilometres more on the last evening. How many kilometres is that altogether?",
        f"One trip there and back is {first} kilometres.\nOver {days} days that is {second} kilometres.\n"
        f"With the last evening it is {third} kilometres.",
        final,
    )


def _comparing(rng: random.Random) -> WordProblem:
    who, friend, good = *rng.sample(NAMES, 2), rng.choice(GOODS)
    base, factor = rng.randint(3, 48), rng.randint(2, 9)
    first, more = _step(base, "*", factor)
    second, difference = _step(more, "-", base)
    return WordProblem(
        f"{who} has {base} {plural(good)}. {friend} has {factor} times as many. How many more {plural(good)} does "
        f"{friend} have than {who}?",
        f"{friend} has {first} {plural(good)}.\nThe difference is {second} {plural(good)}.",
        difference,
    )


TEMPLATES = (_packing, _shopping, _sharing, _walking, _comparing)


def word_problems(count: int, seed: int) -> list[WordProblem]:
    """`count` problems, a fixed function of the seed (Python's Mersenne Twister)."""
    rng = random.Random(f"yardstick-arithmetic-{seed}")
    return [rng.choice(TEMPLATES)(rng) for _ in range(count)]


def _finding(rng: random.Random) -> WordProblem:
    who, place, good = rng.choice(NAMES), rng.choice(PLACES), rng.choice(GOODS)
    had, found = rng.randint(2, 10), rng.randint(1, 9)
    step, total = _step(had, "+", found)
    return WordProblem(
        f"{who} has {had} {plural(good)} and finds {found} more at the {place}. How many {plural(good)} does {who} "
        "have now?",
        f"{who} has {step} {plural(good)} now.",
        total,
    )


def _giving(rng: random.Random) -> WordProblem:
    who, friend, good = *rng.sample(NAMES, 2), rng.choice(GOODS)
    given, left = rng.randint(1, 9), rng.randint(2, 10)
    step, rest = _step(given + left, "-", given)
    return WordProblem(
        f"{who} has {given + left} {plural(good)} and gives {given} of them to {friend}. How many {plural(good)} does "
        f"{who} have left?",
        f"{who} has {step} {plural(good)} left.",
        rest,
    )


def _filling(rng: random.Random) -> WordProblem:
    who, good, box = rng.choice(NAMES), rng.choice(GOODS), rng.choice(BOXES)
    boxes, each = rng.randint(2, 5), rng.randint(2, 10)
    step, total = _step(boxes, "*", each)
    return WordProblem(
        f"{who} fills {boxes} {plural(box)} with {each} {plural(good)} each. How many {plural(good)} is that in all?",
        f"The {plural(box)} hold {step} {plural(good)}.",
        total,
    )


def _dealing(rng: random.Random) -> WordProblem:
    who, good = rng.choice(NAMES), rng.choice(GOODS)
    friends, each = rng.randint(2, 5), rng.randint(2, 10)
    step, share = _step(friends * each, "/", friends)
    return WordProblem(
        f"{who} shares {friends * each} {plural(good)} equally among {friends} friends. How many {plural(good)} does "
        "each friend get?",
        f"Each friend gets {step} {plural(good)}.",
        share,
    )


def _spending(rng: random.Random) -> WordProblem:
    who, good = rng.choice(NAMES), rng.choice(GOODS)
    count, price, left = rng.randint(2, 4), rng.randint(2, 5), rng.randint(2, 9)
    first, cost = _step(count, "*", price)
    second, rest = _step(cost + left, "-", cost)
    return WordProblem(
        f"{who} has {cost + left} coins and buys {count} {plural(good)} at {price} coins each. How many coins does "
        f"{who} have left?",
        f"The {plural(good)} cost {first} coins.\n{who} has {second} coins left.",
        rest,
    )


def _earning(rng: random.Random) -> WordProblem:
    who, place = rng.choice(NAMES), rng.choice(PLACES)
    days, pay, extra = rng.randint(2, 5), rng.randint(2, 10), rng.randint(1, 9)
    first, wages = _step(days, "*", pay)
    second, total = _step(wages, "+", extra)
    return WordProblem(
        f"{who} works at the {place} for {days} days and earns {pay} coins a day. After that {who} gets {extra} coins "
        f"as a gift. How many coins does {who} get in all?",
        f"For the work {who} gets {first} coins.\nWith the gift that makes {second} coins.",
        total,
    )


def _losing(rng: random.Random) -> WordProblem:
    who, good, box = rng.choice(NAMES), rng.choice(GOODS), rng.choice(BOXES)
    boxes, each, broken = rng.randint(2, 4), rng.randint(2, 5), rng.randint(2, 4)
    first, whole = _step(boxes * each + broken, "-", broken)
    second, share = _step(whole, "/", boxes)
    return WordProblem(
        f"{who} has {boxes * each + broken} {plural(good)}. {broken} of them are broken and thrown away. {who} puts "
        f"the others equally into {boxes} {plural(box)}. How many {plural(good)} are there for each {box}?",
        f"After the broken ones are gone, {first} {plural(good)} are left.\nThere are {second} {plural(good)} for each "
        f"{box}.",
        share,
    )


def _joining(rng: random.Random) -> WordProblem:
    who, friend, good = *rng.sample(NAMES, 2), rng.choice(GOODS)
    own, more = rng.randint(2, 10), rng.randint(1, 5)
    first, theirs = _step(own, "+", more)
    second, total = _step(own, "+", theirs)
    return WordProblem(
        f"{who} has {own} {plural(good)}. {friend} has {more} more than {who}. How many {plural(good)} do they have "
        "together?",
        f"{friend} has {first} {plural(good)}.\nTogether they have {second} {plural(good)}.",
        total,
    )


ONE_STEP = (_finding, _giving, _filling, _dealing)
TWO_STEPS = (_spending, _earning, _losing, _joining)
TRIES = 1000


def task_problems(count: int, seed: int) -> list[WordProblem]:
    """`count` different problems with small numbers, one step and two steps by turns; a fixed function of the seed.

    The first problems of a longer list are the shorter list.

    Raises:
        YardstickError: the templates do not make so many different questions.
    """
    rng = random.Random(f"yardstick-arithmetic-task-{seed}")
    problems: dict[str, WordProblem] = {}
    for index in range(count):
        templates = TWO_STEPS if index % 2 else ONE_STEP
        for _ in range(TRIES):
            problem = rng.choice(templates)(rng)
            if problem.question not in problems:
                break
        else:
            raise YardstickError(f"synthetic problems: there are not {count} different ones, ask for fewer")
        problems[problem.question] = problem
    return list(problems.values())
