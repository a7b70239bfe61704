"""Small floating-point codes of quantized checkpoints, decoded to fp32 exactly: FP4 (E2M1), E8M0 scales and FP8.

E2M1 and E8M0 are those of the OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1. A code that is
NaN decodes to NaN, in every weight that uses it, so that `TensorSource.get` reports it with the tensor's name.
"""

import torch

# one sign, two exponent and one mantissa bit; code 8 is minus zero
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of FP4 codes 0..15 (uint8), bit 3 the sign."""
    return E2M1.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """fp32 values of bytes b: 2^(b - 127). Byte 0 is 2^-127, a subnormal, for there is no zero; byte 255 is NaN."""
    return scales.view(torch.float8_e8m0fnu).to(torch.float32)


def decode_fp8(codes: torch.Tensor, kind: str = "F8_E4M3") -> torch.Tensor:
    """fp32 values of FP8, stored as such or as bytes; `kind` is the safetensors name, F8_E4M3 (finite) or F8_E5M2."""
    return codes.view(FP8[kind]).to(torch.float32)
