"""A source made of parts of two models: a candidate in which some matrices are the original's, or the head another's.

What a checkpoint loses can then be told apart by place: its body under the original's head, its head on the original's
body, one kind of matrix or one layer kept.

A matrix belongs to the norm before it: smoothing (AWQ, SmoothQuant) divides a norm's gain and multiplies the columns
of the matrices behind it, and each is wrong without the other. So nothing is mixed with a checkpoint whose norms are
not the original's. Factors between two matrices (up_proj and down_proj) leave no trace in a norm; the tools that make
them smooth the norms too.
"""

from collections.abc import Iterable

import torch

from yardstick.errors import YardstickError
from yardstick.models.config import ModelConfig
from yardstick.models.prefill import head_name, stored_name
from yardstick.sources.base import LazyRows, TensorInfo, TensorSource
from yardstick.sources.kinds import compiled

HEAD = "lm_head.weight"
# a gain that went through bf16 or fp16, or through 1 + w in fp32, is still the same gain
SAME_GAIN, SAME_GAIN_NEAR_ZERO = 2.0**-8, 2.0**-20


class ReplacedSource(TensorSource):
    """A checkpoint of which some tensors are those of others: `replaced` gives their source and their name there."""

    def __init__(self, whole: TensorSource, replaced: dict[str, tuple[TensorSource, str]]) -> None:
        super().__init__(whole.path)
        self._whole, self._from, self._infos = whole, replaced, dict(whole.infos())
        for name, (source, stored) in replaced.items():
            if stored not in source.infos():
                raise YardstickError(f"{source.path}: tensor {stored} is missing")
            self._infos[name] = source.infos()[stored]

    def infos(self) -> dict[str, TensorInfo]:
        return self._infos

    def ignored(self) -> dict[str, str]:
        return self._whole.ignored()

    def read(self, name: str) -> torch.Tensor:
        source, stored = self._from.get(name, (self._whole, name))
        return source.get(stored)

    def rows(self, name: str) -> torch.Tensor | LazyRows:
        source, stored = self._from.get(name, (self._whole, name))
        return source.rows(stored)


class MixedSource(ReplacedSource):
    """The candidate's tensors, but the original's for matrices that `keep_bf16` finds, and the output head of `head`.

    `keep_bf16` is a regular expression that is searched in the names of the measured matrices: those of all layers, and
    `lm_head.weight` for the output head, whichever tensor a checkpoint uses as its head. A head that is kept or taken
    from elsewhere is a tensor of its own: where the candidate's input embedding is its head too, the embedding stays.
    Biases, norms and whatever else is no measured matrix stay the candidate's.

    Raises:
        YardstickError: the pattern cannot be read or finds no matrix, the head is both kept and taken from elsewhere,
            or a norm is not the original's.
    """

    def __init__(
        self,
        candidate: TensorSource,
        original: TensorSource,
        config: ModelConfig,
        keep_bf16: str | None = None,
        head: TensorSource | None = None,
    ) -> None:
        kept = kept_matrices(config, keep_bf16) if keep_bf16 else []
        if head and HEAD in kept:
            raise YardstickError(
                f"keep_bf16: {keep_bf16!r} finds lm_head.weight too, and the head is to be that of {head.path}"
            )
        if any(name != HEAD for name in kept):
            require_same_norms(candidate, original, norm_names(config))
        elif kept or head:  # all matrices behind the other norms are the candidate's own
            require_same_norms(candidate, original, [config.final_norm_name])
        replaced = {name: (original, stored_name(name, original, config)) for name in kept}
        if head:
            require_same_norms(head, original, [config.final_norm_name])
            replaced[HEAD] = (head, head_name(head, config))
        super().__init__(candidate, replaced)


def kept_matrices(config: ModelConfig, pattern: str) -> list[str]:
    """Measured matrices whose name the pattern finds, the output head under the name `lm_head.weight`.

    Raises:
        YardstickError: the pattern cannot be read, or finds none.
    """
    expression, names = compiled(pattern, "keep_bf16"), [*config.body_matrices(), HEAD]
    found = [name for name in names if expression.search(name)]
    if not found:
        raise YardstickError(f"keep_bf16: {pattern!r} is found in no matrix name, such as {names[0]}")
    return found


def norm_names(config: ModelConfig) -> list[str]:
    """Full names of all norms, in the order of the forward."""
    layers = [
        config.layer_name(layer, name)
        for layer in range(config.num_layers)
        for name in config.layer_tensors(layer)
        if name.endswith("norm.weight")
    ]
    return [*layers, config.final_norm_name]


def require_same_norms(candidate: TensorSource, original: TensorSource, names: Iterable[str]) -> None:
    """Refuse a checkpoint whose norms are not the original's up to the rounding of a half-precision type.

    Raises:
        YardstickError: names the first norm that differs, and by how much.
    """
    for name in names:
        gain, own = original.get(name).double(), candidate.get(name).double()
        if gain.shape != own.shape:
            raise YardstickError(f"{candidate.path}: tensor {name} has shape {list(own.shape)}, not {list(gain.shape)}")
        difference = (own - gain).abs()
        if bool((difference > SAME_GAIN * gain.abs() + SAME_GAIN_NEAR_ZERO).any()):
            worst = int(difference.argmax())
            raise YardstickError(
                f"{candidate.path}: norm {name} is not the original's ({float(own[worst]):.4g} for "
                f"{float(gain[worst]):.4g}): the matrices were smoothed to fit it and cannot be mixed with others"
            )
