"""Text about what stays float names a reason once."""

from adalog.ledger import float_lines


def test_names_with_the_same_reason_share_a_line():
    refusals = {f"norm{number}": "not folded: this method does not fold norms" for number in range(5)}
    refusals["norm9"] = "not folded: it also feeds add.Tensor in blocks.0"
    refusals |= dict.fromkeys(("a.qk", "b.qk", "c.qk"), "stays float: its left operand is a stored tensor")
    assert float_lines(refusals, {"softmax": 2, "add": 1}) == [
        "not folded: norm0, norm1, norm2 and 2 more: this method does not fold norms",
        "not folded: norm9: it also feeds add.Tensor in blocks.0",
        "stays float: a.qk, b.qk, c.qk: its left operand is a stored tensor",
        "in float32, because adalog quantizes only linears, convolutions and matrix products: add x 1, softmax x 2",
    ]
