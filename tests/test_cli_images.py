"""The command line on a folder of images: what is read, judged and refused; and a whole run."""

import copy
import dataclasses
import functools
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import adalog
from adalog import Config, QuantizedModel, Search, artifact, library
from adalog.cli.options import read_size
from adalog.inputs import demo, zoo
from adalog.inputs.images import ImageSet, draw_indices, find_images
from adalog.runtime import EXECUTORS
from adalog.study.evaluate import Contest
from commands import call, refusal, run, say, write_images

# --- images of a folder ----------------------------------------------------------------------------------------------

CLASSIFIER = """
import torch
from torch import nn
from adalog.inputs.images import Preprocessing

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.GELU(), nn.Linear(16, 7)), Preprocessing((8, 8), (9, 9))

def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8))

def wider():
    return nn.Sequential(nn.Flatten(), nn.Linear(300, 7))
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A classifier of seven classes, 28 images with labels, and its artifact of three bits."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "own.py").write_text(CLASSIFIER)
    labels = {f"{'recorded' if index % 2 else 'known'}/{index}.png": index % 7 for index in range(28)}
    write_images(folder / "images", labels)
    loaded = zoo.load_model(f"{folder / 'own.py'}:model")
    found = find_images(folder / "images")
    images = found.load(loaded.preprocessing)
    config = Config(3, 3, 3, images=28, search=Search(steps=1))
    quantized = adalog.quantize(loaded.module, images, config)
    quantized.save(folder / "bare.safetensors")
    quantized.note(preprocessing={**dataclasses.asdict(loaded.preprocessing), "size": [9, 8]})
    quantized.save(folder / "wrong.safetensors")
    quantized.note(preprocessing=dataclasses.asdict(loaded.preprocessing))
    quantized.save(folder / "out.safetensors")
    with torch.no_grad():
        return folder, torch.tensor(found.labels), quantized(images), loaded.module(images)


@pytest.fixture(scope="module")
def folder(outputs):
    return outputs[0]


@pytest.fixture
def recorded(monkeypatch):
    """What `adalog.quantize` is given by the command, which then stops: its config, and its arguments by name."""
    given = {}

    def record(model, images, config, **named):
        given.update(named, config=config)
        raise ValueError("enough")

    monkeypatch.setattr(adalog, "quantize", record)
    return given


def test_evaluate_a_folder(outputs, monkeypatch, capsys):
    """By the preprocessing that the artifact holds."""
    folder, labels, logits, _ = outputs
    arguments = ["evaluate", folder / "out.safetensors", "--data", folder / "images"]
    told = json.loads(say(monkeypatch, capsys, *arguments, "--json", "-"))
    first, fifth = logits.argmax(1), logits.topk(5).indices
    assert told["top1"]["value"] == (first == labels).double().mean().item()
    assert told["top5"]["value"] == (fifth == labels[:, None]).any(1).double().mean().item()
    assert told["top1"]["low"] < told["top1"]["value"] < told["top1"]["high"]
    assert told["sites"] == artifact.inspect((folder / "out.safetensors").read_bytes())["sites"]
    unknown = ("agreement", "kl", "lost", "gained", "p_value", "reference", "full_precision")
    assert [told[name] for name in unknown] == [None] * 7
    some = say(monkeypatch, capsys, *arguments, "--images", 9, "--seed", 3, "--json", "-")
    drawn = draw_indices(28, 9, 3)
    assert (json.loads(some)["images"], json.loads(some)["seed"], told["seed"]) == (9, 3, None)
    assert json.loads(some)["top1"]["value"] == (first == labels)[drawn].double().mean().item()
    text = say(monkeypatch, capsys, *arguments)
    assert f"out.safetensors, 28 images\ntop-1 {100 * told['top1']['value']:.1f} % (" in text


@pytest.mark.parametrize("executor", EXECUTORS)
def test_evaluate_in_integers(outputs, monkeypatch, capsys, executor):
    if executor == "native" and not library.levels():
        pytest.skip("installed without a compiler")
    folder, labels, logits, _ = outputs
    file = folder / "out.safetensors"
    arguments = ["evaluate", file, "--data", folder / "images", "--executor", executor]
    told = json.loads(say(monkeypatch, capsys, *arguments, "--json", "-"))
    assert (told["executor"], told["images"]) == (executor, len(labels))
    assert abs(told["top1"]["value"] - (logits.argmax(1) == labels).double().mean().item()) <= 2 / len(labels)


def test_native_has_threads_of_its_own(folder, monkeypatch, capsys):
    """It takes one batch at a time, with all threads; the full-precision model takes several side by side."""
    made, alone = [], {}
    before = QuantizedModel.compile

    def compile_torch(model, executor, **choices):
        made.append((executor, choices))
        return before(model, "torch")

    def record(networks, single, *rest):
        alone.update({type(network).__name__: each for network, each in zip(networks, single, strict=True)})
        return Contest(networks, single, *rest)

    monkeypatch.setattr(QuantizedModel, "compile", compile_torch)
    monkeypatch.setattr("adalog.cli.evaluate.Contest", record)
    arguments = ["evaluate", folder / "out.safetensors", "--data", folder / "images", "--executor", "native"]
    say(monkeypatch, capsys, *arguments, "--threads", 3, "--model", f"{folder / 'own.py'}:model")
    assert made == [("native", {"threads": 3})]
    assert alone == {"Compiled": True, "Sequential": False}


def test_vectors(folder, monkeypatch, capsys, tmp_path):
    file, images, out = folder / "out.safetensors", folder / "images", tmp_path / "new" / "vectors"
    site = adalog.load(file).ledger[0].site
    arguments = ["vectors", file, "--site", site, "--data", images, "--images", 2, "--out", out]
    told = json.loads(say(monkeypatch, capsys, *arguments, "--json", "-"))
    assert told["files"] == {path.name: path.stat().st_size for path in sorted(out.iterdir())}
    description = json.loads((out / "site.json").read_text())
    assert description["site"] == site
    assert np.load(out / "left_codes.npy").shape[0] == 2
    error = refusal(monkeypatch, capsys, *arguments)
    assert error == f"error: {out} exists already: name a new folder, or remove it\n"
    error = refusal(monkeypatch, capsys, *arguments, "--site", "nothing", "--out", tmp_path / "other")
    assert error.startswith("error: site = 'nothing' is not one of the ")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    single = {path.name: path.read_bytes() for path in out.iterdir()}
    say(monkeypatch, capsys, *arguments, "--site", "*", "--out", tmp_path / "all")
    assert {path.name for path in (tmp_path / "all").iterdir()} == {row.site for row in adalog.load(file).ledger}
    assert {path.name: path.read_bytes() for path in (tmp_path / "all" / site).iterdir()} == single


@pytest.mark.parametrize("file", ["out.safetensors", "bare.safetensors"])
def test_evaluate_a_folder_beside_full_precision(outputs, monkeypatch, capsys, file):
    """An artifact that holds no preprocessing takes the model's."""
    folder, labels, logits, full = outputs
    arguments = ["evaluate", folder / file, "--data", folder / "images", "--model", f"{folder / 'own.py'}:model"]
    told = json.loads(say(monkeypatch, capsys, *arguments, "--threads", 1, "--json", "-"))
    assert told["agreement"] == (logits.argmax(1) == full.argmax(1)).double().mean().item()
    kl = (full.softmax(1) * (full.log_softmax(1) - logits.log_softmax(1))).sum(1).mean().item()
    assert told["kl"] == pytest.approx(kl, rel=1e-4)
    right, before = logits.argmax(1) == labels, full.argmax(1) == labels
    assert (told["lost"], told["gained"]) == (int((before & ~right).sum()), int((right & ~before).sum()))
    assert told["full_precision"]["top1"]["value"] == before.double().mean().item()
    text = say(monkeypatch, capsys, *arguments)
    assert f"agreement with full-precision {arguments[-1]} {100 * told['agreement']:.1f} %, KL divergence" in text
    assert f"images correct only in full precision {told['lost']}, only quantized {told['gained']}: McNemar" in text


