"""Models of every output are judged alike; intervals, tests and divergences are what their definitions say."""

import collections
import math
import threading
import time
from dataclasses import fields, replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from adalog import DataError, Resources
from adalog.graph.program import ModelOutput
from adalog.study.evaluate import Contest, Nearest, PreparedImages, Score, mcnemar, predict, score, tally, wilson

# --- predict ---------------------------------------------------------------------------------------------------------


Named = collections.namedtuple("Named", ["aux", "logits"])
STRUCTURES = {
    "tensor": lambda logits: logits,
    "record": lambda logits: SimpleNamespace(loss=None, logits=logits),
    "dict": lambda logits: {"hidden": None, "logits": logits},
    "output": lambda logits: ModelOutput(logits=logits, hidden=None),
    "named tuple": lambda logits: Named(logits[:, :1], logits),
    "tuple": lambda logits: (logits, None),
    "list": lambda logits: [logits],
    "half": lambda logits: logits.half(),
    "double": lambda logits: logits.double(),
}


class Model(nn.Module):
    """Logits that tell the images apart, in a structure; counts its calls."""

    def __init__(self, wrap=lambda logits: logits, classes=7):
        super().__init__()
        self.wrap = wrap
        self.weight = torch.randn(3, classes, generator=torch.Generator().manual_seed(0))
        self.batches = []

    def forward(self, images):
        assert not torch.is_grad_enabled()
        self.batches.append(len(images))
        return self.wrap(images.mean(dim=(2, 3)) @ self.weight)


IMAGES = torch.randn(11, 3, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", STRUCTURES)
def test_logits_of_every_structure(name):
    found = predict(Model(STRUCTURES[name]), IMAGES, batch=4)
    assert found.dtype == torch.float32
    tolerance = 1e-2 if name == "half" else 1e-6
    torch.testing.assert_close(found, IMAGES.mean(dim=(2, 3)) @ Model().weight, atol=tolerance, rtol=tolerance)


def test_logits_of_hugging_face():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 4, "patch_size": 2, "hidden_size": 8, "intermediate_size": 8, "num_labels": 3}
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=1, **sizes)).eval()
    with torch.no_grad():
        want = model(IMAGES).logits
    torch.testing.assert_close(predict(model, IMAGES, batch=4), want)


@pytest.mark.parametrize("jobs", [1, 3])
def test_batches_give_the_same_in_order(jobs):
    model = Model()
    want = predict(model, IMAGES, batch=len(IMAGES))
    assert torch.equal(predict(model, IMAGES, batch=4, jobs=jobs), want)
    assert sorted(model.batches) == [3, 4, 4, 11]


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (lambda logits: logits[:, :, None], r"for 4 images the model returned torch\.float32 \(4, 7, 1\), not logits"),
        (lambda logits: logits[:-1], r"\(3, 7\), not logits \(4, classes\): give a classifier"),
        (lambda logits: logits.argmax(1), r"torch\.int64 \(4,\)"),
        (lambda logits: logits.long(), r"torch\.int64 \(4, 7\)"),
        (lambda logits: logits.sum(), r"torch\.float32 \(\)"),
        (lambda _: {"hidden": 1}, "returned dict, not"),
        (lambda _: (), "returned tuple, not"),
        (lambda _: ("text",), "returned tuple, not"),
        (lambda _: None, "returned NoneType, not"),
        (lambda logits: logits / 0 * 0, "Model returned NaN: check its weights"),
    ],
)
def test_other_outputs_are_refused(wrap, told):
    with pytest.raises(DataError, match=told):
        predict(Model(wrap), IMAGES, batch=4)


def test_no_images_are_refused():
    with pytest.raises(DataError, match="no images"):
        predict(Model(), IMAGES[:0])


class Watched:
    """A model that notes how many of its batches run at once."""

    def __init__(self):
        self.now, self.most, self.lock = 0, 0, threading.Lock()

    def __call__(self, images):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self.lock:
            self.now -= 1
        return images.flatten(1)[:, :7]


