"""Public faults of quantized checkpoints, by the number of the row in the project's list, and where each is tested.

Rows that another test covers by the values of their own tiny input are named; the others are tested here.

A1   oracle/test_gguf_types.py  test_random_blocks_decode_bit_for_bit_as_the_gguf_package_decodes_them
A1   oracle/test_gguf_types.py  test_bits_are_those_of_whole_blocks
A3   oracle/test_gguf_types.py  test_q2_k_with_sixteen_different_scales
A4   oracle/test_gguf_types.py  test_q5_k_nibbles_and_fifth_bits
A6   unit/test_sources.py  test_rotary_permutation_of_one_head_of_eight
A6   unit/test_known_faults.py  test_a6_rows_of_q_and_k_are_put_back_by_their_own_heads
A7   unit/test_known_faults.py  test_a7_codes_and_scales_move_together
A8   oracle/test_gguf_qwen35.py  test_order_of_value_heads_by_hand
A8   oracle/test_gguf_qwen35.py  test_every_tensor_comes_back
A9   oracle/test_gguf_qwen35.py  test_offsets_and_decays_by_hand
A10  oracle/test_gguf_qwen35.py  test_offsets_and_decays_by_hand
A10  oracle/test_gguf_qwen35.py  test_every_tensor_comes_back
A11  oracle/test_gguf_qwen35.py  test_layers_for_multi_token_prediction_are_set_aside_with_a_reason
A11  unit/test_known_faults.py  test_a11_of_33_blocks_one_is_for_prediction
A13  oracle/test_gguf_types.py  test_dimensions_are_listed_fastest_first_and_data_are_not_transposed
A14  oracle/test_gguf_types.py  test_a_tensor_that_the_file_does_not_hold_is_refused_by_name
A15  oracle/test_gguf_types.py  test_a_missing_part_is_named
A15  oracle/test_gguf.py  test_one_part_of_a_split_file_is_refused
A17  oracle/test_gguf_types.py  test_mxfp4_is_split_in_halves
A17  oracle/test_compressed_tensors.py  test_the_bias_of_mxfp4_scales_follows_the_version
A19  oracle/test_gguf.py  test_importance_matrix_divides_sums_by_counts
A19  unit/test_known_faults.py  test_a19_other_forms_of_importance_are_refused
B1   oracle/test_gptq_format.py  test_b1_zero_points_are_those_of_the_format
B1   oracle/test_gptq_format.py  test_b1_a_symmetric_checkpoint_that_contradicts_its_field_stops
B2   oracle/test_gptq_format.py  test_b2_a_zero_point_of_zero_wraps
B2   oracle/test_gptq_format.py  test_b2_gptqmodel_borrows_across_fields
B3   oracle/test_gptq_format.py  test_b3_g_idx_orders_scales_and_zero_points
B3   oracle/test_compressed_tensors.py  test_column_order_chooses_scale_and_zero
B5   oracle/test_awq_format.py  test_b5_outputs_are_interleaved_and_zero_points_too
B5   oracle/test_awq_format.py  test_b5_gemv_is_not_interleaved
B6   oracle/test_quark_format.py  test_b6_the_label_says_how_a_word_is_read
B6   oracle/test_quark_format.py  test_b6_with_the_original_a_false_label_does_no_harm
B7   oracle/test_compressed_tensors.py  test_codes_are_stored_with_an_offset
B8   oracle/test_compressed_tensors.py  test_zero_points_are_packed_along_the_rows_or_not_at_all
B10  oracle/test_compressed_tensors.py  test_the_global_scale_divides_and_belongs_to_one_tensor
B10  oracle/test_modelopt.py  test_fault_b10_the_tensor_scale_multiplies
B11  oracle/test_compressed_tensors.py  test_the_global_scale_divides_and_belongs_to_one_tensor
B13  oracle/test_compressed_tensors.py  test_the_bias_of_mxfp4_scales_follows_the_version
B14  unit/test_float_formats.py  test_scales_of_eight_exponent_bits
B14  oracle/test_compressed_tensors.py  test_extreme_scales_of_mxfp4
B14  oracle/test_fp8.py  test_fault_b14_scales_that_are_exponents
B14  oracle/test_fp8.py  test_fault_b14_byte_255_is_reported
B16  oracle/test_fp8.py  test_fault_b16_each_expert_has_blocks_of_its_own
B16  unit/test_known_faults.py  test_b16_models_of_experts_are_refused_by_name
B17  oracle/test_fp8.py  test_fault_b17_the_stored_scale_is_the_one_that_counts
B17  oracle/test_compressed_tensors.py  test_the_stored_scale_is_the_one_that_counts
B17  unit/test_known_faults.py  test_b17_codes_are_chosen_for_the_scale_that_is_stored
B18  oracle/test_bitsandbytes.py  test_four_bits_are_bitsandbytes_own_values
B18  unit/test_known_faults.py  test_b18_a_nested_absmax_has_an_offset
B20  oracle/test_compressed_tensors.py  test_targets_are_names_patterns_or_classes_and_never_parts_of_names
B20  oracle/test_awq_format.py  test_what_is_quantized_is_what_the_file_holds
B20  oracle/test_modelopt.py  test_a_pattern_is_the_whole_name
B20  unit/test_known_faults.py  test_b20_a_part_that_nothing_reads_is_left_over
B21  oracle/test_compressed_tensors.py  test_a_layer_may_be_mixed_and_the_next_one_plain
B21  unit/test_known_faults.py  test_b21_gptq_and_awq_layers_may_be_plain

Not applicable in full: A19 merging (importance matrices are written from one run and never merged), B2 writing (zero
points of GPTQ are read only; ours are minima), B16 beyond FP8 blocks (no forward with experts).
"""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from tests.oracle import test_awq_format as awq
from tests.oracle import test_gptq_format as gptq
from tests.oracle.test_gguf_types import write
from yardstick.errors import YardstickError
from yardstick.models.config import load_config
from yardstick.quantize.grid import Grid, round_to_nearest
from yardstick.rivals.imatrix import read_imatrix
from yardstick.sources import audit_source, open_source

