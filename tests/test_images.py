"""Images and folders of images: read, prepared as timm and Hugging Face do, chosen, and refused."""

import io
import json
import math
import os
import random
import struct
import warnings
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image

from adalog import CalibrationError, DataError
from adalog._quantize import sample_images
from adalog.inputs.images import ImageSet, Preprocessing, draw_indices, find_images, find_support, read_image

RAW = Preprocessing((4, 4), (4, 4), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), rescale=1.0)  # keeps the codes


def noise(height, width, channels=3, seed=0):
    """Random codes with large and small shapes in them, so that resizing and cropping show: uint8."""
    rng = np.random.default_rng(seed)
    rough = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
    fine = rng.integers(0, 60, (height, width, 3))
    return np.clip(np.array(rough) + fine - 30, 0, 255).astype(np.uint8)[..., :channels].squeeze()


def saved(image, path, **options):
    image.save(path, **options)
    return path


def pixels(image):
    assert image.mode == "RGB"
    return np.array(image)


# --- reading a file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "bmp", "ppm", "tiff"])
def test_colour_is_read_as_it_is(tmp_path, suffix):
    codes = noise(9, 13)
    assert np.array_equal(pixels(read_image(saved(Image.fromarray(codes), tmp_path / f"image.{suffix}"))), codes)


def test_grey_black_and_white_and_palette(tmp_path):
    grey = noise(9, 13, channels=1)
    image = read_image(saved(Image.fromarray(grey), tmp_path / "grey.png"))
    assert np.array_equal(pixels(image), np.stack([grey] * 3, axis=-1))
    bits = grey > 128
    image = read_image(saved(Image.fromarray(bits), tmp_path / "bits.png"))
    assert np.array_equal(pixels(image), np.stack([bits * np.uint8(255)] * 3, axis=-1))
    colours = np.random.default_rng(1).integers(0, 256, (256, 3), dtype=np.uint8)
    palette = Image.fromarray(grey)
    palette.putpalette(colours.tobytes())
    assert palette.mode == "P"
    assert np.array_equal(pixels(read_image(saved(palette, tmp_path / "palette.png"))), colours[grey])


