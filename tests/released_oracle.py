"""What the released code of AdaLog computes: one value, one channel or one head at a time, in float64."""

import math

import torch

from problems import rounded

DELTA = 0.16997124254703522


def uniform(x, point, bits):
    s, z = point
    return s * ((rounded(x / s) + z).clamp(0, 2**bits - 1) - z)


def adalog(x, point, bits, delta=0.0):
    """With its tables T1 and T2, zero beyond the last code."""
    s, q = point
    last = 2**bits - 1
    k = rounded(-((x + delta) / s).clamp(1e-15, 1).log2() * 37 / q)
    t1 = torch.tensor([float(i * q // 37) for i in range(last + 1)], dtype=torch.float64)
    t2 = torch.tensor([round(2 ** -((i * q % 37) / 37) * 2 * last) / (2 * last) for i in range(last + 1)]).double()
    code = k.clamp(0, last).long()
    return torch.where(k > last, 0.0, s * 2.0 ** -t1[code] * t2[code]) - delta


def twin(x, positive, bits):
    h = 2 ** (bits - 1)
    negative = DELTA / h
    return positive * rounded(x / positive).clamp(0, h - 1) + negative * rounded(x / negative).clamp(-h, 0)


def quantile(values, p):
    ordered = sorted(values.flatten().tolist())
    place = p * (len(ordered) - 1)
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def grid(values, bits, zero_points, least=0.0):
    """128 (scale, zero point), scales running fastest, and the spacing of the scales."""
    h, top, count = 2 ** (bits - 1), 2**bits - 1, 128 // zero_points
    narrow = (quantile(values, 0.9) - quantile(values, 0.1)) / top
    wide = (quantile(values, 1) - quantile(values, 0)) / top
    scales = [max(narrow + i / (count - 1) * (wide - narrow), least) for i in range(count)]
    points = [(s, h - zero_points // 2 + j) for j in range(zero_points) for s in scales]
    return points, scales[1] - scales[0]


def children(parents, spacing, fan, least):
    return [(max(s + (t / (fan - 1) - 0.5) * spacing, least), z) for s, z in parents for t in range(fan)]


def refine(points, spacing, loss, steps, keep=16, least=0.0):
    """The best of the last step's points alone."""
    fan = 128 // keep
    for _ in range(steps):
        points = children(sorted(points, key=loss)[:keep], spacing, fan, least)
        spacing = spacing / (fan - 0.5)
    return min(points, key=loss)


def best_uniform(values, bits, zero_points, loss, search, least=0.0):
    points, spacing = grid(values, bits, zero_points, least)
    return refine(points, spacing, loss, search.steps - 1 if search.progressive else 0, least=least)


WEIGHTS = {3: 4, 4: 8, 6: 16, 8: 16}  # how many zero points
ACTIVATIONS = {3: 8, 4: 16, 6: 16, 8: 16}
MATMULS = WEIGHTS
CONVS = {3: 4, 4: 8, 6: 32}


def square(values):
    return float(values.square().sum())


def weights_by_own_error(weight, bits, search):
    return [
        best_uniform(row, bits, WEIGHTS[bits], lambda point, row=row: square(uniform(row, point, bits) - row), search)
        for row in weight
    ]


def weights_by_output(weight, x, x_hat, bits, search, zero_points=None):
    def loss(row):
        return lambda point: square(x_hat @ uniform(row, point, bits) - x @ row)

    return [best_uniform(row, bits, (zero_points or WEIGHTS)[bits], loss(row), search) for row in weight]


def by_rows(weight, points, bits):
    return torch.stack([uniform(row, point, bits) for row, point in zip(weight, points, strict=True)])


def linear_oracle(x, weight, bits, search):
    """(activation's point, weights' points)."""

    def activation(loss):
        return best_uniform(x, bits, ACTIVATIONS[bits], loss, search, least=1e-4)

    rows = weights_by_own_error(weight, bits, search)
    point = activation(lambda point: square(uniform(x, point, bits) - x))
    for _ in range(search.rounds):
        rows = weights_by_output(weight, x, uniform(x, point, bits), bits, search)
        w_hat = by_rows(weight, rows, bits)
        point = activation(lambda point, w_hat=w_hat: square(uniform(x, point, bits) @ w_hat.T - x @ weight.T))
    return point, rows


def fc2_oracle(x, weight, bits, search):
    """Activation before weights: q at the scale in hand, then scales for the best q."""
    positive = sorted(value for value in x.flatten().tolist() if value > 0)
    a, b = (positive[math.ceil(p * len(positive)) - 1] + DELTA for p in (0.9, 1.0))
    rows = weights_by_own_error(weight, bits, search)
    s, q = a + (b - a) * 126 / 127, 37
    for _ in range(search.rounds):
        w_hat = by_rows(weight, rows, bits)

        def loss(point, w_hat=w_hat):
            return square(adalog(x, point, bits, DELTA) @ w_hat.T - x @ weight.T)

        bases = sorted([(s, q) for q in range(10, 138)], key=loss)
        if search.progressive:
            points = [(a + (b - a) * i / 15, q) for _, q in bases[:8] for i in range(16)]
            s, q = refine(points, (b - a) / 15, loss, search.steps - 1, keep=32, least=1e-4)
        else:
            s, q = min([(a + (b - a) * i / 127, bases[0][1]) for i in range(128)], key=loss)
        rows = weights_by_output(weight, x, adalog(x, (s, q), bits, DELTA), bits, search)
    return (s, q), rows


def heads_by_output(values, others, others_hat, bits, search):
    """The best point of each head, the error summed over images and the whole output."""

    def loss(head):
        exact = values[:, head] @ others[:, head].mT
        return lambda point: square(uniform(values[:, head], point, bits) @ others_hat[:, head].mT - exact)

    return [
        best_uniform(values[:, head], bits, MATMULS[bits], loss(head), search, least=1e-4)
        for head in range(values.shape[1])
    ]


def by_heads(values, points, bits):
    return torch.stack([uniform(values[:, head], point, bits) for head, point in enumerate(points)], dim=1)


def start_of_heads(values, bits):
    return [grid(values[:, head], bits, MATMULS[bits], 1e-4)[0][126] for head in range(values.shape[1])]
