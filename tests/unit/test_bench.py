from tests.bench import matmul_rate, operations
from yardstick.models.config import load_config


def test_operations_of_the_tiny_model_by_hand(tiny_llama):
    config = load_config(tiny_llama)
    # a layer: q and o 96 x 96, k and v 32 x 96, three of 160 x 96; two layers, 10 positions
    assert operations(config, 10, 5) == (
        2 * 10 * 2 * (2 * 96 * 96 + 2 * 32 * 96 + 3 * 160 * 96),
        19200,
        4 * 10 * 512 * 96,
    )
    assert matmul_rate(config, layers=1) > 0
