"""Reports: what a page says is what the file holds, it asks nothing of a network, and nothing hostile in it runs."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from adalog import Calibration, Config, artifact
from adalog.calibration.operands import operand_kinds
from adalog.errors import ArtifactError, DataError
from adalog.quantizers import FLOAT_BITS
from adalog.report import comparison, examine, read_bench, read_evaluation, read_sensitivity, report
from adalog.report.page import _command
from adalog.report.sites import BARS
from adalog.study.cost import cost
from adalog.study.evaluate import score
from adalog.study.sensitivity import Row, Sensitivity, Unit, UnitSite, _choices
from commands import refusal, say
from problems_report import HOSTILE, hostile, subject_of
from stored import rebuilt, serialise


class Page(HTMLParser):
    """The tags of a page with their attributes, its text, and the texts of the cells of its table of sites."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.words, self.lines, self._inside = [], [], [], None
        self.feed(content.decode())
        self.text = "".join(self.words)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self._inside = [] if dict(attrs).get("id", "").startswith("row-") else None
            self.lines += [] if self._inside is None else [self._inside]
        elif tag in ("td", "th") and self._inside is not None:
            self._inside.append("")

    def handle_endtag(self, tag):
        if tag == "tr":
            self._inside = None

    def handle_data(self, data):
        self.words.append(data)
        if self._inside:
            self._inside[-1] += data.strip()

    def all(self, *names):
        return [attributes for tag, attributes in self.tags if tag in names]


@pytest.fixture(scope="module")
def subject(content):
    return subject_of(content, images=4)


def told_of(rows, quantized):
    """The JSON of `adalog sensitivity` of this model with these rows: (sites, operand, bits, loss)."""
    kinds, macs = {}, {row.name: row.count for row in cost(quantized.program, quantized.example).products}
    for sites, operand, _, _ in rows:
        kinds.setdefault(tuple(sites), []).append(operand)
    units = tuple(
        Unit(tuple(UnitSite(site, macs.get(site, 1), 1, operands[0], operands[-1]) for site in sites))
        for sites, operands in kinds.items()
    )
    found = tuple(Row(sites[0], operand, bits, loss, (bits,) * len(sites)) for sites, operand, bits, loss in rows)
    return Sensitivity("kl", 256, units, found, "0" * 64, _choices(quantized.config)).to_json()


def losses_of(quantized):
    """The same at all widths, with losses that are made up."""
    return told_of(
        [
            ([row.site], kind, bits, 0.0123456789 * 0.5**bits)
            for row in quantized.ledger
            for kind in dict.fromkeys(operand_kinds(row.role, row.source))
            for bits in range(2, 9)
        ],
        quantized,
    )


