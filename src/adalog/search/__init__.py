"""The searches of one product's quantizers. Nothing here knows a graph."""

from typing import Any, Protocol

from torch import Tensor

from adalog.choices import RangeSearch, ReleasedSearch, ScaleSearch, Search
from adalog.config import Config
from adalog.quantizers import Assignment, Fold, UniformQuantizer
from adalog.search import bounds, ranges, released, scales
from adalog.search.product import Product


class SearchModule(Protocol):
    """The functions that the module of each kind of search has."""

    def needs(self, search: Any) -> frozenset[str]:
        """The optional fields of `Product` that the search reads: "ordered", "weights", "row_splits"."""

    def refuses_fold(self, search: Any, config: Config) -> str:
        """Why the search folds no norm under these choices; empty where it folds them."""

    def fold_channels(self, values: Tensor, bits: int, search: Any) -> tuple[Fold, UniformQuantizer | None]:
        """The fold of a norm's channels, and the quantizer that they then share; None: `search_product` finds that.

        values: (T, C), the output of the norm.
        """

    def search_product(self, product: Product, search: Any) -> Assignment:
        """The quantizers of a product's operands."""


# One row per kind of choices in `Config.search`.
SEARCHES: dict[type[Any], SearchModule] = {
    Search: bounds,
    ReleasedSearch: released,
    RangeSearch: ranges,
    ScaleSearch: scales,
}
