"""Folders of images: classes, the choice of images, and what tells that a file was prepared so."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from adalog import CalibrationError, DataError
from adalog._quantize import sample_images
from adalog.inputs.images import (
    ImageSet,
    Preprocessing,
    draw_indices,
    find_images,
    find_support,
)

# --- folders ---------------------------------------------------------------------------------------------------------


def fill(folder, *names):
    """Small images of different colours, by name, made from their position in the list."""
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (index, 0, 0)).save(path)
    return folder


RAW = Preprocessing((4, 4), (4, 4), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), rescale=1.0)


def reds(images):
    return images[:, 0, 0, 0].int().tolist()


def names(images, folder):
    return [path.relative_to(folder).as_posix() for path in images.paths]


def test_a_flat_folder(tmp_path):
    fill(tmp_path, "b.png", "a.PNG", "c.bmp", ".hidden.png")
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "empty").mkdir()
    images = find_images(tmp_path)
    assert names(images, tmp_path) == ["a.PNG", "b.png", "c.bmp"]
    assert images.labels is None
    assert len(images) == 3
    assert find_images(str(tmp_path)) == images


def test_a_folder_a_class(tmp_path):
    fill(tmp_path, "n10/b.png", "n02/z.png", "n10/a.png", "n1/x.png", "n1/.y.png", ".cache/q.png")
    (tmp_path / "readme.md").write_text("no class")
    outside = fill(tmp_path.parent / f"{tmp_path.name}-outside", "linked.png")
    (tmp_path / "n03").symlink_to(outside)
    (tmp_path / "n1" / "link.png").symlink_to(outside / "linked.png")
    images = find_images(tmp_path)
    assert names(images, tmp_path) == [
        "n02/z.png",
        "n03/linked.png",
        *("n1/link.png", "n1/x.png"),
        "n10/a.png",
        "n10/b.png",
    ]
    assert images.labels == (0, 1, 2, 2, 3, 3)


def test_a_table(tmp_path):
    fill(tmp_path, "q/b.png", "a.png", "s/c.png", "s/not named.png")
    (tmp_path / "any.csv").write_text("\ufefffile,label\ns/c.png,7\nq/b.png, 0\na.png,999\n", encoding="utf-8")
    images = find_images(tmp_path)
    assert names(images, tmp_path) == ["a.png", "q/b.png", "s/c.png"]
    assert images.labels == (999, 0, 7)
    assert reds(images.load(RAW)) == [1, 0, 2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("file,label\na.png,1\nmissing.png,2\n", r"labels\.csv, line 3: .*missing\.png does not exist"),
        ("file,label\na.png,cat\n", r"line 2: label 'cat' is not a class index"),
        ("file,label\na.png,-1\n", "label '-1' is not"),
        ("file,label\na.png,1.0\n", "label '1.0' is not"),
        ("file,label\na.png,²\n", "label '²' is not"),
        ("file,label\na.png,99999999999999999999\n", "label '9+' is not"),
        ("file,label\na.png\n", "label '' is not"),
        ("file,label\n,3\n", "'' is not a path below"),
        ("file,label\n../other.png,3\n", r"'\.\./other\.png' is not a path below"),
        ("file,label\ns/../../other.png,3\n", "is not a path below"),
        ("file,label\n/etc/passwd,3\n", "'/etc/passwd' is not a path below"),
        ("file,label\nC:\\a.png,3\n", "is not a path below"),
        ("file,label\na.png,3\na.png,3\n", r"line 3: a\.png is listed a second time"),
        (f"file,label\n{'a' * 999}.png,3\n", "cannot be read: File name too long"),
        ("file,label\n", "lists no images"),
        ("", "does not begin with the columns file,label"),
        ("a.png,3\n", "does not begin with the columns file,label"),
        ("file,label\n" + "a" * 200_000 + ",3\n", "not a CSV file"),
        (b"file,label\n\xff.png,3\n", "not a CSV file in UTF-8"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path, text, told):
    folder = fill(tmp_path / "images", "a.png", "s/b.png")
    fill(tmp_path, "other.png")
    (folder / "labels.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=told):
        find_images(folder)


def test_a_folder_of_no_layout_is_refused(tmp_path):
    with pytest.raises(DataError, match="missing cannot be read: No such file or directory"):
        find_images(tmp_path / "missing")
    with pytest.raises(DataError, match="has no images: give a folder of images"):
        find_images(tmp_path)
    fill(tmp_path, "flat.png")
    with pytest.raises(DataError, match=r"flat\.png cannot be read: Not a directory"):
        find_images(tmp_path / "flat.png")
    fill(tmp_path, "class/a.png")
    with pytest.raises(DataError, match="both in itself and in subfolders"):
        find_images(tmp_path)
    (tmp_path / "flat.png").unlink()
    (tmp_path / "another").mkdir()
    with pytest.raises(DataError, match="another has no images"):
        find_images(tmp_path)
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("file,label\nclass/a.png,0\n")
    with pytest.raises(DataError, match=r"2 CSV files, a\.csv, b\.csv"):
        find_images(tmp_path)


# --- choosing and loading --------------------------------------------------------------------------------------------


@pytest.fixture
def ten(tmp_path):
    return find_images(fill(tmp_path, *(f"{index % 2}/{index}.png" for index in range(10))))


def test_selecting_keeps_order_and_labels(ten):
    assert reds(ten.load(RAW)) == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    some = ten.select([9, 0, 5])
    assert some.labels == (1, 0, 1)
    assert reds(some.load(RAW)) == [9, 0, 1]
    assert ImageSet(ten.paths).select([3]).labels is None
    with pytest.raises(ValueError, match="10 paths have 1 labels"):
        ImageSet(ten.paths, (1,))


@pytest.mark.parametrize("jobs", [1, 3])
def test_batches_are_the_whole(ten, jobs):
    batches = list(ten.batches(RAW, batch=4, jobs=jobs))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert torch.equal(torch.cat(batches), ten.load(RAW, jobs=jobs))


def test_batches_are_read_when_asked_for(ten):
    batches = ten.batches(RAW, batch=5)
    ten.paths[-1].write_bytes(b"broken")
    assert len(next(batches)) == 5
    with pytest.raises(DataError, match=r"9\.png"):
        next(batches)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_broken_file_stops_loading(ten, jobs):
    Image.effect_noise((64, 64), 50).save(ten.paths[2])
    ten.paths[2].write_bytes(ten.paths[2].read_bytes()[:500])
    with pytest.raises(DataError, match=r"4\.png cannot be read"):
        ten.load(RAW, jobs=jobs)


def test_samples(ten):
    first = ten.sample(6, 1)
    assert first == ten.sample(6, 1)
    assert first != ten.sample(6, 2)
    assert len(set(first.paths)) == 6
    assert set(ten.sample(10, 3).paths) == set(ten.paths)
    with pytest.raises(
        DataError, match="11 images are needed, but there are only 10: give more images, or ask for fewer"
    ):
        ten.sample(11, 0)


@settings(max_examples=100)
@given(total=st.integers(0, 50), count=st.integers(0, 60), seed=st.integers(0, 2**31))
def test_a_draw_is_without_replacement_and_repeats(total, count, seed):
    if count > total:
        with pytest.raises(ValueError, match=f"count = {count} "):
            draw_indices(total, count, seed)
        return
    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn = draw_indices(total, count, seed).tolist()
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(drawn)) == count
    assert set(drawn) <= set(range(total))
    assert drawn == draw_indices(total, count, seed).tolist()


def test_files_and_tensors_are_drawn_alike(ten):
    images = ten.load(RAW)
    assert torch.equal(sample_images(images, 4, 5), ten.sample(4, 5).load(RAW))
    with pytest.raises(CalibrationError, match="11 images, got 10"):
        sample_images(images, 11, 0)


@pytest.mark.skipif("ADALOG_REALBENCH" not in os.environ, reason="ADALOG_REALBENCH names no folder of real images")
def test_real_images():
    folder = Path(os.environ["ADALOG_REALBENCH"])
    images = find_images(folder)
    support = images.select(index for index, path in enumerate(images.paths) if path.parent.name == "support")
    assert support.labels == tuple(range(1000))
    assert support.sample(3, 0).load(Preprocessing()).shape == (3, 3, 224, 224)


# --- preparation by way of JSON, and images beside those that are to be judged ----------------------------------------


@pytest.mark.parametrize("resize", [8, (8, 9)])
def test_a_preprocessing_by_way_of_json(resize):
    own = Preprocessing((8, 7), resize, (0.1, 0.2, 0.3), (1, 2, 3), "lanczos", 0.5)
    assert Preprocessing.from_json(json.loads(json.dumps(dataclasses.asdict(own)))) == own
    assert Preprocessing.from_json(dataclasses.asdict(own)) == own


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"size": 8}, "size = 8 is not made of finite numbers"),
        ({"size": [8.0, 8]}, "size = .* is not made of finite numbers"),
        ({"size": [8, 8, 8]}, "is not \\(height, width\\)"),
        ({"size": [0, 8]}, "is not \\(height, width\\)"),
        ({"resize": 4}, "smaller than the crop"),
        ({"resize": None}, "resize = None"),
        ({"resize": True}, "resize = True"),
        ({"mean": [0, 0, math.nan]}, "mean"),
        ({"mean": "abc"}, "mean"),
        ({"mean": [0, 0, "0"]}, "mean"),
        ({"std": [1, 1, 0]}, "std positive"),
        ({"std": [1, 1, math.inf]}, "std"),
        ({"rescale": "1"}, "rescale"),
        ({"rescale": [1]}, "rescale"),
        ({"interpolation": "fast"}, "interpolation = 'fast'"),
        ({"interpolation": []}, "interpolation"),
        ({"more": 1}, "has the fields interpolation, mean, rescale, resize, size, std"),
    ],
)
def test_other_json_is_no_preprocessing(changes, told):
    fields = dataclasses.asdict(Preprocessing((8, 8), 8)) | changes
    with pytest.raises(ValueError, match=told):
        Preprocessing.from_json(fields)
    with pytest.raises(ValueError, match="has the fields"):
        Preprocessing.from_json([fields])


def test_support_in_the_folder_and_beside_it(tmp_path):
    fill(tmp_path / "all", "known/a.png", "known/b.png", "asked/a.png", "asked/c.png", "asked/d.png")
    rows = ["file,label", "known/a.png,3", "known/b.png,5", "asked/a.png,5", "asked/c.png,3", "asked/d.png,3"]
    (tmp_path / "all" / "labels.csv").write_text("\n".join(rows))
    fill(tmp_path / "beside", "x/1.png", "y/2.png")
    (tmp_path / "linked").mkdir()
    for name in ("known", "asked", "labels.csv"):
        (tmp_path / "linked" / name).symlink_to(tmp_path / "all" / name)
    queries, known = find_support(tmp_path / "linked", tmp_path / "linked" / "known")
    assert (queries.labels, known.labels) == ((5, 3, 3), (3, 5))
    queries, known = find_support(tmp_path / "all", tmp_path / "all" / "known")
    assert names(queries, tmp_path / "all") == ["asked/a.png", "asked/c.png", "asked/d.png"]
    assert (queries.labels, known.labels) == ((5, 3, 3), (3, 5))
    assert names(known, tmp_path / "all") == ["known/a.png", "known/b.png"]
    queries, known = find_support(tmp_path / "all", tmp_path / "beside")
    assert (len(queries), known.labels) == (5, (0, 1))
    assert find_support(tmp_path / "all", None) == (find_images(tmp_path / "all"), None)
    with pytest.raises(DataError, match="has no images other than those of"):
        find_support(tmp_path / "beside", tmp_path / "beside")
    fill(tmp_path / "bare", "1.png")
    with pytest.raises(DataError, match=r"bare has no labels: make one subfolder per class, or add a CSV file"):
        find_support(tmp_path / "all", tmp_path / "bare")


def test_support_by_another_path_is_support(tmp_path, monkeypatch):
    """No image tells its own class, whichever way either folder is named."""
    fill(tmp_path / "all", "known/a.png", "asked/b.png")
    (tmp_path / "all" / "labels.csv").write_text("file,label\nknown/a.png,1\nasked/b.png,0\n")
    (tmp_path / "link").symlink_to(tmp_path / "all")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ways = ["../all", tmp_path / "all", tmp_path / "here" / ".." / "all", tmp_path / "link"]
    for data in ways:
        for support in ways:
            queries, known = find_support(data, Path(support) / "known")
            assert (queries.labels, known.labels) == ((0,), (1,))
    fill(tmp_path / "more", "x/1.png", "y/2.png")
    (tmp_path / "more" / "y" / "again.png").symlink_to(tmp_path / "all" / "known" / "a.png")
    (tmp_path / "all" / "known" / "labels.csv").write_text("file,label\na.png,1\n")
    queries, known = find_support(tmp_path / "more", tmp_path / "all" / "known")
    assert (len(queries), known.labels) == (2, (1,))


def test_an_image_has_one_line_of_a_table(tmp_path):
    fill(tmp_path, "a.png")
    (tmp_path / "labels.csv").write_text("file,label\na.png,0\n./a.png,1\n")
    with pytest.raises(DataError, match=r"line 3: ./a.png is listed a second time"):
        find_images(tmp_path)


def test_labels_of_other_folders_are_not_mixed(tmp_path):
    """The rank of a folder's name says which class it is among the same folders only."""
    fill(tmp_path / "data", "cat/1.png", "dog/2.png")
    fill(tmp_path / "same", "cat/3.png", "dog/4.png")
    fill(tmp_path / "other", "ant/5.png", "cat/6.png", "dog/7.png")
    images, known = find_support(tmp_path / "data", tmp_path / "same")
    assert images.classes == known.classes == ("cat", "dog")
    assert images.select([1]).classes == ("cat", "dog")
    with pytest.raises(DataError, match="do not have the same subfolders, one per class: only one of them has ant;"):
        find_support(tmp_path / "data", tmp_path / "other")
    (tmp_path / "other" / "labels.csv").write_text("file,label\nant/5.png,7\n")
    images, known = find_support(tmp_path / "data", tmp_path / "other")
    assert (known.labels, known.classes) == ((7,), None)


@pytest.mark.parametrize("name", ["x.png", "labels.csv"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    fill(tmp_path, "a.png")
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}.*not a regular file"):
        find_images(tmp_path).load(Preprocessing())