def test_evaluate_features_by_their_nearest(outputs, monkeypatch, capsys):
    folder, labels, logits, full = outputs
    known = torch.tensor(["known" in str(path) for path in find_images(folder / "images").paths])
    arguments = ["evaluate", folder / "out.safetensors", "--data", folder / "images"]
    arguments += ["--support", folder / "images" / "known", "--model", f"{folder / 'own.py'}:model", "--json", "-"]
    told = json.loads(say(monkeypatch, capsys, *arguments))
    answers = []
    for given in (logits.double(), full.double()):
        features = given - given[known].mean(0)
        closeness = torch.cosine_similarity(features[~known][:, None], features[known][None], dim=2)
        answers.append(labels[known][closeness.argmax(1)])
    assert told["images"] == 14
    assert told["top1"]["value"] == (answers[0] == labels[~known]).double().mean().item()
    assert told["full_precision"]["top1"]["value"] == (answers[1] == labels[~known]).double().mean().item()
    assert told["agreement"] == (answers[0] == answers[1]).double().mean().item()
    assert told["kl"] is None


def test_images_without_labels_are_compared(folder, monkeypatch, capsys):
    flat = ["--data", folder / "images" / "known"]
    model = ["--model", f"{folder / 'own.py'}:model"]
    told = json.loads(say(monkeypatch, capsys, "evaluate", folder / "out.safetensors", *flat, *model, "--json", "-"))
    assert (told["images"], told["top1"], told["full_precision"]) == (14, None, None)
    assert 0 <= told["agreement"] <= 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("out.safetensors", "was not made from the bundled model, so the bundled images do not fit it: give"),
        (
            "bare.safetensors --data images",
            "does not record how to prepare images: give `adalog evaluate` a --model, or record it in Python with",
        ),
        (
            "wrong.safetensors --data images",
            "inputs of shape (3, 8, 8), but the preprocessing of wrong.safetensors outputs (3, 9, 8): give",
        ),
        ("out.safetensors --data some", "some has 2 subfolders, one per class, but out.safetensors has 7"),
        (
            "out.safetensors --data images --executor quick",
            f"executor = 'quick' is not one of {', '.join(EXECUTORS)}\n",
        ),
        ("out.safetensors --data images/known", "known has no labels: add them, or give --model to compare with"),
        ("out.safetensors --data more", "label 7 is not a class of the model, 0 to 6"),
        (
            "out.safetensors --data images --model demo",
            "takes inputs of shape (3, 8, 8), but the preprocessing of demo outputs (3, 32, 32): give",
        ),
        ("out.safetensors --data images --model own.py:other", "cannot be compared"),
        (
            "out.safetensors --data images --model own.py:wider",
            "own.py:wider does not accept the images of out.safetensors: RuntimeError: mat1 and mat2",
        ),
        (
            "out.safetensors --data images --images 29",
            "--images 29 is more than the 28 images that there are: give fewer",
        ),
        ("out.safetensors --data images --seed 1", "--seed has no effect on all images: give --images as well"),
        ("out.safetensors --data images --device abacus", "--device 'abacus' is not available"),
    ],
)
def test_images_that_do_not_go_with_the_artifact(folder, monkeypatch, capsys, arguments, told):
    monkeypatch.chdir(folder)
    more, some = folder / "more", folder / "some"
    if not more.exists():
        shutil.copytree(folder / "images", some, ignore=shutil.ignore_patterns("*.csv"))
        shutil.copytree(folder / "images", more)
        (more / "labels.csv").write_text("file,label\nknown/0.png,0\nknown/2.png,7\nknown/4.png,1\n")
    assert told in refusal(monkeypatch, capsys, "evaluate", *arguments.split())


