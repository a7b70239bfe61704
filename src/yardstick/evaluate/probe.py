"""How far each quantized matrix is from the original's, on the inputs that the original gives it.

    output error = ‖(Ŵ − W) x‖ / ‖W x‖,   weight error = ‖Ŵ − W‖ / ‖W‖

with Frobenius norms, x over all probed positions. x is the original's whatever the candidate did before this matrix,
so an error is the matrix's own. Biases cancel. Factors that smoothing moved between tensors are undone first.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from yardstick.evaluate.probe_inputs import HEAD
from yardstick.models.config import ModelConfig
from yardstick.models.prefill import head_name, head_rows, pick_device
from yardstick.sources.base import TensorSource
from yardstick.sources.smoothing import AFTER_MATRIX, fitted_rows, norm_factors, rows_as_columns

ROWS_AT_ONCE = 4096
NORM, FITTED = "norm", "fitted"


@dataclass(frozen=True)
class ProbedMatrix:
    """Errors of one matrix; `smoothing` names the kinds of factors that were undone, and is empty for none.

    Both errors are NaN where a norm before the matrix hides them.
    """

    name: str
    layer: int | None
    kind: str
    output_error: float
    weight_error: float
    smoothing: tuple[str, ...] = ()
    hidden: bool = False

    @property
    def fault(self) -> str | None:
        """Why there is no error to report; None where there is one."""
        if self.hidden:
            return f"{self.name}: the norm before it has a zero where the original's has none, or the other way round"
        if not (math.isfinite(self.output_error) and math.isfinite(self.weight_error)):
            return f"{self.name}: its error is not a number (output {self.output_error}, weights {self.weight_error})"
        return None


def matrix_errors(base, candidate, inputs: torch.Tensor, columns: torch.Tensor | None = None) -> tuple[float, float]:
    """(output error, weight error) of a matrix [out, in] on inputs [positions, in].

    `base` and `candidate` are tensors or are read by rows; `columns` [in] divides the candidate's columns. Products
    are fp32, sums fp64. Equal matrices give exactly 0; a difference to a matrix or an output that is all zero is NaN.
    """
    device = inputs.device
    squares = torch.zeros(4, dtype=torch.float64, device=device)
    for start in range(0, len(base), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        weights, own = (matrix[rows].to(device).float() for matrix in (base, candidate))
        difference = (own if columns is None else own / columns.to(device)) - weights
        parts = inputs @ difference.T, inputs @ weights.T, difference, weights
        squares += torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square()
    output_difference, output, weight_difference, size = squares.sqrt().tolist()
    return _ratio(output_difference, output), _ratio(weight_difference, size)


def _ratio(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.nan


def probe_matrices(
    source: TensorSource,
    original: TensorSource,
    config: ModelConfig,
    names: Iterable[str],
    inputs_of: Callable[[str], torch.Tensor],
) -> Iterator[ProbedMatrix]:
    """Errors of the candidate's matrices among `names`, in the order of the forward, one matrix in memory at a time.

    `inputs_of` gives a matrix's inputs [positions, in] by its full name, `HEAD` for the output head.
    """
    wanted, device = set(names), pick_device()

    def ready(name: str) -> torch.Tensor:
        return inputs_of(name).to(device).float()

    for layer in range(config.num_layers):
        kinds = {config.layer_name(layer, f"{kind}.weight"): kind for kind in config.layer_linears(layer)}
        if wanted.isdisjoint(kinds):
            continue
        factors, fitted = norm_factors(source, original, config, layer), {}
        for name in (name for name in kinds if name in wanted):
            kind, undone = kinds[name], []
            if name in factors and factors[name] is None:
                yield ProbedMatrix(name, layer, kind, math.nan, math.nan, hidden=True)
                continue
            own, base = source.get(name).float(), original.get(name).float()
            if name in factors:
                own, undone = own / factors[name], [NORM]
            if kind in AFTER_MATRIX and (rows := fitted_rows(own, base)) is not None:
                own = own / rows.unsqueeze(1)
                fitted[AFTER_MATRIX[kind]] = rows_as_columns(rows, AFTER_MATRIX[kind], config)
                undone.append(FITTED)
            if kind in fitted:
                own = own * fitted[kind]
                undone.append(FITTED)
            yield ProbedMatrix(name, layer, kind, *matrix_errors(base, own, ready(name)), tuple(undone))
    if HEAD in wanted:
        yield _probe_head(source, original, config, ready(HEAD))


def _probe_head(
    source: TensorSource, original: TensorSource, config: ModelConfig, inputs: torch.Tensor
) -> ProbedMatrix:
    """The output head, which may be tied, by rows: it may be gigabytes."""
    name, kind, factors = head_name(source, config), HEAD.removesuffix(".weight"), None
    moved = norm_factors(source, original, config, None)
    if name in moved:
        factors = moved[name]
        if factors is None:
            return ProbedMatrix(name, None, kind, math.nan, math.nan, hidden=True)
    errors = matrix_errors(head_rows(original, config), head_rows(source, config), inputs, factors)
    return ProbedMatrix(name, None, kind, *errors, (NORM,) if name in moved else ())


def summarize_probe(matrices: list[ProbedMatrix]) -> dict:
    """Medians and greatest errors over all matrices and by kind, with the matrix that has the greatest output error."""
    kinds = dict.fromkeys(matrix.kind for matrix in matrices)
    worst = max(matrices, key=lambda matrix: matrix.output_error)
    return {
        "all": _spread(matrices) | {"worst": worst.name},
        "kinds": {kind: _spread([matrix for matrix in matrices if matrix.kind == kind]) for kind in kinds},
    }


def _spread(matrices: list[ProbedMatrix]) -> dict:
    found: dict = {"matrices": len(matrices)}
    for key in ("output_error", "weight_error"):
        values = [getattr(matrix, key) for matrix in matrices]
        found[key] = {"median": statistics.median(values), "max": max(values)}
    return found
