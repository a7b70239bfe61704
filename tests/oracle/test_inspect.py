"""`inspect` on a GGUF file: its relative errors against the theory of uniform quantizers, and a planted permutation."""

import math
from functools import cache
from pathlib import Path

import gguf
import libgguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from tests.tiny import write_tiny_model
from yardstick.cli.common import parser
from yardstick.cli.inspect import main
from yardstick.sources.gguf import gguf_name, permute_rotary
from yardstick.sources.hf import HuggingFaceSource

WIDTH, HEADS, KEY_HEADS = 512, 8, 4
KINDS = {
    "self_attn.q_proj": Type.Q8_0,
    "self_attn.k_proj": Type.Q6_K,
    "self_attn.v_proj": Type.Q5_K,
    "self_attn.o_proj": Type.Q4_K,
    "mlp.gate_proj": Type.Q5_0,
    "mlp.up_proj": Type.Q4_0,
    "mlp.down_proj": Type.IQ4_XS,
}
LAYER = "model.layers.0."


def distribution(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def largest(n: int) -> float:
    """Root mean square of the largest magnitude M of n standard normal numbers: E[M²] = ∫ 2m P(M > m) dm."""
    m = np.linspace(0, 8, 4001)
    return math.sqrt(np.trapezoid(2 * m * (1 - (2 * distribution(m) - 1) ** n), m))


def spread(n: int) -> float:
    """The same of the range R; P(R <= r) = n ∫ φ(x) (Φ(x + r) - Φ(x))^(n - 1) dx."""
    x, r = np.linspace(-7, 7, 1401), np.linspace(0, 12, 601)
    below, density = distribution(x), np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    at_most = np.array([np.trapezoid(n * density * (distribution(x + s) - below) ** (n - 1), x) for s in r])
    return math.sqrt(np.trapezoid(2 * r * (1 - at_most), r))


@cache
def bands() -> dict[Type, tuple[float, float]]:
    """Least and greatest relative error of normal weights.

    A quantizer of step d has errors spread evenly over one step, of root mean square d / sqrt(12). The step follows the
    block, so its root mean square counts, in units of the weights' deviation:

    - Q8_0, Q5_0, Q4_0: blocks of 32, the largest magnitude at 127, 16 or 8 steps. That element has no error (1/32 of
      the square), the other end may be clipped by half a step, the scale is fp16: 3 % either way.
    - Q6_K: sub-blocks of 16, the largest magnitude at 32 steps; Q5_K, Q4_K: sub-blocks of 32, the range in 31 or 15
      steps. Each searches for a better scale around that, and rounds the scale to 6 or 8 bits: up to 15 % better, 3 %
      worse.
    - IQ4_XS: sixteen levels, not evenly spaced. One such table for all weights has at best 0.0975 (Lloyd and Max);
      following the block can only help. No code of b bits has less than 2^-b.
    """
    root = math.sqrt(12)
    plain = {Type.Q8_0: largest(32) / 127, Type.Q5_0: largest(32) / 16, Type.Q4_0: largest(32) / 8}
    searched = {Type.Q6_K: largest(16) / 32, Type.Q5_K: spread(32) / 31, Type.Q4_K: spread(32) / 15}
    result = {kind: (0.97 * step / root, 1.03 * step / root) for kind, step in plain.items()}
    result |= {kind: (0.85 * step / root, 1.03 * step / root) for kind, step in searched.items()}
    return result | {Type.IQ4_XS: (2**-4.25, 0.0975)}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    return write_tiny_model(tmp_path_factory.mktemp("inspect") / "m", "llama", tied=True, layers=1, **sizes, **heads)


def write(path, folder, planted: str | None = None):
    """The model in the types above; the rows of one matrix, as the file has them, in another order."""
    source, writer = HuggingFaceSource(folder), gguf.GGUFWriter(path, arch="llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    for name in source.infos():
        values, module = source.get(name).float(), name.removeprefix(LAYER).removesuffix(".weight")
        for part, heads in (("q_proj", HEADS), ("k_proj", KEY_HEADS)):
            values = permute_rotary(values, heads) if module.endswith(part) else values
        if module == planted:
            values = values.roll(128, dims=0)
        kind, data = KINDS.get(module), values.numpy()
        writer.add_tensor(
            gguf_name(name), libgguf.quantize_rows(data, int(kind), None) if kind else data, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def inspected(path, folder, capsys) -> dict[str, list[str]]:
    """Cells of the table that the command prints, by tensor."""
    arguments = parser("inspect")
    arguments.add_argument("spec")
    arguments.add_argument("--base", type=Path)
    main(arguments.parse_args([f"gguf:{path}", "--base", str(folder)]))
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_errors_are_those_of_theory_for_every_common_type(original, tmp_path, capsys):
    write(tmp_path / "m.gguf", original)
    found, errors = inspected(tmp_path / "m.gguf", original, capsys), {}
    assert largest(32) == pytest.approx(2.389, abs=0.002) and spread(32) == pytest.approx(4.195, abs=0.005)
    for module, kind in KINDS.items():
        scheme, bits, error, verdict, detail = found[f"{LAYER}{module}.weight"]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        assert (scheme, bits, verdict, detail) == (kind.name, f"{8 * size / block:.3f}", "quantized", "")
        low, high = bands()[kind]
        assert low < float(error) < high, (kind.name, low, error, high)
        errors[kind] = float(error)
    ordered = [Type.Q8_0, Type.Q6_K, Type.Q5_K, Type.Q5_0, Type.Q4_K, Type.IQ4_XS, Type.Q4_0]
    assert sorted(errors, key=errors.get) == ordered
    assert {row[3] for name, row in found.items() if "proj" not in name} == {"same"}


@pytest.mark.parametrize("planted", ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_planted_order_of_rows_is_found_under_the_quantization(original, tmp_path, capsys, planted):
    write(tmp_path / "m.gguf", original, planted)
    found = inspected(tmp_path / "m.gguf", original, capsys)
    for module, kind in KINDS.items():
        _, _, error, verdict, detail = found[f"{LAYER}{module}.weight"]
        if module != planted:
            assert (verdict, detail) == ("quantized", "")
            continue
        order = "[1, 0]" if planted == "self_attn.v_proj" else "[3, 0, 1, 2]"  # of 256 rows, and of 512
        assert verdict == "permuted" and float(error) == pytest.approx(math.sqrt(2), rel=0.02)
        assert detail.startswith(f"rows: blocks of 128 in the order {order}; error "), detail
        low, high = bands()[kind]
        assert low < float(detail.split("error ")[1].split()[0]) < high
