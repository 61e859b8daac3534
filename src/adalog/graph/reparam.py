"""Rewrites that change no output: LayerNorm scale reparameterisation, and the bias that absorbs an offset."""

from torch import Tensor

from adalog.graph.convolution import output_sizes, patches

__all__ = ["absorb_offset", "fold_linear", "fold_norm", "output_sizes", "patches", "shared_scale"]


def shared_scale(scale: Tensor, zero_point: Tensor, *, rounds: bool = True) -> tuple[Tensor, Tensor]:
    """(r, beta), each (C,): x / r - beta quantizes per tensor exactly as x quantizes per channel (from RepQ-ViT).

    scale, zero_point: (C,), of per-channel quantizers. The shared one has s = mean(scale) and z = mean(zero_point),
    rounded before it is used (`rounds`; RepQ-ViT does not round): x / r - beta = s (x / scale + zero_point - z).
    """
    mean = scale.mean()
    floor = mean * 1e-4  # a channel that never moves would otherwise blow its weights' column up or down without bound
    ratio = scale.clamp(min=floor) / mean
    shared = zero_point.mean()
    return ratio, mean * ((shared.round() if rounds else shared) - zero_point)


def fold_norm(weight: Tensor, bias: Tensor, ratio: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The LayerNorm that puts out x / ratio - beta in place of x."""
    return weight / ratio, bias / ratio - beta


def fold_linear(weight: Tensor, bias: Tensor | None, ratio: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The linear whose output on x / ratio - beta is what it was on x. weight: (O, I)."""
    folded = weight * ratio
    shift = (folded.double() @ beta.double()).to(weight.dtype)
    return folded, shift if bias is None else bias + shift


def absorb_offset(weight_hat: Tensor, bias: Tensor | None, offset: float) -> Tensor:
    """Eq. 15: b - offset * W_hat 1, with the dequantized weight (O, I), for an input that keeps its offset."""
    shift = (weight_hat.double().sum(dim=1) * offset).to(weight_hat.dtype)
    return -shift if bias is None else bias - shift