def test_a_preprocessing_that_is_none_is_told(quantized, tmp_path, monkeypatch, capsys):
    quantized = copy.copy(quantized)
    quantized.note(preprocessing={"size": [32, 32]})
    quantized.save(tmp_path / "out.safetensors")
    message = refusal(monkeypatch, capsys, "evaluate", tmp_path / "out.safetensors")
    assert "out.safetensors records an invalid preprocessing: a preprocessing has the fields" in message


def record_reads(monkeypatch):
    """The lists of images that are read, as they are."""
    reads, load = [], ImageSet.load

    def recorded(images, *arguments, **named):
        reads.append(images.paths)
        return load(images, *arguments, **named)

    monkeypatch.setattr(ImageSet, "load", recorded)
    return reads


def test_only_a_batch_of_images_is_read_at_a_time(folder, monkeypatch, capsys):
    reads = record_reads(monkeypatch)
    say(monkeypatch, capsys, "evaluate", folder / "out.safetensors", "--data", folder / "images", "--threads", 1)
    assert [len(paths) for paths in reads] == [1, 20, 8]  # the first to see whether the model takes it
    assert reads[1] + reads[2] == find_images(folder / "images").paths


def test_only_images_that_calibrate_are_read(folder, tmp_path, monkeypatch, capsys):
    reads = record_reads(monkeypatch)
    arguments = [f"{folder / 'own.py'}:model", "--data", folder / "images", "--images", 4, "--seed", 5]
    say(monkeypatch, capsys, "quantize", *arguments, "-o", tmp_path / "out")
    order = torch.randperm(28, generator=torch.Generator().manual_seed(5))[:4]
    paths = find_images(folder / "images").paths
    assert reads == [tuple(paths[index] for index in order)]