TESTS = Path(__file__).parents[1]
LAYER = "model.layers.0."
ROWS = {f"A{i}" for i in (1, 3, 4, 6, 7, 8, 9, 10, 11, 13, 14, 15, 17, 19)}
ROWS |= {f"B{i}" for i in (1, 2, 3, 5, 6, 7, 8, 10, 11, 13, 14, 16, 17, 18, 20, 21)}


def test_every_row_has_a_test_and_every_test_is_there():
    entries = re.findall(r"^([AB]\d+)\s+(\S+\.py)\s+(test_\w+)$", __doc__, flags=re.M)
    assert {row for row, _, _ in entries} == ROWS
    for row, path, name in entries:
        assert f"def {name}(" in (TESTS / path).read_text(), (row, path, name)
    here = {name for _, path, name in entries if path == "unit/test_known_faults.py"}
    assert here == set(re.findall(r"^def (test_[ab]\d+_\w+)\(", Path(__file__).read_text(), flags=re.M))


IN_FILE = [0, 4, 1, 5, 2, 6, 3, 7]  # Hugging Face's row at each place of a head of eight


def test_a6_rows_of_q_and_k_are_put_back_by_their_own_heads(tmp_path):
    """Three query heads and one key head of eight rows: with three, k would have no whole heads."""
    heads = np.array([8 * head + row for head in range(3) for row in IN_FILE], dtype=np.float32)
    tensors = {
        "blk.0.attn_q.weight": heads[:, None].repeat(2, 1),
        "blk.0.attn_k.weight": heads[:8, None].repeat(2, 1),
        "blk.0.attn_v.weight": heads[:8, None].repeat(2, 1),
    }
    source = open_source(f"gguf:{write(tmp_path / 'llama.gguf', tensors)}")
    assert source.get(f"{LAYER}self_attn.q_proj.weight")[:, 1].tolist() == list(range(24))
    assert source.get(f"{LAYER}self_attn.k_proj.weight")[:, 1].tolist() == list(range(8))
    assert source.get(f"{LAYER}self_attn.v_proj.weight")[:, 1].tolist() == IN_FILE
    for family in ("qwen2", "qwen3"):
        source = open_source(f"gguf:{write(tmp_path / f'{family}.gguf', tensors, arch=family)}")
        assert source.get(f"{LAYER}self_attn.k_proj.weight")[:, 1].tolist() == IN_FILE


