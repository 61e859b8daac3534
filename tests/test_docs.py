"""What the documentation names exists."""

from benchmarks import tables

import ast
import functools
import importlib
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.distributed import TCPStore

import adalog
from adalog import Config, Search, config
from adalog.cli import main
from adalog.cli.targets import find_preprocessing
from adalog.inputs.zoo import DEMO_PREPROCESSING
from commands import forked, run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
HOW_TOS = sorted((ROOT / "docs" / "how-to").glob("*.md"))
pytestmark = pytest.mark.usefixtures("captured_once")  # several pages quantize the bundled model
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
HEADER = ["Equation", "Meaning", "Function", "Test"]


def table_rows():
    """Return the cells of the table in docs/reference/equations.md, below its header."""
    lines = (ROOT / "docs" / "reference" / "equations.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == HEADER
    assert set("".join(table[1])) == {"-"}
    return table[2:]


ROWS = table_rows()
by_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")


@by_row
def test_rows_name_functions_and_tests(row):
    assert len(row) == len(HEADER)
    assert all(row)
    function_name = re.fullmatch(r"`((?:[a-z_]+\.)+)((?:[A-Z]\w*\.)?\w+)`", row[2])
    module = importlib.import_module(f"adalog.{function_name[1].strip('.')}")
    function = functools.reduce(getattr, function_name[2].split("."), module)
    assert callable(function)
    # A package may export what one of its modules defines.
    assert f"{function.__module__}.".startswith(f"{module.__name__}.")
    test_name = re.fullmatch(r"`(tests/\w+\.py)::(test_\w+)`", row[3])
    assert test_name[2] in defined_tests(ROOT / test_name[1])


def test_every_equation_has_a_row():
    named = [row[0] for row in ROWS]
    assert [str(number) for number in range(1, 16) if str(number) not in named] == []
    for other in ("Algorithm 1", "Sec. 3.4", "Sec. 4.1"):
        assert any(name.startswith(other) for name in named)


def test_every_test_of_the_paper_has_a_row():
    tree = ast.parse((ROOT / "tests" / "test_paper.py").read_text(encoding="utf-8"))
    tests = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    named = {tuple(row[3].strip("`").split("::")) for row in ROWS}
    assert tests == {test for file, test in named if file == "tests/test_paper.py"}


def python_of(page):
    """The Python blocks of a page, one after the other."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL))


def keep_first_block():
    """Cut the bundled model to its first block, whose weights stay."""
    load = adalog.demo.load_model

    def cut():
        model = load()
        model.blocks = model.blocks[:1]
        return model

    adalog.demo.load_model = cut


@functools.cache
def defined_tests(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@by_page
def test_pages_name_what_exists(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert [link for link in links if "://" not in link and not (page.parent / link.partition("#")[0]).exists()] == []
    files = re.findall(r"`((?:src|tests|benchmarks|experiments|tools|constraints)/[\w./-]+)", text)
    assert [path for path in files if not (ROOT / path).exists()] == []
    pairs = re.findall(r"`(tests/\w+\.py)::(test_\w+)`", text)
    assert [name for file, name in pairs if name not in defined_tests(ROOT / file)] == []
    everywhere = set().union(*(defined_tests(path) for path in (ROOT / "tests").glob("test_*.py")))
    assert set(re.findall(r"`(test_\w+)`", text)) <= everywhere


@pytest.mark.slow
def test_the_readme_python_runs(monkeypatch, tmp_path, tiny):
    """The five lines, with a small model and a search cut short."""
    code = python_of(ROOT / "README.md")
    quick = Config(images=4, search=Search(init=(8, 4), parents=4, steps=1, rounds=1))
    monkeypatch.setattr(Config, "preset", staticmethod(lambda bits: quick))
    monkeypatch.setattr(adalog.demo, "load_model", lambda: tiny)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert (tmp_path / "vit.w4a4.safetensors").exists()
    assert torch.equal(names["logits"], names["qmodel"](names["images"]))


@pytest.mark.slow
def test_the_python_that_raises_accuracy_runs(monkeypatch, tmp_path, tiny):
    """Run both stages of "raise-accuracy" on a small model, shortened; the file records how images are prepared."""
    code, quantize = python_of(ROOT / "docs" / "how-to" / "raise-accuracy.md"), adalog.quantize
    stages = (adalog.Correction(images=8), adalog.Reconstruction(images=8, iterations=1))

    def shortened(model, images, config, **options):
        assert [type(stage) for stage in config.stages] == [type(stage) for stage in stages]
        assert config.images_needed == len(images)
        search = Search(init=(8, 4), parents=4, steps=1, rounds=1)
        return quantize(model, images, replace(config, images=4, search=search, stages=stages), **options)

    monkeypatch.setattr(adalog, "quantize", shortened)
    monkeypatch.setattr(adalog.demo, "load_model", lambda: tiny)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert [path.name for path in tmp_path.iterdir()] == ["vit.safetensors"]
    quantized = adalog.load("vit.safetensors")
    assert find_preprocessing(tmp_path / "vit.safetensors", quantized, None) == DEMO_PREPROCESSING


@pytest.fixture
def without_stages(monkeypatch):
    """Quantize without the correction, which takes most of the time and is not what these pages are about."""
    quantize = adalog.quantize

    def shortened(model, images, config):
        return quantize(model, images, replace(config, stages=()))

    monkeypatch.setattr(adalog, "quantize", shortened)


@pytest.mark.slow
def test_the_integers_by_hand(monkeypatch, without_stages):
    """Run docs/reference/integers.md on one block: Eq. 10 in three forms, and one site by hand."""
    monkeypatch.setattr(adalog.demo, "load_model", adalog.demo.load_model)  # is put back after the test
    keep_first_block()
    code = python_of(ROOT / "docs" / "reference" / "integers.md")
    names: dict[str, object] = {}
    exec(code, names)
    assert round(names["literal"], 2) == 1.47  # as the table says
    errors = [names["error"](names[form](3)) for form in ("shifted", "folded")]
    assert [round(value, 3) for value in errors] == [0.122, 0.065]


@pytest.mark.parametrize("name", ["add-a-quantizer", "add-a-search"])
def test_the_how_tos_run(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(python_of(ROOT / "docs" / "how-to" / f"{name}.md"), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add-a-method", "add-a-kernel", "add-an-exporter"])
def test_the_how_tos_that_quantize_a_model_run(name, monkeypatch, tmp_path, without_stages):
    monkeypatch.setattr(config, "LOSSES", dict(config.LOSSES))  # to which "add-a-method" adds one
    test_the_how_tos_run(name, monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deploy"])
def test_deployment_runs(name, monkeypatch, tmp_path):
    """With a small model of random weights, and a search cut short."""
    timm = pytest.importorskip("timm")
    pytest.importorskip("openvino")
    pytest.importorskip("onnxruntime")
    make = timm.create_model
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 10}
    small["pretrained_cfg_overlay"] = {"input_size": (3, 32, 32)}
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: make("vit_tiny_patch16_224", **small))
    quick = Config(weight_bits=6, activation_bits=6, images=4, search=Search(init=(8, 4), parents=4, steps=1, rounds=1))
    monkeypatch.setattr(Config, "preset", staticmethod(lambda bits: quick))
    monkeypatch.chdir(tmp_path)
    for index in range(4):
        Image.effect_noise((40, 48), 60 + index).convert("RGB").save(f"{index}.png")
    torch.manual_seed(0)
    names = {"paths": sorted(tmp_path.glob("*.png"))}
    exec(python_of(ROOT / "docs" / "how-to" / f"{name}.md"), names)
    assert names["same"] >= 0.75  # of four noisy images one may stand between two classes
    assert names["prediction"].shape == names["logits"].shape == (4, 10)
    assert abs(names["prediction"] - names["logits"]).max() < 0.2 * abs(names["logits"]).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["share-on-the-hub"])
def test_sharing_runs(name, monkeypatch, tmp_path, quantized):
    """Run the page without a network: the folder stands in for the uploaded one."""
    pytest.importorskip("transformers")
    model, uploaded, locate = adalog.QuantizedModel(quantized.quantized), [], adalog.hub.locate
    model.note(preprocessing=asdict(DEMO_PREPROCESSING))
    monkeypatch.setattr(adalog.QuantizedModel, "push_to_hub", lambda self, name, classes: uploaded.append(name))
    monkeypatch.setattr(adalog.hub, "locate", lambda name, revision: locate("small-vit", None))
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((40, 48), 60).convert("RGB").save("image.jpg")
    names = {"adalog": adalog, "qmodel": model, "names": [f"class {index}" for index in range(10)]}
    exec(python_of(ROOT / "docs" / "how-to" / f"{name}.md"), names)
    assert uploaded == ["me/small-vit"]
    assert names["again"].ledger == model.ledger
    assert {each["label"] for each in names["predictions"]} <= set(names["names"])


def shell_of(page):
    """The lines of a page's first block of commands."""
    return re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)[0].strip().splitlines()


