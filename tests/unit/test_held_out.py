import pytest

from yardstick.errors import YardstickError
from yardstick.quantize.held_out import split_sequences


def test_every_text_gives_its_share():
    learned, held = split_sequences({"prose": 20, "code": 8, "one": 1, "math": 4}, 0.125, "mix")
    assert held == [5, 15, 24, 31]
    assert learned == [row for row in range(33) if row not in held]
    assert split_sequences({"a": 2}, 0.9, "mix") == ([0], [1])
    with pytest.raises(YardstickError, match="mix: needs a calibration text of two sequences or more"):
        split_sequences({"a": 1, "b": 1}, 0.5, "mix")
