"""Which calibration sequences are learned from, and which decide what is written."""

from yardstick.errors import YardstickError


def split_sequences(counts: dict[str, int], share: float, what: str) -> tuple[list[int], list[int]]:
    """(rows to learn from, rows held out) of sequences that lie corpus after corpus, `counts` of each.

    Each corpus with two sequences or more gives its share, at least one, at equal distances.

    Raises:
        YardstickError: no corpus has two; `what` is the method that needs them.
    """
    learned, held, first = [], [], 0
    for count in counts.values():
        taken = min(max(1, round(count * share)), count - 1)
        chosen = {(2 * i + 1) * count // (2 * taken) for i in range(taken)}
        for row in range(count):
            (held if row in chosen else learned).append(first + row)
        first += count
    if not held:
        raise YardstickError(f"{what}: needs a calibration text of two sequences or more, one of them to be held out")
    return learned, held
