"""List the activation functions that adalog knows, one row each. All other modules read what they need from here.

To add one, add a row; if kernels shall compute it, number it in `Activation` of structures.h and in
`runtime.native.abi`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Activation:
    """A pointwise activation function.

    name: as `Source.kind` and the ledger name it. title: as pictures name it. built: True if several operations compute
    it, which `find_source` recognises; otherwise the operation `op` does. multiplications: float multiplications and
    divisions per element, without those inside erf, an exponential, sigmoid or tanh. power_law: True if the outputs
    follow a power law, so that a logarithmic quantizer may suit them. is_gelu: True for a form of GELU, after which a
    uniform quantizer is rarely better. kernels: the names that kernels give it, by the operation's further arguments.
    """

    name: str
    title: str
    multiplications: int = 0
    built: bool = False
    power_law: bool = False
    is_gelu: bool = False
    kernels: Mapping[tuple[object, ...], str] = field(default_factory=dict)

    @property
    def op(self) -> str:
        """The operation that computes it, or "" if several do."""
        return "" if self.built else f"aten.{self.name}.default"


_GELU_KERNELS: dict[tuple[object, ...], str] = {(): "gelu", ("none",): "gelu", ("tanh",): "gelu_tanh"}

ACTIVATIONS = {
    row.name: row
    for row in (
        # GELU multiplies x by 1 / sqrt(2), x by the result, and that by 1 / 2.
        Activation("gelu", "GELU", 3, power_law=True, is_gelu=True, kernels=_GELU_KERNELS),
        Activation("quick_gelu", "quick GELU", built=True, power_law=True, is_gelu=True),
        Activation("silu", "SiLU", 1, power_law=True, kernels={(): "silu"}),
        Activation("hardswish", "hardswish", 2, power_law=True, kernels={(): "hardswish"}),
        Activation("mish", "mish", 1, power_law=True),
        Activation("relu", "ReLU", kernels={(): "relu"}),
        Activation("relu6", "ReLU6"),
        Activation("sigmoid", "sigmoid", kernels={(): "sigmoid"}),
        Activation("tanh", "tanh"),
        Activation("elu", "ELU", 1),
        Activation("hardsigmoid", "hardsigmoid", 1),
    )
}
"""The rows by name."""

BY_OPERATION = {row.op: row for row in ACTIVATIONS.values() if row.op}
"""The rows that one operation computes, by that operation."""

GELUS = tuple(name for name, row in ACTIVATIONS.items() if row.is_gelu)
POWER_LAW_ACTIVATIONS = tuple(name for name, row in ACTIVATIONS.items() if row.power_law)
