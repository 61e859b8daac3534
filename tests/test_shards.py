"""Tar files of images, and the labels of ImageNet's validation images; hostile and damaged ones are refused."""

import gzip
import io
import tarfile

import pytest
import torch
from PIL import Image

from adalog import DataError
from adalog.inputs.images import ImageSet, find_images, find_support
from adalog.inputs.shards import Member
from test_images import RAW, reds


def picture(red):
    """The bytes of a small image."""
    out = io.BytesIO()
    Image.new("RGB", (4, 4), (red, 0, 0)).save(out, "PNG")
    return out.getvalue()


def tar(path, members, **kinds):
    """A tar file with these members: bytes by name. kinds: what those that are no plain files are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, kind in kinds.items():
            info = tarfile.TarInfo(f"{name}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    return path


def labelled(*reds_and_labels, first=0):
    members = {}
    for number, (red, label) in enumerate(reds_and_labels, first):
        members[f"train/{number:03}.png"] = picture(red)
        members[f"train/{number:03}.cls"] = f"{label}\n".encode()
    return members


@pytest.mark.parametrize("name", ["train/000.png", "train/000.cls"])
def test_a_member_that_is_there_twice_is_refused(tmp_path, name):
    path = tar(tmp_path / "a.tar", labelled((1, 5)))
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo(f"./{name}")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"6"))
    with pytest.raises(DataError, match=f"{name} twice: keep one of them"):
        find_images(tmp_path)


def test_members_of_hidden_folders_are_passed_over(tmp_path):
    tar(tmp_path / "a.tar", {"a.png": picture(1), ".hidden/b.png": picture(2), "c/.d/e.png": b"x"})
    assert len(find_images(tmp_path)) == 1


def test_images_of_several_tar_files(tmp_path):
    tar(tmp_path / "b.tar", labelled((3, 0), first=7))
    tar(tmp_path / "a.tar", {"notes.txt": b"none", **labelled((1, 5), (2, 6)), "train/.hidden.png": b"x"})
    images = find_images(tmp_path)
    assert [str(path).removeprefix(f"{tmp_path}/") for path in images.paths] == [
        *("a.tar:train/000.png", "a.tar:train/001.png", "b.tar:train/007.png")
    ]
    assert images.labels == (5, 6, 0)
    assert images.classes is None
    assert reds(images.load(RAW, jobs=2)) == [1, 2, 3]
    assert reds(images.select([2, 0]).load(RAW)) == [3, 1]
    assert find_images(tmp_path / "b.tar") == images.select([2])
    assert find_support(tmp_path / "a.tar", tmp_path / "b.tar") == (images.select([0, 1]), images.select([2]))
    assert find_support(tmp_path, tmp_path / "b.tar") == (images.select([0, 1]), images.select([2]))


def test_images_without_labels_and_links(tmp_path):
    """Links, devices and folders are passed over, whatever they point to."""
    kinds = {"link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "pipe": tarfile.FIFOTYPE, "folder": tarfile.DIRTYPE}
    tar(tmp_path / "a.tar", {"x.png": picture(1), "../../up.png": picture(2)}, **kinds)
    images = find_images(tmp_path)
    assert images.labels is None
    assert reds(images.load(RAW)) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"]


def test_images_beside_tar_files_count_alone(tmp_path):
    (tmp_path / "x.png").write_bytes(picture(9))
    tar(tmp_path / "a.tar", labelled((1, 5)))
    assert reds(find_images(tmp_path).load(RAW)) == [9]


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"a.png": picture(1), "a.cls": b"1", "b.png": picture(2)}, r"a\.tar:b\.png has no label, but others have one"),
        ({"a.png": picture(1), "a.cls": b"cat"}, r"a\.tar:a\.cls: label 'cat' is not a class index"),
        ({"a.png": picture(1), "a.cls": b"1" * 21}, r"a\.tar:a\.cls is too large, with 21 bytes: leave it out"),
        ({"a.png": picture(1), "a.jpg": picture(1), "a.cls": b"1"}, r"several images a\.\*, but one label a\.cls"),
        ({"a.txt": b"1"}, "a.tar has no images: give tar files with members such as KEY.jpg and KEY.cls"),
    ],
)
def test_odd_members_are_refused(tmp_path, members, told):
    tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=told):
        find_images(tmp_path)


def answer(call):
    """What a call gives, or the error with which it refuses."""
    try:
        return call()
    except DataError as cause:
        return str(cause)


def test_damaged_tar_files_are_refused(tmp_path):
    whole = tar(tmp_path / "a.tar", labelled((1, 5), (2, 6))).read_bytes()
    for length in range(0, 5 * 1024, 256):
        (tmp_path / "a.tar").write_bytes(whole[:length])
        found = answer(lambda: find_images(tmp_path))
        assert "a.tar" in found if isinstance(found, str) else len(found) == 2
    for place in range(0, 4096, 61):
        changed = bytearray(whole)
        changed[place] ^= 0x55
        (tmp_path / "a.tar").write_bytes(changed)
        found = answer(lambda: find_images(tmp_path).load(RAW))
        assert not isinstance(found, str) or "a.tar" in found
    (tmp_path / "a.tar").write_bytes(gzip.compress(whole))
    with pytest.raises(DataError, match="give a complete, uncompressed file"):
        find_images(tmp_path)


@pytest.mark.parametrize("size", [-512, -1, -(2**60)])
def test_sizes_below_zero_are_refused(tmp_path, size):
    """In base 256 a size may be negative, and tarfile would go back by it, for ever; the checksum is right here."""
    header = bytearray(tarfile.TarInfo("x.bin").tobuf())
    header[124:136] = (size % 256**12).to_bytes(12, "big")
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    (tmp_path / "a.tar").write_bytes(bytes(header) + bytes(1024))
    with pytest.raises(DataError, match=r"a\.tar is damaged in 'x\.bin': download it again"):
        find_images(tmp_path)


def test_an_image_that_is_gone_or_none(tmp_path):
    tar(tmp_path / "a.tar", {"x.png": b"no image"})
    with pytest.raises(DataError, match=r"a\.tar:x\.png is not an image that Pillow can read"):
        find_images(tmp_path).load(RAW)
    with pytest.raises(DataError, match=r"b\.tar:x\.png cannot be read as an image: No such file"):
        ImageSet((Member(tmp_path / "b.tar", "x.png", 0, 9),)).load(RAW)


NUMBERS = torch.randperm(1000, generator=torch.Generator().manual_seed(0))  # of synsets in order, from 0
KIT = "".join(f"n{rank:08} {int(number) + 1} word, other\n" for rank, number in enumerate(NUMBERS))


TRUTH = "ILSVRC2012_validation_ground_truth.txt"


def validation(folder, *numbers):
    for number in numbers:
        path = folder / f"ILSVRC2012_val_{number:08}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return folder


def truth(place, *classes):
    """The ground truth of a kit for images of these classes."""
    place.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{int(NUMBERS[each]) + 1}\n" for each in classes)
    (place / TRUTH).write_text(text)
    return place


@pytest.mark.parametrize("place", ["val", ".", "ILSVRC2012_devkit_t12/data"])
def test_the_ground_truth_of_the_kit(tmp_path, place):
    validation(tmp_path / "val", 1, 3, 4)
    kit = truth(tmp_path / place, 7, 8, 999, 0)
    (kit / "map_clsloc.txt").write_text(KIT)
    assert find_images(tmp_path / "val").labels == (7, 999, 0)


def test_the_ground_truth_for_a_tar_file(tmp_path):
    names = {f"ILSVRC2012_val_{number:08}.JPEG": picture(number) for number in (2, 1)}
    tar(tmp_path / "ILSVRC2012_img_val.tar", names)
    (truth(tmp_path, 7, 8) / "map_clsloc.txt").write_text(KIT)
    assert find_images(tmp_path / "ILSVRC2012_img_val.tar").labels == (8, 7)


def test_the_synsets_of_meta_mat(tmp_path):
    io_ = pytest.importorskip("scipy.io")
    import numpy as np

    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    rows = [(int(number) + 1, f"n{rank:08}", "word", "text", 0) for rank, number in enumerate(NUMBERS)]
    rows += [(1001, "n00000000", "whole", "text", 3)]
    rows.sort()
    validation(tmp_path / "val", 1, 2)
    kit = truth(tmp_path / "ILSVRC2012_devkit_t12" / "data", 500, 3)
    io_.savemat(kit / "meta.mat", {"synsets": np.array(rows, dtype=fields).reshape(-1, 1)})
    assert find_images(tmp_path / "val").labels == (500, 3)
    (kit / "meta.mat").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"meta\.mat is not the meta\.mat of ImageNet's kit"):
        find_images(tmp_path / "val")


def test_files_and_classes_in_a_text(tmp_path):
    validation(tmp_path / "val", 1, 2)
    (tmp_path / "val.txt").write_text("ILSVRC2012_val_00000002.JPEG 65\nILSVRC2012_val_00000001.JPEG 970\n")
    assert find_images(tmp_path / "val").labels == (970, 65)


def test_other_images_have_no_ground_truth(tmp_path):
    (truth(tmp_path, 7, 8) / "map_clsloc.txt").write_text(KIT)
    (tmp_path / "x.png").write_bytes(picture(1))
    assert find_images(tmp_path).labels is None


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({TRUTH: "1\n"}, r"put the kit's meta\.mat or map_clsloc\.txt next to it"),
        (
            {TRUTH: "1\n", "map_clsloc.txt": "n1 1 x\n"},
            r"map_clsloc\.txt has 1 numbered synsets, but ImageNet has 1000",
        ),
        *(
            ({TRUTH: text, "map_clsloc.txt": KIT}, f"has no ILSVRC number from 1 to 1000 in line {line}")
            for text, line in (("1\n", 2), ("1\n0\n", 2), ("1\n\n\n0\n", 4))
        ),
        *(
            (
                {"val.txt": f"{before}ILSVRC2012_val_00000001.JPEG 1000\n"},
                rf"val\.txt, line {line} is not FILE CLASS, with a class from 0",
            )
            for before, line in (("", 1), ("\n \n", 3))
        ),
        ({"val.txt": "ILSVRC2012_val_00000001.JPEG 1\n"}, r"val\.txt has no class for ILSVRC2012_val_00000002\.JPEG"),
    ],
)
def test_wrong_ground_truth_is_refused(tmp_path, files, told):
    validation(tmp_path / "val", 1, 2)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=told):
        find_images(tmp_path / "val")