def test_networks_answer_side_by_side_or_in_turn():
    images = torch.randn(90, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, 7, (90,), generator=torch.Generator().manual_seed(1))
    networks, done = (Watched(), Watched()), []
    contest = Contest(networks, (True, False))
    tallies = contest.tallies(PreparedImages(images), labels, Resources(3, progress=lambda *each: done.append(each)))
    assert networks[0].most == 1
    assert (len(done), done[-1], done) == (5, (90, 90, ""), sorted(done))
    answers = predict(networks[1], images)
    whole = tally(answers, labels, answers)
    assert tallies[0] == replace(whole, kl=pytest.approx(whole.kl, abs=1e-9))
    assert tallies[1] == tally(answers, labels)
    with pytest.raises(DataError, match="no images"):
        contest.tallies(PreparedImages(images[:0]), labels[:0])


# --- intervals and tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hits", "count"), [(0, 1), (1, 1), (0, 10), (3, 10), (500, 1000), (1811, 2000), (2000, 2000)])
def test_wilson_inverts_the_score_test(hits, count):
    """The proportions that a z-test with their own variance does not reject, found by bisection."""

    def z_squared(share):
        variance = share * (1 - share) / count
        return math.inf if variance == 0 else (hits / count - share) ** 2 / variance

    def boundary(inside, outside):
        for _ in range(100):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if z_squared(middle) <= 1.959964**2 else (inside, middle)
        return inside

    low = 0.0 if hits == 0 else boundary(hits / count, 0.0) if hits < count else boundary(1 - 1e-15, 0.0)
    high = 1.0 if hits == count else boundary(hits / count, 1.0) if hits else boundary(1e-15, 1.0)
    found = wilson(hits, count)
    assert found == pytest.approx((low, high), abs=1e-9)
    assert 0.0 <= found[0] <= hits / count <= found[1] <= 1.0


@pytest.mark.slow
@settings(max_examples=100)
@given(lost=st.integers(0, 40), gained=st.integers(0, 40))
def test_mcnemar_is_a_fair_coins_two_tails(lost, gained):
    """The probability of every split that is no likelier than the one that was seen."""
    count = lost + gained
    row = [Fraction(math.comb(count, successes), 2**count) for successes in range(count + 1)]
    want = sum(chance for chance in row if chance <= row[lost])
    assert mcnemar(lost, gained) == pytest.approx(float(want), rel=1e-12)
    assert mcnemar(lost, gained) == mcnemar(gained, lost)


def test_mcnemar_by_hand():
    assert mcnemar(0, 0) == mcnemar(0, 1) == mcnemar(5000, 5000) == 1.0
    assert (mcnemar(6, 0), mcnemar(1, 5)) == (2 / 64, 2 * 7 / 64)
    assert 0 <= mcnemar(5000, 300) < 1e-300  # beyond what floats can hold


# --- score -----------------------------------------------------------------------------------------------------------


def logits(count, classes, seed):
    return torch.randn(count, classes, generator=torch.Generator().manual_seed(seed))


def test_everything_by_hand():
    """Loops over images in float64."""
    answers, reference = logits(60, 8, 0), logits(60, 8, 0) + logits(60, 8, 1)
    labels = [index % 8 for index in range(60)]
    result = score(answers, labels, reference)
    counts = collections.Counter()
    divergence = 0.0
    for x, y, label in zip(answers.numpy(), reference.numpy(), labels, strict=True):
        order, other = np.argsort(-x), np.argsort(-y)
        first, before = int(order[0] == label), int(other[0] == label)
        counts.update(top1=first, top5=int(label in order[:5]), same=int(order[0] == other[0]))
        counts.update(lost=before * (1 - first), gained=first * (1 - before))
        p, q = (np.exp(z.astype(np.float64)) / np.exp(z.astype(np.float64)).sum() for z in (y, x))
        divergence += (p * np.log(p / q)).sum()
    assert 0 < counts["lost"] != counts["gained"] > 0
    assert result.images == 60
    for share, hits in ((result.top1, counts["top1"]), (result.top5, counts["top5"])):
        assert (share.value, (share.low, share.high)) == (hits / 60, wilson(hits, 60))
    assert result.agreement == counts["same"] / 60
    assert result.kl == pytest.approx(divergence / 60, rel=1e-10)
    assert (result.lost, result.gained) == (counts["lost"], counts["gained"])
    assert result.p_value == mcnemar(counts["lost"], counts["gained"])
    by_class = score(answers.argmax(1), torch.tensor(labels), reference.argmax(1))
    for field in fields(Score):
        want = None if field.name in ("top5", "kl") else getattr(result, field.name)
        assert getattr(by_class, field.name) == want
    mixed = score(answers, labels, reference.argmax(1))
    assert (mixed.kl, mixed.lost, mixed.agreement) == (None, result.lost, result.agreement)


