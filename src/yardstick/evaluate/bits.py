"""Bits per weight from the stored tensors."""

from yardstick.models.config import ModelConfig
from yardstick.models.prefill import head_name
from yardstick.sources.base import TensorSource


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


def schemes(source: TensorSource, config: ModelConfig) -> dict[str, int]:
    """How many of the measured matrices are stored in which scheme."""
    infos = source.infos()
    counts: dict[str, int] = {}
    for name in [*config.body_matrices(), head_name(source, config)]:
        counts[infos[name].scheme] = counts.get(infos[name].scheme, 0) + 1
    return dict(sorted(counts.items()))
