"""The reference, stored as final hidden states: they and the unquantized head give its logits back bit for bit."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from yardstick.errors import YardstickError
from yardstick.evaluate.divergence import compare
from yardstick.files import atomic_path, one_key_metadata

STATES = "states.safetensors"


def save_states(path: Path, states: torch.Tensor, record: dict[str, str]) -> None:
    """Write hidden states [chunks, length, hidden] in their compute type, with a record of what made them."""
    with atomic_path(path) as temporary:
        save_file({"hidden_states": states.cpu().contiguous()}, temporary, metadata=one_key_metadata(record))


def load_states(path: Path) -> torch.Tensor:
    """Hidden states [chunks, length, hidden] of a reference.

    Raises:
        YardstickError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as bundle:
            return bundle.get_tensor("hidden_states")
    except FileNotFoundError:
        raise YardstickError(f"{path}: no such file") from None
    except SafetensorError as error:
        raise YardstickError(f"{path}: truncated or not a reference ({error})") from None


def check_replay(
    path: Path, states: torch.Tensor, head, labels: torch.Tensor, chunks: list[int], vocabulary: int
) -> None:
    """Read the stored states back; they and, on `chunks`, their logits and KL must be those of `states` exactly.

    Raises:
        YardstickError: a bit differs. The stored reference is then worthless.
    """
    stored = load_states(path).to(states.device)
    if not torch.equal(stored, states):
        raise YardstickError(f"{path}: the stored states differ from those of the forward")
    direct, replayed = states[chunks].flatten(0, 1), stored[chunks].flatten(0, 1)
    kl = compare(direct, head, replayed, head, labels[chunks].flatten(), vocabulary).kl
    if float(kl.abs().max()) != 0.0:
        raise YardstickError(f"{path}: KL(replayed || direct) is {float(kl.abs().max()):g}, not 0")


def require_finite_states(states: torch.Tensor) -> None:
    """Refuse a reference that overflowed.

    Raises:
        YardstickError: names the chunk and the position.
    """
    bad = ~torch.isfinite(states).all(dim=-1)
    if bool(bad.any()):
        chunk, position = (int(i) for i in torch.nonzero(bad)[0])
        raise YardstickError(f"reference: hidden states are not finite, first at chunk {chunk} position {position}")
