"""The GSM8K table: what answers a candidate gives, against the original's."""

from pathlib import Path

from yardstick.experiment import ORIGINAL, TASK_FLOORS
from yardstick.files import read_json
from yardstick.gsm8k.statistics import is_truncated
from yardstick.report.markdown import figure, table

NOTE = """Accuracy is correct answers over problems asked, with Wilson's 95 % interval; an answer that ran into the
token limit, or in which no answer was found, is not correct. Lost and gained are answers that were correct in one of
the two runs only, with McNemar's exact p; the difference has a paired bootstrap interval. "Equivalent" needs the
difference to lie within the margin of {margin:.1%} by two one-sided tests at 5 %, "worse" and "better" an interval
without 0 and p below 0.05; anything else is undecided. A problem that could not be asked is in no count."""


def load_answers(results: Path, model: str, names: list[str]) -> dict[str, dict]:
    """Summaries of the runs of a model, by name, in the order of the config."""
    return {name: read_json(results / model / name / "summary.json", "failed", "name") for name in names}


def gsm8k_sections(runs: dict[str, dict], fidelity: dict[str, float] | None = None) -> list[str]:
    """The table of a model's runs with all that has to be said about it; `fidelity` holds mean KLs to stand beside."""
    original = runs[ORIGINAL]
    if original["failed"]:
        return [f"The original cannot be asked: {original['failed']}.\n"]
    pairs = [run["paired"] for run in runs.values() if "paired" in run]
    parts = [gsm8k_table(runs, fidelity or {}) + "\n"]
    parts += [line + "\n" for line in (floor_line(runs), *warnings(runs)) if line]
    if pairs:
        parts.append(NOTE.format(margin=pairs[0]["margin"]) + "\n")
    floors = [f"*{name}* is {text}" for name, text in TASK_FLOORS.items() if name in runs]
    return [*parts, "; ".join(floors) + ".\n"] if floors else parts


def gsm8k_table(runs: dict[str, dict], fidelity: dict[str, float]) -> str:
    header = ["answers of", "KL mean"] if fidelity else ["answers of"]
    header += ["asked", "correct", "accuracy", "95 % interval", "no answer", "truncated"]
    header += ["lost", "gained", "p", "difference", "verdict"]
    return table(header, [gsm8k_row(name, run, fidelity) for name, run in ordered(runs)])


def ordered(runs: dict[str, dict]) -> list[tuple[str, dict]]:
    """The original, its repeats, then the others by falling accuracy; runs that failed come last."""

    def key(item: tuple[str, dict]):
        name, run = item
        place = 0 if name == ORIGINAL else 1 if name in TASK_FLOORS else 2
        return place, run["failed"] is not None, -(run.get("gsm8k", {}).get("accuracy") or 0.0), name

    return sorted(runs.items(), key=key)


def title(name: str) -> str:
    return "original" if name == ORIGINAL else f"*{name}*" if name in TASK_FLOORS else f"`{name}`"


def gsm8k_row(name: str, run: dict, fidelity: dict[str, float]) -> list[str]:
    cells = [title(name)]
    if fidelity:
        cells.append(figure(fidelity[name]) if name in fidelity else "–")
    if run["failed"]:
        return [*cells, "**failed**", run["failed"]] + ["–"] * 9
    score, counts = run["gsm8k"], run["gsm8k"]["counts"]
    asked = f"{score['asked']}" if score["asked"] == score["problems"] else f"{score['asked']} of {score['problems']}"
    cells += [asked, f"{counts['correct']}", share(score["accuracy"]), percent_interval(score["interval"])]
    cells += [f"{counts['no_answer']}", f"{counts['truncated']}"]
    pair = run.get("paired")
    if pair is None:
        return [*cells, *["–"] * 5]
    p = "–" if pair["p"] is None else f"{pair['p']:.3g}"
    if pair["difference"] is None:
        difference = "–"
    elif pair["lost"] + pair["gained"]:
        difference = f"{100 * pair['difference']:+.1f} {percent_interval(pair['interval'])}"
    else:  # resampling pairs without a flip gives an interval of no width, however few they are
        difference = "0.0 (no flips)"
    return [*cells, f"{pair['lost']}", f"{pair['gained']}", p, difference, pair["verdict"]]


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def percent_interval(bounds: list[float] | None) -> str:
    return "n/a" if bounds is None else f"[{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def floor_line(runs: dict[str, dict]) -> str | None:
    """How many answers of the original flip when nothing but the arithmetic changes."""
    pairs = {name: run["paired"] for name, run in runs.items() if name in TASK_FLOORS and "paired" in run}
    if not pairs:
        return None
    flips = [
        f"{pair['lost']} lost and {pair['gained']} gained of {pair['pairs']} (*{name}*)" for name, pair in pairs.items()
    ]
    return f"Flip floor, the original against itself: {'; '.join(flips)}."


def warnings(runs: dict[str, dict]) -> list[str]:
    """What keeps rows from being taken at their face value."""
    missed, cut = [], []
    for name, run in ordered(runs):
        if run["failed"]:
            continue
        score = run["gsm8k"]
        if score["asked"] < score["problems"]:
            missed.append(f"{title(name)} {score['problems'] - score['asked']} of {score['problems']}")
        if is_truncated(score["counts"]):
            cut.append(f"{title(name)} {score['counts']['truncated']} of {score['asked']}")
    found = [f"Could not be asked, and in no figure: {', '.join(missed)}."] if missed else []
    if cut:
        found.append(
            f"**Ran into the token limit before the answer was complete** (more than 2 %): {', '.join(cut)}. Their "
            "accuracy is a lower bound; a higher max_new_tokens would show what they answer."
        )
    return found