@pytest.mark.parametrize("suffix", ["png", "tiff", "pgm"])
def test_sixteen_bits_become_the_upper_eight(tmp_path, suffix):
    values = np.random.default_rng(0).integers(0, 65536, (9, 13)).astype(np.uint16)
    values[0, :3] = 0, 255, 65535
    image = read_image(saved(Image.fromarray(values), tmp_path / f"deep.{suffix}"))
    assert np.array_equal(pixels(image), np.stack([values // 256] * 3, axis=-1))


def test_sixteen_bit_grey_is_the_same_in_colour(tmp_path):
    """A PNG of 16 bits in each of three equal channels, written by hand, is what Pillow makes of its own."""
    values = np.random.default_rng(0).integers(0, 65536, (4, 5)).astype(">u2")
    rows = b"".join(b"\0" + np.repeat(row, 3).astype(">u2").tobytes() for row in values)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 5, 4, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in chunks:
        content += struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    (tmp_path / "colour.png").write_bytes(content)
    grey = saved(Image.fromarray(values.astype(np.uint16)), tmp_path / "grey.png")
    assert np.array_equal(pixels(read_image(tmp_path / "colour.png")), pixels(read_image(grey)))


def test_transparent_is_white_and_opaque_is_unchanged(tmp_path):
    codes = noise(8, 8)
    alpha = np.full((8, 8, 1), 255, np.uint8)
    alpha[:, 3], alpha[:, 5:] = 128, 0
    image = Image.fromarray(np.concatenate([codes, alpha], axis=-1))
    assert image.mode == "RGBA"
    for suffix in ("png", "webp"):
        options = {"lossless": True, "exact": True} if suffix == "webp" else {}
        found = pixels(read_image(saved(image, tmp_path / f"alpha.{suffix}", **options)))
        assert np.array_equal(found[:, [0, 1, 2, 4]], codes[:, [0, 1, 2, 4]])
        assert (found[:, 5:] == 255).all()
        half = codes[:, 3] * (128 / 255) + 255 * (127 / 255)
        assert np.abs(found[:, 3] - half).max() <= 1


def test_transparency_of_grey_palette_and_sixteen_bits(tmp_path):
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    want = np.where(grey == 7, 255, grey)
    assert np.array_equal(
        pixels(read_image(saved(Image.fromarray(grey), tmp_path / "grey.png", transparency=7)))[..., 0], want
    )
    palette = Image.fromarray(grey)
    palette.putpalette(np.repeat(np.arange(256, dtype=np.uint8), 3).tobytes())
    for name, transparency in (("one.png", 7), ("all.png", bytes([255] * 7 + [0] + [255] * 56)), ("one.gif", 7)):
        found = read_image(saved(palette, tmp_path / name, transparency=transparency))
        assert np.array_equal(pixels(found)[..., 0], want)
    both = Image.merge("LA", [Image.fromarray(grey), Image.fromarray(np.where(grey == 7, 0, 255).astype(np.uint8))])
    assert np.array_equal(pixels(read_image(saved(both, tmp_path / "both.png")))[..., 0], want)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    found = read_image(saved(deep, tmp_path / "deep.png", transparency=7 * 257))
    assert np.array_equal(pixels(found)[..., 0], want)


def test_cmyk(tmp_path):
    inks = np.zeros((8, 8, 4), np.uint8)
    inks[:, :4, 0], inks[:, 4:, 3] = 255, 255  # cyan, black
    for suffix in ("tiff", "jpg"):
        found = pixels(read_image(saved(Image.fromarray(inks, "CMYK"), tmp_path / f"inks.{suffix}"))).astype(int)
        assert np.abs(found[:, :4] - [0, 255, 255]).max() <= 8
        assert np.abs(found[:, 4:]).max() <= 8


@pytest.mark.parametrize("suffix", ["png", "jpg", "tiff"])
def test_exif_orientation_is_applied(tmp_path, suffix):
    """By the standard: where row 0 and column 0 of the stored image lie in the upright one."""
    stored = np.kron(np.array([[10, 60, 110], [160, 210, 250]], np.uint8), np.ones((16, 16), np.uint8))
    upright = {
        1: stored,  # top, left
        2: stored[:, ::-1],  # top, right
        3: stored[::-1, ::-1],  # bottom, right
        4: stored[::-1],  # bottom, left
        5: stored.T,  # left, top
        6: stored.T[:, ::-1],  # right, top
        7: stored.T[::-1, ::-1],  # right, bottom
        8: stored.T[::-1],  # left, bottom
        9: stored,  # means nothing
    }
    for orientation, want in upright.items():
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        found = pixels(read_image(saved(Image.fromarray(stored), tmp_path / f"{orientation}.{suffix}", exif=exif)))
        assert found.shape[:2] == want.shape
        assert np.abs(found[..., 0].astype(int) - want).max() <= (3 if suffix == "jpg" else 0)


def test_damaged_exif_is_not_a_damaged_image(tmp_path):
    codes = noise(16, 16)
    file = saved(Image.fromarray(codes), tmp_path / "image.png", exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x09broken")
    assert np.array_equal(pixels(read_image(file)), codes)


def test_of_an_animation_the_first_image(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    found = pixels(read_image(saved(frames[0], tmp_path / "two.gif", save_all=True, append_images=frames[1:])))
    assert (found == [255, 0, 0]).all()


def jpeg(height=64, width=64):
    file = io.BytesIO()
    Image.fromarray(noise(height, width)).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not an image that Pillow can read"),
        (b"file,label\n", "is not an image that Pillow can read"),
        (jpeg()[:400], "cannot be read as an image: "),
        (jpeg()[:-200], "cannot be read as an image: image file is truncated"),
        ("missing", "cannot be read as an image: No such file or directory"),
        ("folder", "cannot be read as an image: Is a directory"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, told):
    file = tmp_path / "image.jpg"
    if content == "folder":
        file.mkdir()
    elif content != "missing":
        file.write_bytes(content)
    with pytest.raises(DataError, match="leave it out") as raised:
        read_image(file)
    assert str(raised.value).startswith(f"{file} {told}")


def test_damage_anywhere_raises_nothing_else(tmp_path):
    """Bytes of small files of several formats are changed or cut off at random."""
    rng = random.Random(0)
    file = tmp_path / "image"
    for form in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        whole = io.BytesIO()
        Image.fromarray(noise(8, 8)).save(whole, form)
        for _ in range(60):
            content = bytearray(whole.getvalue())
            for _ in range(rng.randint(1, 6)):
                content[rng.randrange(len(content))] = rng.randrange(256)
            file.write_bytes(content[: rng.randint(1, len(content))] if rng.random() < 0.5 else content)
            try:
                outcome = read_image(file).mode
            except DataError as error:
                outcome = str(error)
            assert outcome == "RGB" or str(file) in outcome


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.full((4, 4), 0.5, np.float32), "floating-point"),
        (np.full((4, 4), 70_000, np.int32), "32-bit integers"),
        (np.full((4, 4), 200, np.int32), "32-bit integers"),
    ],
)
def test_numbers_without_a_range_are_refused(tmp_path, values, told):
    with pytest.raises(DataError, match=told):
        read_image(saved(Image.fromarray(values), tmp_path / "image.tiff"))


@pytest.mark.parametrize("limit", [100, 200, 255])
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_too_many_pixels_are_refused(tmp_path, monkeypatch, limit, action):
    """Whatever Pillow does from one to two times its limit (a warning) and above (an error)."""
    file = saved(Image.fromarray(noise(16, 16)), tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with pytest.raises(DataError, match=rf"bomb\.png has more pixels than PIL\.Image\.MAX_IMAGE_PIXELS = {limit} "):
            read_image(file)
    for enough in (256, None):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", enough)
        assert read_image(file).size == (16, 16)


# --- preparing it ----------------------------------------------------------------------------------------------------


SIZES = [(224, 224), (256, 256), (333, 500), (501, 257), (100, 131), (224, 1000), (57, 31)]


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0])
@pytest.mark.parametrize(("interpolation", "side"), [("bicubic", 224), ("bilinear", 96), ("lanczos", 33)])
def test_it_is_timms_evaluation_transform(crop_pct, interpolation, side):
    from timm.data import create_transform

    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    theirs = create_transform((3, side, side), interpolation=interpolation, mean=mean, std=std, crop_pct=crop_pct)
    ours = Preprocessing((side, side), math.floor(side / crop_pct), mean, std, interpolation)
    for height, width in SIZES:
        image = Image.fromarray(noise(height, width, seed=width))
        found = ours(image)
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        torch.testing.assert_close(found, theirs(image), rtol=1e-6, atol=1e-6)


def test_the_defaults_are_imagenets():
    from timm.data import create_transform

    image = Image.fromarray(noise(333, 500))
    theirs = create_transform((3, 224, 224), interpolation="bicubic", crop_pct=0.875)
    torch.testing.assert_close(Preprocessing()(image), theirs(image), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
@pytest.mark.parametrize(("interpolation", "number"), [("nearest", 0), ("lanczos", 1), ("bilinear", 2), ("bicubic", 3)])
def test_squashed_it_is_that_of_hugging_face(size, interpolation, number):
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    shape = {"height": size[0], "width": size[1]}
    theirs = ViTImageProcessorPil(size=shape, resample=number, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4])
    ours = Preprocessing(size, size, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), interpolation)
    for height, width in SIZES:
        image = Image.fromarray(noise(height, width, seed=width))
        expected = theirs(image, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(ours(image), expected, rtol=1e-5, atol=1e-5)


def test_without_resizing_it_is_a_formula():
    codes = noise(6, 8)
    ours = Preprocessing((4, 6), (6, 8), (1.0, 2.0, 3.0), (2.0, 4.0, 8.0), rescale=0.5)
    want = (codes[1:5, 1:7].astype(np.float64) * 0.5 - [1, 2, 3]) / [2, 4, 8]
    assert np.allclose(ours(Image.fromarray(codes)).numpy(), want.transpose(2, 0, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("fit", "position", "image", "corner", "inside"),
    [
        ("contain", "top-left", (20, 10), (0, 0), (5, 10)),  # image (W, H); corner and inside (H, W)
        ("contain", "center", (20, 10), (2, 0), (5, 10)),
        ("contain", "center-floor", (9, 21), (0, 3), (10, 4)),
        ("cover", "top-left", (20, 10), (0, 0), (10, 10)),
    ],
)
def test_padding_has_the_colour_of_fill(fit, position, image, corner, inside):
    fill = (10.0, 20.0, 30.0)
    changes = {"fit": fit, "position": position, "fill": fill, "channels": "bgr"}
    ours = replace(RAW, size=(10, 10), resize=(10, 10), **changes)
    prepared = ours(Image.new("RGB", image, (1, 2, 3)))
    expected = torch.tensor(fill).flip(0).view(3, 1, 1).repeat(1, 10, 10)
    top, left = corner
    expected[:, top : top + inside[0], left : left + inside[1]] = torch.tensor([3.0, 2.0, 1.0]).view(3, 1, 1)
    assert torch.equal(prepared, expected)


def test_a_small_image_is_padded_around_its_centre():
    ours = replace(RAW, size=(8, 9), resize=(5, 4), fill=(0, 0, 0))
    white = ours(Image.new("RGB", (30, 30), "white"))[0]
    assert white.sum() == 255 * 5 * 4
    assert (white[1:6, 2:6] == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I;16"])
def test_other_modes_are_prepared_as_files_are_read(tmp_path, mode):
    image = Image.fromarray(noise(9, 13, channels=1) if mode == "I;16" else noise(9, 13))
    image = Image.fromarray(np.array(image).astype(np.uint16) * 257) if mode == "I;16" else image.convert(mode)
    ours = replace(RAW, size=(9, 13), resize=(9, 13))
    expected = noise(9, 13, channels=1)[..., None].repeat(3, 2) if mode == "I;16" else np.array(image.convert("RGB"))
    assert np.array_equal(ours(image).permute(1, 2, 0).numpy(), expected)


@settings(max_examples=100)
@given(
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    more=st.integers(0, 20),
    image=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_every_image_fills_the_crop(size, more, image):
    """A white image stays white to its edges: nothing is padded."""
    ours = Preprocessing(size, max(size) + more, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    white = ours(Image.new("RGB", image, "white"))
    assert white.shape == (3, *size)
    assert torch.allclose(white, torch.ones(()))


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"resize": 223}, r"resize = 223 is smaller than the crop size = \(224, 224\): give at least 224"),
        ({"size": (100, 300)}, "give at least 300"),
        ({"resize": (256, 223)}, r"resize = \(256, 223\) is smaller"),
        ({"size": (0, 224)}, "size = "),
        ({"size": 224}, r"size = 224 is not \(height, width\)"),
        ({"std": (1.0, 0.0, 1.0)}, "std = "),
        ({"interpolation": "cubic"}, "'cubic' is not one of bilinear, bicubic"),
        ({"resize": (0, 224)}, "resize = "),
        ({"fit": "cover"}, r"needs resize = \(height, width\), got resize = 256"),
        ({"fit": "contain", "resize": (256, 256)}, "set fill"),
        ({"fit": "fill"}, "fit = 'fill' is not one of stretch, cover, contain"),
        ({"position": "middle"}, "'middle' is not one of center, center-floor, top-left"),
        ({"channels": "rbg"}, "'rbg' is not one of rgb, bgr"),
        ({"fill": (0.0, 0.0)}, "fill = "),
        (
            {"mean": (123, 117, 104), "std": (58, 57, 57)},
            r"mean = \(123, 117, 104\) is beyond 255 \* rescale = 1: .*, or set rescale = 1$",
        ),
        ({"mean": (-1.5, 0.0, 0.0)}, "mean = "),
    ],
)
def test_bad_choices_are_refused(choice, told):
    with pytest.raises(ValueError, match=told):
        Preprocessing(**choice)


def test_means_of_pixel_values_need_pixel_values():
    assert Preprocessing(mean=(123.0, 117.0, 255.0), rescale=1).rescale == 1
    assert Preprocessing(mean=(1.0, 1.0, 1.0)).mean == (1.0, 1.0, 1.0)


def test_too_thin_an_image_is_refused_by_name(tmp_path):
    file = saved(Image.new("RGB", (10_000, 1)), tmp_path / "thin.png")
    with pytest.raises(DataError, match=r"thin\.png: an image of 10000 x 1 pixels would become one of 2560000 x 256"):
        find_images(tmp_path).load(Preprocessing())
    assert Preprocessing(resize=(256, 256))(read_image(file)).shape == (3, 224, 224)


# --- folders ---------------------------------------------------------------------------------------------------------


def fill(folder, *names):
    """Small images of different colours, by name, made from their position in the list."""
    for index, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (index, 0, 0)).save(path)
    return folder


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
    expected = "n02/z.png n03/linked.png n1/link.png n1/x.png n10/a.png n10/b.png"
    assert names(images, tmp_path) == expected.split()
    assert images.labels == (0, 1, 2, 2, 3, 3)