def test_a7_codes_and_scales_move_together(tmp_path):
    """Q8_0, one block a row: the original's row r has scale 2^-r and codes r + 1 and -(r + 1)."""
    rows = [struct.pack("<e", 2.0**-r) + struct.pack("<32b", r + 1, -r - 1, *[0] * 30) for r in IN_FILE]
    data = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(8, 34)
    tensors = {"blk.0.attn_k.weight": (data, Type.Q8_0), "blk.0.attn_v.weight": (data, Type.Q8_0)}
    source = open_source(f"gguf:{write(tmp_path / 'm.gguf', tensors)}")
    right = [[1, -1], [1, -1], [0.75, -0.75], [0.5, -0.5], [0.3125, -0.3125]]
    right += [[0.1875, -0.1875], [0.109375, -0.109375], [0.0625, -0.0625]]
    name = f"{LAYER}self_attn.k_proj.weight"
    assert source.get(name)[:, :2].tolist() == right and not source.get(name)[:, 2:].any()
    assert source.rows(name)[3:5][:, :2].tolist() == right[3:5]
    assert source.get(f"{LAYER}self_attn.v_proj.weight")[:, :2].tolist() == [right[r] for r in IN_FILE]


def test_a11_of_33_blocks_one_is_for_prediction(tmp_path):
    keys = {"block_count": 33, "nextn_predict_layers": 1, "ssm.group_count": 2, "ssm.time_step_rank": 6}
    keys = [(f"qwen35.{key}", value) for key, value in (keys | {"ssm.state_size": 4}).items()]
    tensors = {f"blk.{i}.attn_norm.weight": np.full(8, 1.25, dtype=np.float32) for i in (31, 32)}
    source = open_source(f"gguf:{write(tmp_path / 'm.gguf', tensors, arch='qwen35', keys=keys)}")
    assert list(source.ignored()) == ["blk.32.attn_norm.weight"]
    audit_source(source, {"model.layers.31.input_layernorm.weight": (8,)})
    assert source.get("model.layers.31.input_layernorm.weight").tolist() == [0.25] * 8


@pytest.mark.parametrize(
    ("counts", "message"),
    [([0.0], "ffn_up.weight saw no calibration token"), ([10.0, 30.0], "or is split by experts")],
)
def test_a19_other_forms_of_importance_are_refused(tmp_path, counts, message):
    """A count of zero is not importance zero, and the older form, which holds means, is no GGUF file."""
    name = "blk.0.ffn_up.weight"
    tensors = {f"{name}.in_sum2": np.full((1, 32), 100.0, np.float32), f"{name}.counts": np.float32([counts])}
    with pytest.raises(YardstickError, match=message):
        read_imatrix(write(tmp_path / "i.gguf", tensors))
    old = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii32f", 40, 32, *[2.5] * 32)
    (tmp_path / "old.dat").write_bytes(old)
    with pytest.raises(YardstickError, match="old.dat: truncated or not a GGUF file"):
        read_imatrix(tmp_path / "old.dat")
    with pytest.raises(YardstickError, match="tensor loose.weight is not part of an importance matrix"):
        read_imatrix(write(tmp_path / "i.gguf", {"loose.weight": np.ones(4, np.float32)}))


