"""Small vision transformers of every library, with random weights: name -> (maker, image size)."""

import functools

import pytest
import torch
from torch import nn

from adalog import Calibration
from adalog.calibration import calibration
from adalog.errors import DataError
from adalog.graph.capture import capture
from adalog.graph.program import Program
from adalog.inputs.demo.model import DemoViT
from adalog.inputs.zoo import load_model


def demo():
    return DemoViT(width=32, depth=2, heads=2)


_TIMM = {"img_size": 32, "num_classes": 10}
_TIMM_VIT = {**_TIMM, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
_TIMM_SWIN = {**_TIMM, "patch_size": 2, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 4), "window_size": 4}


def timm_vit(**changes):
    from timm.models import VisionTransformer

    return VisionTransformer(**_TIMM_VIT | changes)


def timm_vit_extras():
    """LayerScale, normalised queries and keys, registers."""
    return timm_vit(init_values=0.1, qk_norm=True, reg_tokens=2, depth=1)


def timm_distilled():
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled(**_TIMM_VIT)


def timm_swin():
    from timm.models import SwinTransformer

    return SwinTransformer(**_TIMM_SWIN)


def timm_swin_v2():
    from timm.models import SwinTransformerV2

    return SwinTransformerV2(**_TIMM_SWIN)


def timm_pvt():
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    sizes = {"embed_dims": (16, 32), "num_heads": (1, 2), "sr_ratios": (2, 1), "mlp_ratios": (2, 2)}
    return PyramidVisionTransformerV2(depths=(1, 1), num_classes=10, **sizes)


_HF = {"image_size": 32, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}


def hf_vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(patch_size=8, num_labels=10, **_HF))


def hf_swin():
    from transformers import SwinConfig, SwinForImageClassification

    shape = {"embed_dim": 24, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
    return SwinForImageClassification(SwinConfig(image_size=32, num_labels=10, **shape))


def hf_beit():
    """A bias for queries, keys and values put together of parts."""
    from transformers import BeitConfig, BeitForImageClassification

    return BeitForImageClassification(BeitConfig(patch_size=8, num_labels=10, **_HF))


def hf_clip():
    """Quick-GELU; the features of the class token beside those of all."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    return CLIPVisionModel(CLIPVisionConfig(patch_size=8, **_HF))


def torchvision_vit():
    from torchvision.models import VisionTransformer

    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 3, "hidden_dim": 48, "mlp_dim": 96}
    model = VisionTransformer(num_classes=10, **sizes)
    nn.init.normal_(model.heads.head.weight, std=0.1)  # zero as it comes
    return model


def torchvision_swin(**changes):
    from torchvision.models import SwinTransformer

    shape = {"patch_size": [2, 2], "embed_dim": 24, "depths": [2, 1], "num_heads": [2, 4], "window_size": [4, 4]}
    return SwinTransformer(num_classes=10, **shape | changes)


def torchvision_swin_v2():
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return torchvision_swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)


MODELS = {
    maker.__name__: maker
    for maker in (
        *(demo, timm_vit, timm_vit_extras, timm_distilled, timm_swin, timm_swin_v2, timm_pvt),
        *(hf_vit, hf_swin, hf_beit, hf_clip),
        *(torchvision_vit, torchvision_swin, torchvision_swin_v2),
    )
}
QUICK = {"demo", "timm_vit"}
# For parametrize.
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def make(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().eval()


IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@functools.cache
def captured(name: str) -> tuple[nn.Module, Program]:
    """A model with its program, made once for all test modules."""
    model = make(name)
    return model, capture(model, IMAGES)


def calibrated(name: str) -> Calibration:
    """A model's calibration on `IMAGES`, with the program that all test modules share."""
    model, program = captured(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "capture", lambda *_: program)
        return Calibration(model, IMAGES)


COUNTS = ("linears", "convs", "qk", "av", "post_gelu", "pairs")
TINY = "timm:test_vit"  # 160 x 160, 64 wide, 6 deep


def refused(spec, **options):
    """What load_model says in refusing."""
    with pytest.raises(DataError) as caught:
        load_model(spec, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message
