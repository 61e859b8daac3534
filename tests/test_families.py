"""Vision transformers of every family go through with no code of their own: counts at full size, small ones whole."""

from collections import Counter

import pytest
import torch

import adalog
import zoo
from adalog import Config, Search, library
from adalog.graph.capture import capture
from adalog.graph.sites import census, find_blocks, find_pairs, find_sites
from toys import decibels

# --- counts at full size ---------------------------------------------------------------------------------------------


def timm(name, **choices):
    def make():
        import timm

        return timm.create_model(name, num_classes=10, **choices)

    return make


def hf(name, config, **choices):
    def make():
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**choices))

    return make


# linears, convolutions, Q K^T, A V, sites after GELU, folded pairs. A pre-norm block has 4 linears (6 where queries,
# keys and values are separate) and 2 pairs; the last norm and the classifier make one more of each. Swin has a linear
# more for each of 3 mergings, whose norm is a pair too.
# DeiT-T and Swin-T are as deep as published; the others have 2 blocks, which differ from 12 in number alone. DeiT-T is
# as wide; the others are narrow, since width changes no count. For ViTs of other libraries see test_sites.py.
SHORT_AND_NARROW = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
_MLP = {**SHORT_AND_NARROW, "intermediate_size": 96}
FULL = {
    "timm deit_tiny": (timm("deit_tiny_patch16_224"), (49, 1, 12, 12, 12, 25)),
    "timm swin_tiny": (timm("swin_tiny_patch4_window7_224", embed_dim=24), (52, 1, 12, 12, 12, 27)),
    # The classifier reads the class token beside the mean of the others, so no linear reads the last norm itself.
    "hf dinov2": (hf("Dinov2ForImageClassification", "Dinov2Config", **SHORT_AND_NARROW), (13, 1, 2, 2, 2, 4)),
    # Beside 2 x 6 linears attention pooling: the probe's projection, one for keys and values together, one after it,
    # and an MLP of 2 behind a norm, which is the 5th pair. The norm before is an output of the model, so is no pair.
    "hf siglip": (hf("SiglipVisionModel", "SiglipVisionConfig", **_MLP), (17, 1, 3, 3, 3, 5)),
    # 2 x 6, and two heads of 3 linears. The last norm, which they read, is an output of the model.
    "hf yolos": (hf("YolosForObjectDetection", "YolosConfig", image_size=[64, 96], **_MLP), (18, 1, 2, 2, 2, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_counts_at_full_depth(name):
    make, expected = FULL[name]
    torch.manual_seed(0)
    model = make().eval()
    size = getattr(getattr(model, "config", None), "image_size", 224)
    images = torch.randn(2, 3, *(size if isinstance(size, (list, tuple)) else (size, size)))
    program = capture(model, images)
    sites = find_sites(program)
    counts = census(program, sites, find_pairs(program, sites, (images,)))
    assert tuple(counts[key] for key in zoo.COUNTS) == expected
    assert len(find_blocks(program)) == expected[3] + 2  # what comes before the first, and the head


# --- small ones, end to end ------------------------------------------------------------------------------------------


def of(module, name, **choices):
    """A maker of a model by its class."""

    def make():
        import importlib

        return getattr(importlib.import_module(f"timm.models.{module}"), name)(num_classes=10, **choices)

    return make


def mobilevit(name):
    """Of its five stages one of convolutions and one with attention, which the others repeat."""

    def make():
        from timm.models.mobilevit import model_cfgs

        return timm(name, blocks=model_cfgs[name].blocks[::2][:2])()

    return make


def mvit():
    from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

    return MultiScaleVit(MultiScaleVitCfg(depths=(1, 1), embed_dim=24, num_heads=1), img_size=(32, 32), num_classes=10)


_LEVIT = {"img_size": 64, "embed_dim": (16, 24, 32), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (2, 2, 2)}
_MSRA = {"embed_dim": (16, 32, 48), "key_dim": (8, 8, 8), "window_size": (2, 2, 2), "kernels": (5, 5, 5, 5)}
_TINY = {"depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_sizes": (4, 4, 4, 2)}
_SAM = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3, "use_rel_pos": True, "window_size": 3}
_TWINS = {"embed_dims": (16, 32), "num_heads": (2, 2), "mlp_ratios": (2, 2), "depths": (2, 1), "sr_ratios": (2, 1)}
_CROSS = {"img_scale": (1.0, 0.75), "patch_size": (16, 12), "embed_dim": (24, 32), "depth": ((1, 1, 0),)}
_PIT = {"img_size": 32, "stride": 4, "patch_size": 8, "mlp_ratio": 2}
_PIT |= {"base_dims": (8, 8), "depth": (1, 1), "heads": (2, 4)}
_DAVIT = {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 2), "window_size": 4}
_FORMER = {"depths": (1, 1, 1, 2), "embed_dims": (8, 8, 16, 32), "num_vit": 1}
_MIT = {"widths": (8, 8, 16, 16, 32), "depths": (1,) * 5, "head_dim": 8, "head_widths": (32, 32)}
_FAST = {"token_mixers": (*["repmixer"] * 3, "attention"), "embed_dims": (8, 16, 16, 32)}
_FAST |= {"layers": (1, 1, 1, 1), "mlp_ratios": (2, 2, 2, 2)}
_COAT = {"depths": (1, 1, 1, 1), "embed_dim": (32, 32, 64, 64)}
_VOLO = {"embed_dims": (24, 48, 48, 48), "outlook_attention": (True, *[False] * 3), "layers": (1, 1, 1, 1)}
_VOLO |= {"num_heads": (2, 2, 2, 2), "downsamples": (True, *[False] * 3), "mlp_ratio": 2}
_VITS = {"embed_dim": 48, "num_heads": 3, "depth": 1}

# name -> (maker, image size, the counts of linears, convolutions, Q K^T and A V)
FAMILIES = {
    "swin v2": (zoo.timm_swin_v2, 32, (14, 1, 3, 3)),
    "pvt v2": (zoo.timm_pvt, 32, (11, 5, 2, 2)),
    "cait": (timm("cait_xxs24_224", img_size=32, depth_token_only=1, embed_dim=32, num_heads=2, depth=2), 32, None),
    "eva02": (timm("eva02_tiny_patch14_224", img_size=28, **_VITS), 28, (5, 1, 1, 1)),
    "beit": (timm("beit_base_patch16_224", img_size=32, **_VITS), 32, (5, 1, 1, 1)),
    "levit": (of("levit", "Levit", **_LEVIT), 64, (23, 4, 5, 5)),
    "levit of convolutions": (of("levit", "Levit", use_conv=True, **_LEVIT), 64, (1, 26, 5, 5)),
    "tiny vit": (of("tiny_vit", "TinyVit", embed_dims=(16, 16, 32, 32), **_TINY), 64, (13, 17, 3, 3)),
    "mobilevit": (mobilevit("mobilevit_xxs"), 64, (9, 12, 2, 2)),
    "mobilevit v2": (mobilevit("mobilevitv2_050"), 64, (1, 18, 0, 0)),
    # Queries by tables of relative positions, rows and columns, are products like those with keys.
    "mvit v2": (mvit, 32, (10, 7, 6, 2)),
    "sam": (of("vision_transformer_sam", "VisionTransformerSAM", global_attn_indexes=(1,), **_SAM), 64, (9, 3, 6, 2)),
    "efficientformer": (of("efficientformer", "EfficientFormer", **_FORMER), 224, (6, 13, 1, 1)),
    # Attention whose heads a convolution mixes after the softmax.
    "efficientformer v2": (of("efficientformer_v2", "EfficientFormerV2", img_size=64, **_FORMER), 64, (2, 41, 3, 3)),
    # Linear attention: Q (K^T V) without a softmax, so two products that are like those with keys.
    "efficientvit of mit": (of("efficientvit_mit", "EfficientVit", **_MIT), 64, (2, 30, 4, 0)),
    "efficientvit of msra": (of("efficientvit_msra", "EfficientVitMsra", **_LEVIT | _MSRA), 64, (1, 59, 6, 6)),
    "fastvit": (of("fastvit", "FastVit", **_FAST), 64, (3, 36, 1, 1)),
    "xcit": (of("xcit", "Xcit", img_size=32, patch_size=8, cls_attn_layers=1, **{**_VITS, "num_heads": 2}), 32, None),
    "twins": (of("twins", "Twins", img_size=64, wss=(4, 4), **_TWINS), 64, (14, 5, 3, 3)),
    "edgenext": (timm("edgenext_xx_small", depths=(1, 1, 1, 1)), 64, (15, 12, 3, 3)),
    "convit": (timm("convit_tiny", img_size=32, depth=1, embed_dim=48, num_heads=4), 32, (7, 1, 2, 0)),
    "volo": (of("volo", "VOLO", img_size=64, **_VOLO), 64, (29, 5, 5, 6)),
    "davit": (of("davit", "DaVit", **_DAVIT), 64, (17, 10, 4, 4)),
    "pit": (of("pit", "PoolingVisionTransformer", **_PIT), 32, (10, 2, 2, 2)),
    "maxvit": (timm("maxvit_pico_rw_256", img_size=64, stem_width=8, depths=(1, 1), embed_dim=(32, 32)), 64, None),
    "coatnet": (timm("coatnet_pico_rw_224", img_size=64, stem_width=(8, 8), **_COAT), 64, None),
    "crossvit": (of("crossvit", "CrossVit", img_size=64, num_heads=(2, 2), mlp_ratio=(2, 2, 1), **_CROSS), 64, None),
}
# Signal to noise [dB] where random weights are hard: TinyViT's values around its GELUs are so close to zero that a
# logarithmic quantizer, which is finest at the minimum, tells few of them apart; MobileViT v2 multiplies by a context
# that puts most of a projection's input near zero.
LEAST = {"tiny vit": -3, "mobilevit v2": 10}
SHORT = Search(init=(8, 4), parents=4, steps=0, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_families_end_to_end(name, tmp_path):
    make, size, counts = FAMILIES[name]
    torch.manual_seed(0)
    model = make().eval()
    images = torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))
    config = Config(images=2, weight_bits=8, activation_bits=8, softmax_bits=8, search=SHORT)
    result = adalog.quantize(model, images[:2], config)
    roles = Counter(row.role for row in result.ledger)
    if counts is not None:
        assert tuple(roles[role] for role in ("linear", "conv", "qk", "av")) == counts
    assert result.float_sites() == []
    expected, outputs = model(images), result(images)
    assert outputs.shape == expected.shape
    assert result.save(tmp_path / "model") > 0
    assert torch.equal(adalog.load(tmp_path / "model")(images), outputs)
    for executor in ("torch", "native") if library.levels() else ("torch",):
        difference = result.compile(executor)(images) - outputs  # values at the edge of two codes
        assert difference.norm() < 0.2 * outputs.norm(), executor
    assert decibels(outputs[:2], expected[:2]) > LEAST.get(name, 15)