def test_what_is_not_known_is_none():
    answers = logits(5, 6, 0)
    assert score(answers) == Score(5)
    labelled = score(answers, [0] * 5)
    assert labelled.top5 is not None
    assert labelled == Score(5, labelled.top1, labelled.top5)
    compared = score(answers, None, answers)
    assert compared == Score(5, agreement=1.0, kl=0.0)
    assert score(answers[:, :5], [0] * 5).top5 is None


def test_divergence_of_a_class_that_never_is():
    never, even = torch.tensor([[0.0, -math.inf]]), torch.zeros(1, 2)
    assert score(even, None, never).kl == pytest.approx(math.log(2))
    assert score(never, None, even).kl == math.inf


def test_divergence_of_more_images_than_are_judged_at_once():
    answers, reference = logits(2500, 3, 0), logits(2500, 3, 1)
    logs = [given.double().log_softmax(1) for given in (answers, reference)]
    want = nn.functional.kl_div(*logs, log_target=True, reduction="batchmean")
    assert score(answers, None, reference).kl == pytest.approx(want.item(), rel=1e-12)


def test_equal_logits_count_in_the_order_of_classes():
    """A model that says nothing is right about the classes it happens to name, and no others."""
    answers = torch.zeros(10, 10)
    result = score(answers, range(10), answers)
    assert (result.top1.value, result.top5.value) == (0.1, 0.5)
    assert result.top1.value == (answers.argmax(1) == torch.arange(10)).double().mean()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((torch.zeros(3, 4), [0, 1, 4]), "label 4 is not a class of the model, 0 to 3"),
        ((torch.zeros(3, 4), [0, -1, 2]), "label -1 is not a class"),
        ((torch.zeros(3, dtype=torch.long), [0, -1, 2]), "label -1 is not a class"),
        ((torch.zeros(3, 4), [0, 1]), r"3 predictions have labels of the shape \(2,\)"),
        (
            (torch.zeros(3, 4), None, torch.zeros(2, 4)),
            r"\(3, 4\) cannot be compared with full-precision ones \(2, 4\)",
        ),
        ((torch.zeros(3, 4), None, torch.zeros(3, 5)), "cannot be compared"),
        ((torch.zeros(0, 4), []), "no predictions"),
        ((torch.eye(4), torch.zeros(4)), "give the number of each image's class as an integer"),
        ((torch.eye(4), torch.zeros(4, dtype=torch.bool)), "give the number of each image's class as an integer"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, told):
    with pytest.raises(DataError, match=told):
        score(*arguments)


# --- nearest neighbours ----------------------------------------------------------------------------------------------


def test_nearest_is_a_loop():
    support, query = logits(30, 6, 0) + 3, logits(1500, 6, 1) + 3
    labels = torch.randint(0, 9, (30,), generator=torch.Generator().manual_seed(2))
    known, asked = support.double().numpy(), query.double().numpy()
    mean = known.mean(axis=0)
    want = []
    for row in asked[::50] - mean:
        cosines = [row @ other / np.linalg.norm(row) / np.linalg.norm(other) for other in known - mean]
        want.append(int(labels[int(np.argmax(cosines))]))
    found = Nearest(support, labels)(query)
    assert found[::50].tolist() == want
    assert score(found[::50], [*want[:-3], 9, 9, 9]).top1.value == 0.9


@pytest.mark.parametrize(
    ("support", "labels", "query", "told"),
    [
        (torch.zeros(3, 4), [0, 1], torch.zeros(2, 4), r"3 support features have labels of the shape \(2,\)"),
        (torch.zeros(0, 4), [], torch.zeros(2, 4), "0 support features"),
        (torch.zeros(2, 4), [0, 1], torch.zeros(2, 5), r"\(2, 4\) and \(2, 5\) cannot be compared"),
        (torch.zeros(2, 4, 1), [0, 1], torch.zeros(2, 4, 1), "cannot be compared"),
    ],
)
def test_features_that_do_not_fit_are_refused(support, labels, query, told):
    with pytest.raises(DataError, match=told):
        Nearest(support, labels)(query)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_logits_that_are_no_numbers_are_never_right(dtype):
    answers = torch.eye(4)
    answers[1] = answers[2, 0] = math.nan
    assert score(answers, torch.arange(4, dtype=dtype)).top1.value == 0.5