def test_b16_models_of_experts_are_refused_by_name(tmp_path):
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(YardstickError, match=f"model_type {family} is not supported"):
            load_config(tmp_path)
    experts = {"blk.0.ffn_up_exps.weight": np.ones((2, 5, 4), dtype=np.float32)}
    source = open_source(f"gguf:{write(tmp_path / 'm.gguf', experts)}")
    with pytest.raises(YardstickError, match="tensor blk.0.ffn_up_exps.weight is left over"):
        audit_source(source, {})


def test_b17_codes_are_chosen_for_the_scale_that_is_stored():
    """15.1 / 15 = 1.00667 is stored as 1.0078125: 7.553 is then 7.494 steps, and not 7.503."""
    codes, scales, minima = round_to_nearest(torch.tensor([[0.0, 7.553, 15.1]]), Grid(3))
    assert (scales.item(), minima.item()) == (1.0078125, 0.0)
    assert codes.tolist() == [[0, 7, 15]]


def test_b18_a_nested_absmax_has_an_offset(tmp_path):
    """absmax = 0.5 * 0.02 + 0.02 = 0.03, and not 0.01; the first element is the high nibble."""
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [1, 4], "dtype": "bfloat16"}
    state |= {"nested_blocksize": 256, "nested_offset": 0.02, "nested_dtype": "float32"}
    values, nested = torch.linspace(-1, 1, 16), torch.zeros(256)
    values[8], nested[7] = 0.25, 0.5
    tensors = {
        "": torch.tensor([[0xF0], [0x8F]], dtype=torch.uint8),
        ".absmax": torch.tensor([7], dtype=torch.uint8),
        ".quant_map": values,
        ".nested_absmax": torch.tensor([0.02]),
        ".nested_quant_map": nested,
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    save_file({f"m.weight{part}": tensor for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    found = open_source(f"bnb:{tmp_path}").get("m.weight")
    assert found[0].tolist() == pytest.approx([0.03, -0.03, 0.0075, 0.03], rel=1e-6)


def awq_and_gptq(name: str) -> dict[str, tuple[dict, dict]]:
    """One matrix of 4 x 8 in each of the two formats: settings and tensors."""
    codes, zeros, scales = awq.random_module(np.random.default_rng(2), 4, 8, 1)
    return {
        "awq": (awq.PLAIN, awq.gemm(codes, zeros, scales, name)),
        "gptq": (gptq.PLAIN, gptq.module(codes, zeros, scales, g_idx=[0] * 4, name=name)),
    }


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_b20_a_part_that_nothing_reads_is_left_over(tmp_path, kind):
    settings, tensors = awq_and_gptq("m")[kind]
    extra = {"m.scales_2": torch.ones(1)}
    source = open_source(f"{kind}:{gptq.write_checkpoint(tmp_path, settings, tensors | extra)}")
    with pytest.raises(YardstickError, match="tensor m.scales_2 is left over"):
        audit_source(source, {"m.weight": (8, 4)})


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_b21_gptq_and_awq_layers_may_be_plain(tmp_path, kind):
    """Layer 0 has a quantized and a plain projection, layer 1 plain ones only."""
    settings, tensors = awq_and_gptq("layers.0.linear_attn.in_proj_qkv")[kind]
    plain = [f"layers.{i}.linear_attn.in_proj_{part}.weight" for i, part in ((0, "a"), (1, "qkv"), (1, "a"))]
    tensors |= {name: torch.randn(8, 4).bfloat16() for name in plain}
    source = open_source(f"{kind}:{gptq.write_checkpoint(tmp_path, settings, tensors)}")
    assert source.infos()["layers.0.linear_attn.in_proj_qkv.weight"].scheme == f"{kind}-int4-g4"
    for name in plain:
        assert source.infos()[name].scheme == "bf16" and torch.equal(source.get(name), tensors[name])
