"""The searches of one product's quantizers. Nothing here knows a graph."""

from typing import Any, Protocol

from torch import Tensor

from adalog.choices import RangeSearch, ReleasedSearch, ScaleSearch, Search
from adalog.config import Config
from adalog.quantizers import Assignment, Fold, UniformQuantizer
from adalog.search import bounds, ranges, released, scales
from adalog.search.product import Product


class SearchModule(Protocol):
    """What each kind of search offers, as functions of a module."""

    def needs(self, search: Any) -> frozenset[str]:
        """Which optional fields of `Product` it wants: "ordered", "weights", "row_splits"."""

    def refuses_fold(self, search: Any, config: Config) -> str:
        """Why it folds no norm under these choices; empty: it folds."""

    def fold_channels(self, values: Tensor, bits: int, search: Any) -> tuple[Fold, UniformQuantizer | None]:
        """The fold of a norm's channels (values: (T, C)), and the quantizer they then share, if it decides that."""

    def search_product(self, product: Product, search: Any) -> Assignment:
        """The quantizers of a product's operands."""


# One row per kind of choices in `Config.search`.
SEARCHES: dict[type[Any], SearchModule] = {
    Search: bounds,
    ReleasedSearch: released,
    RangeSearch: ranges,
    ScaleSearch: scales,
}
