"""Every sentence of the pages that states a measured figure or an order says what the result files say.

The page must hold the sentences of each claim word for word, so that a file that was measured again fails here, with
the sentences that are right now. An order that the files no longer have fails with what they have instead. The last
test finds sentences with a figure or an order that no claim covers: add a claim, or the sentence to SETTINGS if its
numbers are not measured.
"""

import re

import pytest

import claims_accuracy  # noqa: F401 (it adds to CLAIMS)
import claims_budgets  # noqa: F401
import claims_speed  # noqa: F401
import claims_stages  # noqa: F401
from claims import CLAIMS, MEASURED, README, ROOT, plain
from claims_costs import COST

DECISIONS = sorted(f"docs/decisions/{page.name}" for page in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
STRICT = [MEASURED, README, COST, *DECISIONS]
# Pages whose numbers are mostly definitions: only what looks like a measurement needs a claim there.
PAGES = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
OTHERS = sorted(PAGES - {*STRICT} | {"CONTRIBUTING.md"})


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_the_page_says_what_the_files_say(claim):
    right, page = claim(), CLAIMS[claim]
    if not right:
        pytest.skip("no sentence is true of the files; the next test finds one that is left")
    assert right in plain((ROOT / page).read_text(encoding="utf-8")), f"{page} should say: {right}"


# --- what no claim covers ---

# Names and settings whose digits are no figures.
NAMES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|TinyViT-5M|ImageNet-22k|CIFAR-10|\b(?:FQ|Rep|PTQ4|APQ)\w*-?ViT|\bAVX[\w-]*|\blog-?(?:sqrt)?2\b"
    r"|\b[WA]\d+(?:/?A\d+)?\b|\bS[23]\b|\b\d+-bit\b|\b\d+ bits\b|\b(?:int|float|bf|bfloat|u)(?:8|16|32|64)\b"
    r"|\btop-1\b|Tables? \d|Eqs?\. \d+|\b(?=\d*[a-f])[0-9a-f]{7}\b"
)
FIGURE = re.compile(
    r"\d|%|\b(?:half|third|quarter|fifth|tenth|twice|best|worst|better|worse|faster|slower|ahead|behind|apart)\b"
    r"|\b(?:(?<!many )more|less|fewer|lowest|highest|level|equals?|loses?|lost|cannot be told)\b"
)
MEASUREMENT = re.compile(
    r"\d (?:times|%|CPU|s|ms|dB|points?|seconds?|minutes?)(?!\w)|\bas (?:fast|quick|slow) as\b"
    r"|\b(?:faster|slower|quicker) than\b|\b(?:half|third|quarter|fifth|tenth) of the time\b|cannot be told"
)
# Sentences of a page whose numbers and orders are settings, definitions or facts about code and papers.
SETTINGS: dict[str, str] = {
    MEASURED: """
        - Where a file names no later commit, its seconds are of the slower search, and its accuracies are of
          slightly other quantizers.
        - A ViT of our own (192 wide, 6 deep) on CIFAR-10.
        - each query image takes the label of the nearest of 1,000 support images, one per class.
        - Its widest scale spans a row's values from the smallest to the largest, and that range need not
          include zero; its zero points are at most 16 whole numbers around the middle code, at most 64 for the
          weights of a convolution.
        - the released search tries only 16 zero points of 256 and no base below 2^(10/37).
        - `evol-q` moves FQ-ViT's scales by the model's own loss on 32 images.
        - These are the sites where `adalog` has the lowest signal-to-noise ratio on the calibration images:
        - repq-vit takes its scales from the values alone, by percentiles for weights and activations alike,
          where ptq4vit searches both for the error of the output.
        - The table gives the milliseconds that our kernels take for a batch, and that time divided by each
          peer's (below 1:
        - we are faster).
        - Each channel's range behind a norm is its own, as the paper has it; `adalog` changes that above 4 bits
          ("Folding norms" below).
        - The milliseconds are CPU time in every row; the ratios are of CPU time on one thread and of wall time on
          several. "Error" is the relative error of the logits to the float model; that of a peer stands in brackets
          behind its ratio.
        - The widths are 2, 3, 4, 6 and 8 bits on the bundled model, and 3, 4, 6 and 8 on TinyViT.
        - The direct search runs twice:
        - equals:
        - six steps of 128 candidates and up to three rounds, as the released code has, in float32 and with
          compiled kernels.
        - The direct search with compiled kernels is its equal, so this ratio, in bold, leaves only the difference
          between the two methods.
        - the share of activations' codes that differ, the median over images of the logits' relative error, and
          equal answers.
        - A candidate counts when its error on the site's output is computed, and equal ones of a step count once;
          one for a weight sets the parameters of all its rows and counts once. "On a sample" is the share of
          candidates that were scored on a sample of the rows; the others were scored on all there.
        - The second table has images per CPU second on DeiT-S's shapes, with random weights and tables of 8 bits,
          and in brackets the ratio to fp32 PyTorch.
        - Its rows, and the figures of `-full-before`, are of the search before [its samples were halved and equal
          candidates were scored once](decisions/07-rough-steps.md).
    """,
    README: """
        - `adalog` turns a trained vision transformer into one whose linears, convolutions and attention
          products work on 2- to 8-bit codes, calibrated from 32 unlabelled images, without training and without
          a GPU.
        - It implements the system of [AdaLog](https://arxiv.org/abs/2407.12951) (Wu et al., ECCV 2024).
        - Both need `python3` (3.10 or later) with `venv`, and `make`; both install packages from the index, and
          download neither data nor weights.
        - "x 576" counts scales:
        - one per output channel of a weight, one per head in attention. "log 2^(17/37) u8" is a logarithmic
          quantizer of base 2^(17/37) whose levels are integers of 8 bits.
        - After SiLU, hard-swish and mish, and after GELU before a grouped convolution, a uniform quantizer is
          searched too, and the better of the two is kept ([why](docs/captured.md)).
        - Fast Progressive Combining Search (FPCS, the paper's Algorithm 1) finds the parameters by the error of
          each multiplication's output.
        - The package brings 2,000 test images and 1,024 training images of CIFAR-10, and the weights of a ViT that
          we trained on CIFAR-10's training set (`src/adalog/inputs/demo`), and of a small detector
          (`src/adalog/detection/demo`).
        - For your own model, pass an `nn.Module`, and images (N, 3, H, W) normalised as it wants.
        - each of 1,000 photographs, the queries, takes the label of the nearest of 1,000 others, the support
          images, one per ImageNet class.
        - The method `adalog+` corrects weights in closed form after the search, from 128 images by default, and
          `adalog++` trains blocks and the model by gradients after that, from 1,024 ([what is measured of
          both](docs/measured.md)).
        - a ViT of our own on CIFAR-10 (192 wide, 6 deep), which is bundled, and TinyViT-5M, pretrained on
          ImageNet-22k.
        - `.compile("native")` runs the products on integers, on x86 CPUs under Linux (AMX, AVX-512-VNNI, AVX2,
          or without any of these) and on ARM, whose kernels were tested under emulation and never timed;
          `.compile("torch")` does so with PyTorch's products, wherever PyTorch runs.
        - It was tried on Linux on x86-64 only.
    """,
    COST: """
        - A product of b1 by b2 bits is therefore b1 · b2 / 64 FixOPs, and a product of two float32 numbers 16.
        - BOPs are b1 · b2, so a FixOP is 64 BOPs.
        - Figures are millions of FixOPs unless a row says otherwise; a MB is 10⁶ bytes.
        - Tables. "About 3KB" for 12 layers, each with four tables of 16 entries, means 4 bytes per entry.
    """,
    "docs/decisions/16-the-released-code-apart.md": """
        - `test_rough_losses_of_large_operands_end_at_no_worse_points` holds the shortcut within 0.005 dB.
    """,
    "docs/format.md": """
        - Loading takes at most some 60 times the file's size, and 64 MiB, in memory:
    """,
    "docs/integer.md": """
        - It searches base, scale and headroom with a u8 table in the loop, and keeps that table if the output's
          error is at most 3 % above the error of float levels; otherwise it does the same with u16.
    """,
    "docs/how-to/add-a-method.md": """
        - Here is a made-up method that takes 99.99 % percentiles everywhere and keeps weights symmetric:
    """,
    "docs/how-to/run-on-a-gpu.md": """
        - On the emulated device the search of one product waits for the device, and copies, at most 100 times each
          (`tests/test_device.py`); nobody has timed it on a GPU.
    """,
}