def test_quantize_a_folder(folder, tmp_path, monkeypatch, capsys):
    """The same choices give the same file; a pattern and a checkpoint are heeded."""
    save_file(zoo.load_model(f"{folder / 'own.py'}:model").module.state_dict(), tmp_path / "w.safetensors")
    arguments = ["quantize", f"{folder / 'own.py'}:model", "--data", folder / "images", "--images", 9, "--seed", 3]
    arguments += ["--bits", "w3a4", "--method", "log2", "--pin", "3=8", "--threads", 1]
    text = say(monkeypatch, capsys, *arguments, "-o", tmp_path / "a")
    more = ("-o", tmp_path / "b", "--checkpoint", tmp_path / "w.safetensors", "--json", "-")
    told = say(monkeypatch, capsys, *arguments, *more)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "w.safetensors"}
    model, told = adalog.load(tmp_path / "a"), json.loads(told)
    assert [(row.left, row.right) for row in model.ledger] == [
        ("4-bit uniform", "3-bit uniform x 16"),
        ("8-bit log 2^(1/1) u8", "8-bit uniform x 7"),
    ]
    assert (model.provenance["seed"], model.provenance["images"]) == (3, 9)
    assert told["config"]["pinned"] == [["3", 8]]
    assert model.summary() in text
    assert f"{tmp_path / 'a'}: {(tmp_path / 'a').stat().st_size:,} bytes, in " in text


def test_options_of_a_training(folder, tmp_path, monkeypatch, capsys):
    arguments = ["quantize", f"{folder / 'own.py'}:model", "--data", folder / "images", "--images", 4]
    arguments += ["--method", "adalog++", "--reconstruct-images", 16, "--threads", 1, "-o", tmp_path / "a"]
    options = ["--reconstruct-steps", 3, "--reconstruct-batch", 2, "--json", "-"]
    correction, training = json.loads(say(monkeypatch, capsys, *arguments, *options))["config"]["stages"]
    assert (correction["images"], training["images"]) == (16, 16)
    assert (training["iterations"], training["batch"]) == (3, 2)


def test_pins_are_kept_in_order(recorded, tmp_path, monkeypatch, capsys):
    call(monkeypatch, capsys, "quantize", "demo", "-o", tmp_path / "out", "--pin", "head=8", "--pin", "*.qk=32")
    assert recorded["config"].pinned == (("head", 8), ("*.qk", 32))