@pytest.fixture(scope="module")
def digest(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def measured(quantized, digest, tmp_path_factory):
    """What other commands measured of the same file, by option."""
    folder = tmp_path_factory.mktemp("measured")
    answers = torch.eye(8)[torch.arange(40) % 8]
    judged = score(answers, torch.arange(40) % 7, answers.roll(1, 0))
    sites = artifact.describe(quantized.quantized)["sites"]
    row = {"executor": "native", "batch": 4, "cpu_ms": 8.0, "wall_ms": 9.0, "images_per_second": 444.4, "repeats": 5}
    rows, file = [row | {"weight_bytes": 7, "load_seconds": None}], "where/it/lies.safetensors"
    told = {
        "evaluation": {"file": file, "executor": None, "reference": "demo", **asdict(judged)}
        | {"full_precision": asdict(judged), "sites": sites},
        "bench": {"file": file, "sha256": digest, "threads": 1, "rows": rows, "absent": {"torch": "no reason"}},
        "sensitivity": losses_of(quantized.quantized),
    }
    for name, value in told.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return {name: folder / f"{name}.json" for name in told}


def report_of(subject, measured, digest):
    """The page with all that there can be on it."""
    return report(
        subject,
        sensitivity=read_sensitivity(measured["sensitivity"], subject.quantized),
        evaluation=read_evaluation(measured["evaluation"], subject.quantized),
        bench=read_bench(measured["bench"], digest),
    )


@pytest.fixture(scope="module")
def whole(subject, measured, digest):
    return report_of(subject, measured, digest)


# --- the file that it is ---------------------------------------------------------------------------------------------


def check_alone(content):
    """The page fetches nothing: it has one script, which its policy names, and links to places of its own."""
    page, text = Page(content), content.decode()
    assert not page.all("link", "img", "iframe", "object", "embed", "base", "form")
    assert not [each for _, each in page.tags if {"src", "srcset", "action", "xlink:href"} & each.keys()]
    assert not [name for _, each in page.tags for name in each if name.startswith("on")]
    places = {each["id"] for _, each in page.tags if "id" in each}
    assert {each["href"] for each in page.all("a")} <= {f"#{place}" for place in places}
    assert not re.search(r"url\(|@import|https?:|//\w+\.", re.sub(r"<td>.*?</td>", "", text))
    data, script = page.all("script")
    assert data == {"type": "application/json", "id": "data"}
    assert script == {}
    (policy,) = (each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    code = text.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}';" in policy


def test_a_page_asks_nothing_of_a_network(whole, subject, twin_content):
    check_alone(whole)
    check_alone(comparison(subject, subject_of(twin_content)))


def test_the_same_input_gives_the_same_bytes(whole, content, measured, digest):
    assert report_of(subject_of(content, images=4), measured, digest) == whole


def test_what_a_screen_reader_needs(whole):
    page = Page(whole)
    assert all(each.get("scope") in ("col", "row") for each in page.all("th"))
    assert all("aria-label" in each for each in page.all("svg") if each["class"] == "model")
    pictures = whole.decode().split('role="img">')[1:]
    assert len(pictures) > 20
    assert all(picture.startswith("<title>") for picture in pictures)
    boxes = [each for each in page.all("div") if "scroll" in each.get("class", "").split()]
    assert all(each.items() >= {"tabindex": "0", "role": "region"}.items() and each["aria-label"] for each in boxes)
    assert page.all("html") == [{"lang": "en"}]


@pytest.mark.slow
def test_the_page_of_deit_s_is_small(tmp_path):
    """With all that there can be on it, and 4 bits with a scale per head, whose levels are the most that stay apart."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("deit_small_patch16_224").eval()
    images = torch.randn(2, 3, 224, 224)
    made = Calibration(model, images).quantize(replace(Config.preset("w4a4", "minmax"), images=2, per_head=True))
    (tmp_path / "sensitivity.json").write_text(json.dumps(losses_of(made.quantized)))
    page = report(
        examine("deit.safetensors", serialise(made), made.quantized, images[:1]),
        sensitivity=read_sensitivity(tmp_path / "sensitivity.json", made.quantized),
    )
    assert len(Page(page).lines) == 74
    assert len(page) <= 300_000


# --- hostile text ----------------------------------------------------------------------------------------------------


def test_hostile_text_is_shown_and_does_nothing(content, tmp_path, measured, digest):
    told = json.loads(measured["bench"].read_text())
    told |= {"file": HOSTILE[2], "absent": {HOSTILE[0]: HOSTILE[1]}}
    told["rows"][0]["executor"] = HOSTILE[1]
    (tmp_path / "bench.json").write_text(json.dumps(told))
    subject = hostile(content)
    for made in (report(subject, bench=read_bench(tmp_path / "bench.json", digest)), comparison(subject, subject)):
        check_alone(made)
        page = Page(made)
        assert [line[1] for line in page.lines[: len(HOSTILE)]] == list(HOSTILE)
        for name in HOSTILE:
            assert page.text.count(name) >= 4
        text = made.decode()
        data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
        assert [row["site"] for row in data[: len(HOSTILE)]] == list(HOSTILE)


def test_text_that_is_no_text_does_no_harm(content):
    """The name of a file need not be valid."""
    assert b"\\udcff" in report(subject_of(content, "bad\udcff.safetensors"))


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_table_has_every_site_without_a_script(whole, subject):
    lines = Page(whole).lines
    assert [line[1] for line in lines] == [row.site for row in subject.quantized.ledger]
    for line, site in zip(lines, subject.sites, strict=True):
        row = site.row
        assert line[2:7] == [row.role, row.source, site.bits, row.left, row.right]
        assert line[7] == f"{row.sqnr:.1f}"
        assert line[-1] == f"{site.weight_bytes:,}"


def test_sites_cost_what_the_model_costs(subject):
    spent = cost(subject.quantized.program, [(3, 32, 32)])
    assert sum(site.fixops for site in subject.sites) == spent.fixops
    assert sum(site.weight_bytes for site in subject.sites) == sum(row.weight_bytes for row in spent.products)
    assert [site.block for site in subject.sites] == [0] * 3 + [1] * 6 + [2] * 6 + [3]


def test_bars_count_every_value_and_every_code(subject):
    program = subject.quantized.program
    for site in subject.sites:
        assert site.bits == ("8 × 4" if site.left.kind == "input" else "4 × 4")
        for operand in site.operands:
            if operand.weight is not None:
                assert operand.kind == "weight"
                codes = program.weights[f"{site.row.site}.weight"].codes
                assert operand.code_counts.tolist() == [int((codes == code).sum()) for code in range(16)]
            else:
                assert operand.histogram.least <= operand.histogram.greatest
    qk = next(site for site in subject.sites if site.row.role == "qk")
    assert len(qk.left.levels) == 2  # heads
    assert int(qk.left.histogram.counts.sum()) == 4 * 64 * 32  # images, tokens, channels


def test_eight_bits_and_float(tiniest, images):
    """Codes of 8 bits share bars. Of what stays float the page says why, be it one operand or a whole site."""
    config = replace(Config.preset("w8a8", "minmax"), images=4, input_bits=32, pinned=(("blocks.0.mlp.fc1", 32),))
    made = Calibration(tiniest, images).quantize(config)
    subject = subject_of(serialise(made))
    head = subject.sites[-1].right
    counts = torch.bincount(head.weight.codes.flatten().int(), minlength=256)
    assert head.code_counts.tolist() == counts.reshape(BARS, 4).sum(1).tolist()
    page = Page(report(subject))
    lines = {line[1]: line for line in page.lines}
    assert lines["blocks.0.mlp.fc1"][4:8:3] == ["float × float", "–"]
    assert lines["patch_embed.conv1"][4] == "float × 8"
    why = re.findall(r"<tr><td>stays float</td><th scope=.row.>(.*?)</th><td>(.*?)</td></tr>", report(subject).decode())
    assert why == [
        ("blocks.0.mlp.fc1", "pinned at 32 bits"),
        ("patch_embed.conv1", "the settings give its left operand 32 bits"),
    ]
    assert "--pin blocks.0.mlp.fc1=32" not in page.text  # the bits of images are those of no method


def test_a_ledger_that_names_other_sites_is_shown_as_it_is(content):
    """Or as empty as it is."""
    row = ["nowhere", "linear", "other", "some", "words", {"float": "nan"}]
    for ledger, expected in (([], []), ([row], [["nowhere", "linear", "other", "? × ?", "some", "words", "–"]])):
        file = rebuilt(content, lambda header, ledger=ledger: header.update(ledger=ledger))
        assert [line[1:8] for line in Page(report(subject_of(file))).lines] == expected


def test_a_program_that_nothing_here_would_make_is_refused(content):
    """It runs, but its product takes operands by name."""

    def change(header):
        node = next(node for node in header["nodes"] if node[1] == "aten.linear.default")
        node[3] = dict(zip(("input", "weight", "bias"), node[2], strict=True))
        node[2] = []

    with pytest.raises(ArtifactError, match=r"^odd holds a program that a report cannot show \(IndexError"):
        subject_of(rebuilt(content, change), "odd")


def test_what_is_measured_is_shown(whole, subject):
    text, bare = Page(whole).text, Page(report(subject)).text
    evaluated, timed = ("17.50 %", "McNemar's exact test", "lies.safetensors"), ("native", "2.25 ms")
    for words in (*evaluated, *timed, "torch was not measured: no reason"):
        assert words in text
    assert "where/it" not in text
    assert "--evaluation EVALUATION" in bare
    assert "--bench TIMES" in bare


def test_the_command_that_made_it(subject, content):
    quantized = subject.quantized
    assert _command(subject) is None  # the search was cut short
    assert "do not belong to a method" in Page(report(subject)).text
    config = Config.preset("w4a4s3", "adalog+").with_fitted_images(64)
    config = replace(config, images=16, pinned=(("head", 8), ("a b", 32)))
    made = replace(subject, quantized=replace(quantized, config=config, provenance={"seed": 3}), name="my file")
    assert _command(made) == (
        "adalog quantize MODEL --data IMAGES --bits w4a4s3 --method adalog+ --images 16 --reconstruct-images 64 "
        "--seed 3 --pin head=8 --pin 'a b=32' -o 'my file'"
    )
    config = Config.preset("w3a3", "adalog++").with_training(400, 16)
    trained = replace(subject, quantized=replace(quantized, config=config, provenance={}), name="file")
    assert _command(trained) == (
        "adalog quantize MODEL --data IMAGES --bits w3a3 --method adalog++ --images 32 --reconstruct-steps 400 "
        "--reconstruct-batch 16 -o file"
    )


# --- sensitivity -----------------------------------------------------------------------------------------------------


def sensitivity_of(tmp_path, quantized, rows):
    path = tmp_path / "sensitivity.json"
    path.write_text(json.dumps(told_of(rows, quantized)))
    return read_sensitivity(path, quantized)


def test_losses_are_those_of_the_bits(subject, tmp_path):
    """A loss that sites have in common counts once; both operands of Q K have one."""
    qkv, qk, av, proj = subject.sites[3:7]
    rows = [
        ([qkv.row.site, proj.row.site], "activation", 4, 0.5),
        ([qkv.row.site, proj.row.site], "weight", 4, 0.25),
        ([qk.row.site], "activation", 4, 0.125),
        ([av.row.site], "softmax", 4, 0.0625),
        ([av.row.site], "activation", 3, 0.03125),
    ]
    found = sensitivity_of(tmp_path, subject.quantized, rows)
    assert [found.loss_of(site) for site in (qkv, qk, av, proj)] == [0.75, 0.125, None, 0.75]
    assert found.total(subject.sites) == 0.5 + 0.25 + 0.125 + 0.0625
    lines = Page(report(subject, sensitivity=found)).lines
    assert [line[8] for line in lines[3:7]] == ["0.75", "0.125", "–", "0.75"]


def test_an_operand_in_float_has_no_loss(subject, tmp_path):
    site = subject.sites[3]
    loose = replace(site, left=replace(site.left, bits=FLOAT_BITS))
    found = sensitivity_of(tmp_path, subject.quantized, [([site.row.site], "weight", 4, 0.25)])
    assert found.loss_of(loose) == 0.25
    assert found.loss_of(site) is None


# --- two files -------------------------------------------------------------------------------------------------------


def test_two_files_side_by_side(content, twin_content):
    """Their sites are joined by name; what one file does not have is a dash."""

    def change(header):
        del header["ledger"][1]
        header["ledger"].append(["more", "linear", "other", "a", "b", 3.0])

    first, second = subject_of(content, "a"), subject_of(rebuilt(twin_content, change), "b")
    made = comparison(first, second)
    page = Page(made)
    rows = {row.site: row for row in second.quantized.ledger}
    assert [line[1] for line in page.lines] == [*(row.site for row in first.quantized.ledger), "more"]
    gone, kept, more = page.lines[1], page.lines[8], page.lines[-1]
    assert gone[3:5] == ["4 × 4", "–"]
    assert gone[7] == "–"
    assert more[3:8] == ["–", "? × ?", "–", "3.0", "–"]
    site = first.sites[8]
    gain = rows[site.row.site].sqnr - site.row.sqnr
    assert kept[5:8] == [f"{site.row.sqnr:.1f}", f"{rows[site.row.site].sqnr:.1f}", f"{gain:+.1f}"]
    assert kept[8:] == [f"{site.weight_bytes:,}"] * 2 + ["0"]
    marked = {attributes["id"] for tag, attributes in page.tags if tag == "tr" and attributes.get("class") == "differs"}
    assert {"row-1", f"row-{len(page.lines) - 1}"} < marked
    assert "row-0" not in marked
    assert f"{len(second.content) - len(first.content):+,}" in page.text
    assert re.search(r"post_gelu</th><td>adalog</td><td>twin", made.decode())


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, content, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file.safetensors").write_bytes(content)
    return "file.safetensors"


def test_the_command_writes_the_page(file, measured, monkeypatch, capsys, whole):
    given = [word for name, path in measured.items() for word in (f"--{name}", path)]
    assert say(monkeypatch, capsys, "report", file, *given, "-o", "page.html").startswith("page.html: ")
    assert Page(Path("page.html").read_bytes()).lines == Page(whole).lines
    told = json.loads(say(monkeypatch, capsys, "report", file, file, "-o", "two.html", "--json", "-"))
    assert told == {"file": "two.html", "bytes": Path("two.html").stat().st_size, "of": [file, file]}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("none", "none cannot be read: No such file or directory"),
        ("odd.json", "odd.json is not an adalog artifact"),
        ("detector", "holds a detector, which only"),
        ("FILE odd.json", "odd.json is not an adalog artifact"),
        ("FILE --evaluation odd.json", "odd.json is not the JSON of `adalog evaluate`"),
        ("FILE --bench odd.json", "odd.json is not the JSON of `adalog bench`"),
        ("FILE --sensitivity odd.json", "is not the JSON of `adalog sensitivity`"),
        ("FILE --bench .", ". cannot be read: not a regular file"),
        ("FILE --sensitivity FILE", "is not the JSON of `adalog sensitivity`"),
        ("FILE FILE --bench odd.json", "--bench does not apply to a comparison"),
        ("FILE FILE --data .", "--data does not apply to a comparison"),
        ("FILE FILE --seed 3", "--seed does not apply to a comparison"),
        ("FILE FILE --images 3", "--images does not apply to a comparison"),
        ("FILE --images 3", "has none of its own: give --data FOLDER"),
        ("FILE -o FILE", "is also an input or another output"),
        ("FILE --data .", ". has no images"),
    ],
)
def test_bad_input_is_told_in_one_line(file, monkeypatch, capsys, arguments, why):
    from safetensors.torch import save_file

    Path("odd.json").write_text('{"rows": 3}')
    save_file({"a": torch.ones(1)}, "detector", {artifact.DETECTOR: "{}"})
    assert why in refusal(monkeypatch, capsys, "report", *arguments.replace("FILE", file).split())
    assert not Path("report.html").exists()


@pytest.mark.parametrize("full", [None, {}, {"images": 40}])
def test_a_judgement_without_all_figures_is_shown(subject, measured, full, tmp_path):
    told = {"images": 40, "sites": json.loads(measured["evaluation"].read_text())["sites"]}
    (tmp_path / "told.json").write_text(json.dumps(told if full is None else told | {"full_precision": full}))
    page = report(subject, evaluation=read_evaluation(tmp_path / "told.json", subject.quantized)).decode()
    assert "Measured on 40 images, with fake quantization" in page
    assert "Agreement with full precision" not in page


WRONG = {
    "evaluation": [
        (lambda told: told.pop("sites"), '"sites" is missing'),
        (lambda told: told["sites"].pop(), "belongs to another artifact, whose sites differ"),
        (lambda told: told.update(top1=3), "an entry is not an object"),
        (lambda told: told["top1"].update(high=2.0), '"top1" is not a fraction'),
        (lambda told: told.update(kl="x"), '"kl" is missing, of the wrong type'),
        (lambda told: told.update(images=True), '"images" is missing, of the wrong type'),
        (lambda told: told.update(lost=10**400), "too large"),
        (lambda told: told.pop("gained"), '"gained" is missing'),
    ],
    "bench": [
        (lambda told: told.update(rows=[3]), "an entry is not an object"),
        (lambda told: told["rows"][0].update(batch=0), "a batch has no images"),
        (lambda told: told["rows"][0].update(wall_ms=float("nan")), "NaN is not a JSON number"),
        (lambda told: told.pop("absent"), '"absent" is missing'),
        (lambda told: told.update(sha256="d2"), "it belongs to another artifact"),
    ],
    "sensitivity": [
        (lambda told: told.update(measure="top1"), "the measure is not one of kl, relative squared error"),
        (lambda told: told["rows"].append(told["rows"][0]), "an operand has two losses at one width"),
        (
            lambda told: told["units"][0][0].update(macs=7),
            "belongs to another model, whose sites differ: patch_embed.conv1",
        ),
        (lambda told: told["choices"].update({"search.rounds": 9}), 'another method, in which "search.rounds" is 9'),
    ],
}


@pytest.mark.parametrize(("kind", "change", "why"), [(kind, *each) for kind, cases in WRONG.items() for each in cases])
def test_what_others_measured_is_checked(kind, change, why, measured, tmp_path, quantized, digest):
    told = json.loads(measured[kind].read_text())
    change(told)
    path = tmp_path / "told.json"
    path.write_text(json.dumps(told))
    readers = {
        "evaluation": lambda: read_evaluation(path, quantized.quantized),
        "bench": lambda: read_bench(path, digest),
        "sensitivity": lambda: read_sensitivity(path, quantized.quantized),
    }
    with pytest.raises(DataError, match=re.escape(why)) as error:
        readers[kind]()
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