def test_a_table(tmp_path):
    fill(tmp_path, "q/b.png", "a.png", "s/c.png", "s/not named.png")
    (tmp_path / "any.csv").write_text("\ufefffile,label\ns/c.png,7\nq/b.png, 0\na.png,999\n", encoding="utf-8")
    images = find_images(tmp_path)
    assert names(images, tmp_path) == ["a.png", "q/b.png", "s/c.png"]
    assert images.labels == (999, 0, 7)
    assert reds(images.load(RAW)) == [1, 0, 2]


@pytest.mark.parametrize(
    "text",
    [
        "file,label\r\na.png,3\r\ns/b.png,4\r\n",
        "file, label\na.png, 3\ns/b.png , 4 \n",
        " File ,LABEL\na.png,3\ns/b.png,4\n",
        "file;label\na.png;3\ns/b.png;4\n",
        "label\tfile\tnote\n3\ta.png\tx,y\n4\ts/b.png\t\n",
        "file|label\na.png|3\ns/b.png|4\n",
        "sep=;\nfile;label\na.png;3\ns/b.png;4\n",
        'SEP=,\r\n"file", "label"\r\n"a.png","3"\r\n"s/b.png","4"\r\n',
        "file,label\na.png,3\ns\\b.png,4\n",
    ],
)
def test_tables_as_spreadsheets_write_them(tmp_path, text):
    folder = fill(tmp_path / "images", "a.png", "s/b.png")
    (folder / "labels.csv").write_bytes(text.encode("utf-8-sig"))
    images = find_images(folder)
    assert names(images, folder) == ["a.png", "s/b.png"]
    assert images.labels == (3, 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("file:label\na.png:1\n", "but with 'file:label': name the columns file and label in the first line"),
        ("image,class\na.png,1\n", "but with 'image,class'"),
        ("sep=;\nfile;label\nmissing.png;2\n", r"labels\.csv, line 3: .*missing\.png does not exist"),
        ("file,label\ns\\..\\..\\other.png,3\n", "is not a path below"),
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
        ("file,label\na.png,0\n./a.png,1\n", r"line 3: \./a\.png is listed a second time"),
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


def test_a_link_to_nothing_is_refused(tmp_path):
    """Without the class b, the label of c would be that of b."""
    fill(tmp_path, "a/x.png", "c/z.png")
    (tmp_path / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"b is a link to .*gone, which does not exist: remove it"):
        find_images(tmp_path)
    (tmp_path / "b").unlink()
    (tmp_path / "a" / "y.png").symlink_to("../../y.png")
    with pytest.raises(DataError, match=r"a/y\.png is a link to .*y\.png, which does not exist"):
        find_images(tmp_path)


def test_links_in_circles(tmp_path):
    fill(tmp_path, "a/x.png", "b/y.png")
    images = find_images(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path)
    assert find_images(tmp_path) == images
    assert find_images(tmp_path / "again").labels == (0, 1)
    (tmp_path / "round").symlink_to("square")
    (tmp_path / "square").symlink_to("round")
    with pytest.raises(DataError, match="round"):
        find_images(tmp_path)


@pytest.mark.parametrize("target", ["a", "c"])
def test_two_links_to_one_class_are_refused(tmp_path, target):
    fill(tmp_path, "a/x.png", "b/y.png", ".hidden/c/z.png")
    (tmp_path / "c").symlink_to(tmp_path / ".hidden" / "c")
    (tmp_path / "d").symlink_to(tmp_path / target)
    with pytest.raises(DataError, match=rf"d and .*{target} are the same folder: remove one of them"):
        find_images(tmp_path)


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
    told = "11 images are needed, but there are only 10: give more images, or ask for fewer"
    with pytest.raises(DataError, match=told):
        ten.sample(11, 0)


@settings(max_examples=100)
@given(total=st.integers(0, 50), count=st.integers(0, 60), seed=st.integers(0, 2**31))
def test_a_draw_is_without_replacement_and_repeats(total, count, seed):
    if count > total:
        with pytest.raises(ValueError, match=f"count = {count} "):
            draw_indices(total, count, seed)
        return
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


# --- preparation by way of JSON, and images beside those that are to be judged ----------------------------------------


@pytest.mark.parametrize("resize", [8, (8, 9)])
def test_a_preprocessing_by_way_of_json(resize):
    own = Preprocessing((8, 7), resize, (0.1, 0.2, 0.3), (1, 2, 3), "lanczos", 0.5)
    assert Preprocessing.from_json(asdict(own)) == own
    assert own.to_json() == dict(list(asdict(own).items())[:6])  # as files of the first version hold it
    other = replace(own, resize=(8, 9), fit="contain", position="top-left", fill=(1, 2.5, 3), channels="bgr")
    assert other.to_json() == asdict(other)
    for each in (own, other):
        assert Preprocessing.from_json(json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"size": 8}, "size = 8 is not made of finite numbers"),
        ({"size": [8.0, 8]}, "size = .* is not made of finite numbers"),
        ({"size": [8, 8, 8]}, "is not \\(height, width\\)"),
        ({"size": [0, 8]}, "is not \\(height, width\\)"),
        ({"resize": None}, "resize = None"),
        ({"resize": True}, "resize = True"),
        ({"mean": [0, 0, math.nan]}, "mean"),
        ({"mean": "abc"}, "mean"),
        ({"mean": [0, 0, "0"]}, "mean"),
        ({"std": [1, 1, 0]}, "with a positive std"),
        ({"std": [1, 1, math.inf]}, "std"),
        ({"rescale": "1"}, "rescale"),
        ({"rescale": [1]}, "rescale"),
        ({"interpolation": []}, "interpolation"),
        ({"fill": 0}, "fill = 0 is not made of finite numbers"),
        ({"position": None}, "position = None"),
        ({"more": 1}, "has the fields interpolation, mean, rescale, resize, size, std, and may have channels, fill"),
    ],
)
def test_other_json_is_no_preprocessing(changes, told):
    fields = asdict(Preprocessing((8, 8), 8)) | changes
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
    for folder in (tmp_path / "linked", tmp_path / "all"):
        queries, known = find_support(folder, folder / "known")
        assert (queries.labels, known.labels) == ((5, 3, 3), (3, 5))
    assert names(queries, tmp_path / "all") == ["asked/a.png", "asked/c.png", "asked/d.png"]
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