def sentences(page: str) -> list[str]:
    """The sentences of a page's prose, those of a decision from its evidence alone."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if "/decisions/" in page:
        text = text.partition("## Evidence")[2]
    for block in (r"<!-- [\w ]+ -->.*?<!-- end -->", r"```.*?```", r"^#.*?$", r"^\|.*?$"):
        text = re.sub(block, "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    items = (plain(item).removeprefix("- ") for item in re.split(r"\n\s*\n|\n(?=\s*- )", text))
    return [sentence for item in items for sentence in re.split(r"(?<=[.!?:]) (?=[\w`(\[])(?<!Eq\. )(?<!Eqs\. )", item)]


def uncovered(page: str, figure: re.Pattern[str] = FIGURE) -> list[str]:
    """Sentences with a figure or an order that no claim returns."""
    claims = [plain(claim()) for claim, other in CLAIMS.items() if other == page]
    whole, found = " ".join(claims), []
    for sentence in sentences(page):
        rest = sentence
        for claim in claims:
            rest = rest.replace(claim, "")
        if sentence not in whole and figure.search(NAMES.sub("", rest)):
            found.append(sentence)
    return found


@pytest.mark.parametrize("page", STRICT + OTHERS)
def test_every_figure_is_claimed(page):
    found = uncovered(page, FIGURE if page in STRICT else MEASUREMENT)
    settings = [plain(item) for item in SETTINGS.get(page, "").split("        - ")[1:]]
    missing = [sentence for sentence in found if sentence not in settings]
    assert not missing, "\n".join([f"no claim covers what {page} states:", *missing])
    gone = [sentence for sentence in settings if sentence not in found]
    assert not gone, "\n".join([f"SETTINGS has what is no longer on {page}:", *gone])


def test_a_sentence_without_a_claim_is_found(monkeypatch, tmp_path):
    (tmp_path / "page.md").write_text(
        "# 1 page\n\nNothing here. `adalog` at W4A4\nloses 3 points. Both\nare level.\n\n| 5 |\n\n"
        "- It is twice as fast: 4 ms.\n- No figure.\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert uncovered("page.md") == [
        "`adalog` at W4A4 loses 3 points.",
        "Both are level.",
        "It is twice as fast:",
        "4 ms.",
    ]
    assert uncovered("page.md", MEASUREMENT) == ["`adalog` at W4A4 loses 3 points.", "4 ms."]