@pytest.mark.parametrize("resume", [False, True])
def test_what_is_left_of_an_earlier_run(recorded, tmp_path, monkeypatch, capsys, resume):
    """It is handed on to go on with, and never taken away unasked."""
    partial = tmp_path / "out.safetensors.partial"
    partial.write_text("left")
    arguments = ["quantize", "demo", "--out", tmp_path / "out.safetensors", *["--resume"] * resume]
    left = f"{partial} holds results of an unfinished run: continue it with --resume, or remove the file"
    why = "enough" if resume else left
    assert refusal(monkeypatch, capsys, *arguments) == f"error: {why}\n"
    assert recorded.get("partial") == (partial if resume else None)
    assert partial.read_text() == "left"


def test_a_size_of_memory(recorded, monkeypatch, capsys, tmp_path):
    call(monkeypatch, capsys, "quantize", "demo", "--memory", "1.5 GB", "--out", tmp_path / "out")
    assert recorded["memory"] == 1_500_000_000
    sizes = {"2GiB": 2 << 30, "500": 500, "512KiB": 512 << 10, "3TB": 3 * 10**12, "7 MB": 7_000_000}
    assert {text: read_size(text) for text in sizes} == sizes


@pytest.mark.parametrize("text", ["", "much", "-1GB", "2 gb", "1e9", "2GBs", "GiB", "1..5GB", "٣GB", "9" * 400])
def test_what_is_no_size_of_memory(monkeypatch, capsys, tmp_path, text):
    message = refusal(monkeypatch, capsys, "quantize", "demo", f"--memory={text}", "--out", tmp_path / "out")
    assert message == f"error: --memory {text!r} is not a size: give one like 2GiB, 1.5GB or 500MB\n"


@pytest.mark.slow
def test_too_little_memory(monkeypatch, capsys, tmp_path):
    message = refusal(monkeypatch, capsys, "quantize", "demo", "--memory", "1MB", "--out", tmp_path / "out")
    assert message.startswith("error: memory = 1,000,000 bytes is too little for ")
    assert message.endswith(" bytes or more\n")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_text(folder, tmp_path, monkeypatch, capsys):
    """It is written, and told as it can be."""
    out = tmp_path / "out\udcff"
    arguments = [f"{folder / 'own.py'}:model", "--data", folder / "images", "--images", 4, "--method", "uniform"]
    text = say(monkeypatch, capsys, "quantize", *arguments, "-o", out)
    assert f"{tmp_path}/out\\udcff: {out.stat().st_size:,} bytes, in " in text


def test_cost_of_a_model_and_of_its_artifact(folder, monkeypatch, capsys):
    for target, bits in ((f"{folder / 'own.py'}:model", 32), (folder / "out.safetensors", 3)):
        told = json.loads(say(monkeypatch, capsys, "cost", target, "--json", "-"))
        assert (told["inputs"], told["macs"]) == ([[3, 8, 8]], 192 * 16 + 16 * 7)
        assert {row["right_bits"] for row in told["rows"] if row["role"] == "linear"} == {bits}
        text = say(monkeypatch, capsys, "cost", target)
        assert f"products: {told['macs']:,} MACs, {told['fixops']:,.0f} FixOPs" in text


# --- a whole run -----------------------------------------------------------------------------------------------------


def cut_short():
    """Search the bundled model on few images for a short time, and evaluate it on every tenth image."""
    preset, (images, labels) = Config.preset, demo.test_images()
    quick = Search(init=(8, 4), parents=4, steps=1, rounds=1)
    Config.preset = staticmethod(lambda *given: dataclasses.replace(preset(*given), images=8, search=quick))
    demo.test_images = lambda: (images[::10], labels[::10])


