"""Searches for the quantizers of one product; they know nothing about graphs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

from torch import Tensor

from adalog.quantizers import Assignment, Fold, UniformQuantizer
from adalog.search.product import Product


@dataclass(frozen=True)
class Needs:
    """What a search needs besides the operands of a product in the float network.

    importance: rows of the operands occur as often as their squared gradients to this power; 0: once.
    probes: the number of random gradients for `Product.weights`, which are of rounding noise if `noise` is true.
    row_splits: True for the field of `Product`.
    squares: True if the search adds up squares of values, which overflow if values are too large.
    observe: maps the program, the images, the groups of sites, and a function that searches a group with its operands,
        to the operands of all sites by name, for `Product.ordered`.
    """

    importance: float = 0.0
    probes: int = 0
    noise: bool = False
    row_splits: bool = False
    squares: bool = True
    observe: Callable[..., dict[str, Tensor]] | None = None


class AnySearch(ABC):
    """The choices of a search, and the search itself. Searches are frozen dataclasses."""

    kind: ClassVar[str]  # the name in files
    finds_bases: ClassVar[bool] = False  # whether it can search the base of "adalog" quantizers

    @property
    def needs(self) -> Needs:
        """What the search needs besides the operands."""
        return Needs()

    def refuses_fold(self, weight_bits: int, activation_bits: int) -> str:
        """Return the reason why the search does not fold norms at these bits, or "" if it does."""
        return "this method does not fold norms"

    def fold_channels(self, values: Tensor, bits: int, weight: Tensor) -> tuple[Fold, UniformQuantizer | None]:
        """Return the fold of a norm's channels, and the quantizer that they then share (None: searched later).

        values: (T, C), the output of the norm. weight: (O, C), the weights of all linears that read it.
        """
        raise ValueError(f"{type(self).__name__} does not fold norms")

    def fold_together(
        self, values: Sequence[Tensor], bits: int, weights: Sequence[Tensor]
    ) -> list[tuple[Fold, UniformQuantizer | None]]:
        """Return the results of `fold_channels` for several norms, whose values and weights have the same shapes."""
        return [self.fold_channels(*arguments) for arguments in zip(values, repeat(bits), weights)]

    @abstractmethod
    def search_product(self, product: Product) -> Assignment:
        """Return the quantizers of a product's operands."""

    def search_together(self, products: Sequence[Product]) -> list[Assignment]:
        """Return the results of `search_product` for products without starts, of the same shapes and formats.

        A search may override it to take fewer and larger operations.
        """
        return [self.search_product(product) for product in products]

    @property
    def why_unstored(self) -> str:
        """The reason why no file can store the quantizers that are found, or "" if files can."""
        return ""
