"""Bits per weight from the stored tensors."""

from yardstick.models.config import ModelConfig
from yardstick.models.prefill import head_name
from yardstick.sources.base import TensorInfo, TensorSource
from yardstick.sources.hf import PLAIN


def bits_per_weight(source: TensorSource, config: ModelConfig) -> dict[str, float]:
    """Stored bits over weights: `body` (matrices of all layers), `head`, and `all` matrices read for each token.

    A tied embedding counts as the head; a separate input embedding is looked up by rows and counts nowhere.
    `file_bytes` is all that the checkpoint stores, embedding and norms included.
    """
    infos = source.infos()
    body = [infos[name] for name in config.body_matrices()]
    head = [infos[head_name(source, config)]]

    def ratio(tensors) -> float:
        return sum(t.bits for t in tensors) / sum(t.numel for t in tensors)

    return {
        "body": ratio(body),
        "head": ratio(head),
        "all": ratio(body + head),
        "file_bytes": sum(info.bits for info in infos.values()) // 8,
    }


def matrix_bytes(source: TensorSource, config: ModelConfig) -> int:
    """Bytes of the stored matrices that are read for each token: those of all layers and the head."""
    return sum(info.bits for info in _measured(source, config).values()) // 8


def schemes(source: TensorSource, config: ModelConfig) -> dict[str, int]:
    """How many of the measured matrices are stored in which scheme."""
    counts: dict[str, int] = {}
    for info in _measured(source, config).values():
        counts[info.scheme] = counts.get(info.scheme, 0) + 1
    return dict(sorted(counts.items()))


def unquantized(source: TensorSource, config: ModelConfig) -> list[str]:
    """Measured matrices that a quantized checkpoint stores as plain floats; none where it stores all of them so."""
    measured = _measured(source, config)
    plain = [name for name, info in measured.items() if info.scheme.upper() in PLAIN]
    return plain if len(plain) < len(measured) else []


def _measured(source: TensorSource, config: ModelConfig) -> dict[str, TensorInfo]:
    """The matrices of all layers and the head; a tied one under the name of the embedding."""
    infos = source.infos()
    return {name: infos[name] for name in [*config.body_matrices(), head_name(source, config)]}
