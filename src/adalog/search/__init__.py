"""Searches for the quantizers of one product; they know nothing about graphs."""

from typing import Any, Protocol

from torch import Tensor

from adalog.choices import RangeSearch, ReleasedSearch, ScaleSearch, Search
from adalog.config import Config
from adalog.quantizers import Assignment, Fold, UniformQuantizer
from adalog.search import bounds, ranges, released, scales
from adalog.search.product import Product


class SearchModule(Protocol):
    """The functions that every search module provides."""

    def needs(self, search: Any) -> frozenset[str]:
        """Return what the search needs besides the operands.

        "ordered", "weights" and "row_splits" are fields of `Product`. "importance": the rows of the operands occur as
        often as the model's output depends on them.
        """

    def refuses_fold(self, search: Any, config: Config) -> str:
        """Return the reason why the search does not fold norms with these choices, or "" if it does."""

    def fold_channels(
        self, values: Tensor, bits: int, search: Any, weight: Tensor
    ) -> tuple[Fold, UniformQuantizer | None]:
        """Return the fold of a norm's channels, and the quantizer that they then share.

        The quantizer is None if `search_product` finds it.

        values: (T, C), the output of the norm. weight: (O, C), the weights of all linears that read it.
        """

    def search_product(self, product: Product, search: Any) -> Assignment:
        """Return the quantizers of a product's operands."""


# One row per type of `Config.search`.
SEARCHES: dict[type[Any], SearchModule] = {
    Search: bounds,
    ReleasedSearch: released,
    RangeSearch: ranges,
    ScaleSearch: scales,
}