run_short = functools.partial(run, prepare=cut_short)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The bundled model in three bits."""
    file = tmp_path_factory.mktemp("quantize") / "new" / "demo.safetensors"
    told = json.loads(run_short("quantize", "demo", "--bits", "w3a3", "--images", 8, "-o", file, "--json", "-"))
    assert (told["file"], told["bits"], told["method"]) == (str(file), "w3a3", "adalog")
    assert told["bytes"] == file.stat().st_size
    assert told["seconds"] > 0
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    return file


@pytest.fixture(scope="module")
def judged(made):
    """What `evaluate` says of it."""
    report = made.parent.parent / "more" / "score.json"
    text = run_short("evaluate", made, "--json", report)
    told = json.loads(report.read_text())
    assert (told["file"], told["images"]) == (str(made), 200)
    top1 = told["top1"]
    assert 0.1 < top1["low"] < top1["value"] < top1["high"] < 1
    assert 0.1 < told["agreement"] < 1
    assert f"top-1 {100 * top1['value']:.1f} %" in text
    return told


@pytest.mark.slow
def test_inspect(made, monkeypatch, capsys):
    told = json.loads(run("inspect", made, "--json", "-"))
    assert told["bits"] == "w3a3"
    assert sum(told["bytes"].values()) == told["total_bytes"] == made.stat().st_size
    assert told["float_sites"] == []
    assert told == json.loads(json.dumps(artifact.inspect(made.read_bytes())))
    text = say(monkeypatch, capsys, "inspect", made)
    assert adalog.load(made).summary() in text
    assert f"{made.stat().st_size:,} bytes in total" in text


@pytest.mark.slow
def test_inspect_an_artifact_by_bytes(quantized, tmp_path, monkeypatch, capsys):
    file = tmp_path / "small.safetensors"
    size = quantized.save(file)
    text = say(monkeypatch, capsys, "inspect", file, "--bytes", "--json", tmp_path / "told.json")
    told = json.loads((tmp_path / "told.json").read_text())
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    cells = {name: [int(count.replace(",", "") or 0) for count in counts] for name, *counts in rows}
    parts = ["codes", "scale", "zero_point", "float"]
    assert cells.pop("all") == [*(told["bytes"][part] for part in parts), size]
    assert cells["header"] == [0, 0, 0, 0, told["bytes"]["header"]]
    assert sum(counts[-1] for counts in cells.values()) == size == told["total_bytes"]
    assert {name: sum(counts.values()) for name, counts in told["tensors"].items()} == {
        name: counts[-1] for name, counts in cells.items() if name != "header"
    }
    weight = quantized.program.weights["head.weight"]
    outputs = len(weight.codes)
    assert cells["head.weight"][:3] == [-(-weight.codes.numel() * weight.quantizer.bits // 8), 4 * outputs, outputs]
    assert f"{size:,} bytes in total" in text


@pytest.mark.slow
def test_demo(made, judged, tmp_path):
    """The artifact is that of `quantize`, and what is said of it what `evaluate` says."""
    out, report = tmp_path / "out", tmp_path / "report.json"
    text = run_short("demo", "--bits", "w3a3", "--methods", "adalog", "--out", out, "--json", report)
    told = json.loads(report.read_text())
    assert told["fp32"]["top1"] >= 0.8
    assert [(row["bits"], row["method"]) for row in told["rows"]] == [("w3a3", "adalog")]
    (row,) = told["rows"]
    assert 0.1 < row["top1"] <= 1
    assert row["seconds"] >= 0
    assert f"{row['bytes']:,}" in text
    assert row["method"] in text
    assert sorted(path.name for path in out.iterdir()) == ["demo-w3a3.safetensors", "levels.png", "report.html"]
    assert (out / "levels.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "demo-w3a3.safetensors").read_bytes() == made.read_bytes()
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(words in page for words in ("demo-w3a3.safetensors", f"{100 * row['top1']:.2f} %", "w3a3", "McNemar"))
    score, executor = judged, row["executor"]
    assert executor == ("native" if library.levels() else None)
    if executor is not None:
        score = json.loads(run_short("evaluate", made, "--executor", executor, "--json", "-"))
    assert row["bytes"] == made.stat().st_size
    assert (row["top1"], row["agreement"]) == (score["top1"]["value"], score["agreement"])