@pytest.mark.slow
def test_a_budget_is_kept(tmp_path):
    """The commands of fit-a-budget."""
    lines = shell_of(ROOT / "docs" / "how-to" / "fit-a-budget.md")
    assert "--judged 32" in lines[0]
    few = lines[0].replace("--judged 32", "--judged 4 --images 8"), f"{lines[1]} --images 8", lines[2]
    for line in few:  # few images take a tenth of the time
        run(*line.split()[1:], cwd=tmp_path)
    assert "--budget 2MB" in lines[1]
    assert (tmp_path / "small.safetensors").stat().st_size <= 2_000_000
    widths = {row.right.partition("-bit")[0] for row in adalog.load(tmp_path / "small.safetensors").ledger}
    assert len(widths) > 1
    assert widths <= {"4", "6", "8"}
    assert "blocks.0.attn.qkv" in (tmp_path / "small.html").read_text(encoding="utf-8")


def run_script():
    """Run own.py, as `python own.py` does."""
    runpy.run_path("own.py", run_name="__main__")


def run_ranks(folder, *words, main=main):
    """Run a command as two ranks of a job, with the store and the environment that torchrun gives them."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    job |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}

    def rank(number):
        here = {"RANK": str(number), "LOCAL_RANK": str(number)}
        return forked(*words, main=main, cwd=folder, prepare=keep_first_block, **job, **here)

    with ThreadPoolExecutor(2) as pool:
        for code, _, error in pool.map(rank, range(2)):
            assert code == 0, (words, error)


@pytest.mark.slow
def test_several_processes_run(tmp_path):
    """The commands and the script of run-on-several-processes, on two processes of this machine.

    They quantize the first block of the bundled model. tests/test_ranks.py has jobs that torchrun itself starts.
    """
    name = "run-on-several-processes"
    page = ROOT / "docs" / "how-to" / f"{name}.md"
    (tmp_path / "own.py").write_text("import torch\n\ntorch.set_num_threads(1)\n" + python_of(page))
    for index in range(10):  # as many folders as the bundled model has classes
        (tmp_path / "images" / str(index)).mkdir(parents=True)
        Image.effect_noise((32, 32), 60 + index).convert("RGB").save(tmp_path / "images" / str(index) / "image.png")
    one, two, compare, evaluate = (line.split() for line in shell_of(page))
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "adalog"]
    assert two[:6] == evaluate[:6] == launcher
    run(*one[1:], cwd=tmp_path, prepare=keep_first_block)
    run_ranks(tmp_path, *two[6:])
    run_ranks(tmp_path, *evaluate[6:], "--data", "images")  # few of them
    run_ranks(tmp_path, main=run_script)
    assert compare == ["cmp", "one.safetensors", "two.safetensors"]
    files = [tmp_path / f"{each}.safetensors" for each in ("one", "two", "mine")]
    assert files[0].read_bytes() == files[1].read_bytes()
    sites = [[row.sqnr for row in adalog.load(file).ledger] for file in files]
    assert sites[0] == sites[2]


def test_every_how_to_with_python_is_run():
    """By one of the tests above, whose names they say."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert [page.stem for page in HOW_TOS if python_of(page) and f'"{page.stem}"' not in text] == []


def test_the_path_of_quantize_is_short_enough_to_read():
    path = (ROOT / "docs" / "design" / "index.md").read_text(encoding="utf-8").partition("## The files of")[2]
    files = re.findall(r"^\| `([\w/]+\.py)` \|", path.partition("\n## ")[0], flags=re.MULTILINE)
    texts = [(ROOT / "src" / "adalog" / file).read_text(encoding="utf-8") for file in files]
    assert len(files) > 10
    assert sum(len(text.splitlines()) for text in texts) <= 6000


def test_the_readme_tables_are_those_of_the_results():
    tables.main(check=True)  # raises SystemExit if a table is out of date
