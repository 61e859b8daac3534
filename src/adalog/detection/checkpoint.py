"""Load the weights of the public Swin detectors (mmdetection 2) into the parts of a detector."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from adalog.errors import DataError
from adalog.inputs.weights import misfit, read_weights


def load_parts(parts: Mapping[str, nn.Module], path: Path, spec: str) -> None:
    """Load a public checkpoint into the parts of a detector without running code.

    Raises DataError if a name or shape differs from the parts'; the message lists the differences.
    """
    weights, names = read_weights(path), list(public_names(parts))
    own = {public: parts[part].state_dict()[name] for part, name, public in names}
    orders = [name for name in weights if name.endswith("relative_position_index")]
    weights |= {name: weights[name].flatten() for name in orders}
    reason = misfit(own, weights)
    if not reason:
        others = (name for name in orders if not torch.equal(weights[name], own[name]))
        reason = next((f"{name} has another order" for name in others), "")
    if reason:
        raise DataError(f"{path} does not fit {spec}: {reason}; use the weights of this detector")
    for part, module in parts.items():
        module.load_state_dict({name: weights[public] for kind, name, public in names if kind == part})


def public_names(parts: Mapping[str, nn.Module]) -> Iterator[tuple[str, str, str]]:
    """Yield (part, name of a tensor in the part, its name in a public checkpoint) for every tensor."""
    for part, module in parts.items():
        kind, _, stage = part.partition("_")
        layers = {name: public for name, public in _layers(kind, module) if name != public}
        place = {"box": "roi_head.bbox_head", "mask": "roi_head.mask_head", "rpn": "rpn_head"}.get(kind, kind)
        for name in module.state_dict():
            layer = max((candidate for candidate in layers if name.startswith(f"{candidate}.")), key=len, default="")
            public = layers[layer] + name[len(layer) :] if layer else name
            yield part, name, ".".join(filter(None, [place, stage, public]))


def _layers(kind: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (our name, public name) of layers. Names inside a layer are equal, unless a longer name is listed."""
    if kind == "backbone":
        yield "features.0.0", "patch_embed.proj"
        yield "features.0.2", "patch_embed.norm"
        for stage in range(4):
            yield f"norms.{stage}", f"norm{stage}"
            yield f"features.{2 * stage + 2}", f"layers.{stage}.downsample"
            for block, _ in enumerate(module.features[2 * stage + 1]):  # type: ignore[index]
                for own, public in (("", ""), (".mlp.0", ".mlp.fc1"), (".mlp.3", ".mlp.fc2")):
                    yield f"features.{2 * stage + 1}.{block}{own}", f"layers.{stage}.blocks.{block}{public}"
    for number in range(4):
        yield f"lateral.{number}", f"lateral_convs.{number}.conv"
        yield f"smooth.{number}", f"fpn_convs.{number}.conv"
        yield f"linears.{2 * number}", f"shared_fcs.{number}"
        if kind == "mask":
            yield f"convolutions.{2 * number}", f"convs.{number}.conv"
        else:
            yield f"convolutions.{3 * number}", f"shared_convs.{number}.conv"
            yield f"convolutions.{3 * number + 1}", f"shared_convs.{number}.bn"
    yield "hidden", "rpn_conv"
    yield "scores", "rpn_cls"
    yield "offsets", "rpn_reg" if kind == "rpn" else "fc_reg"
    yield "logits", "fc_cls" if kind == "box" else "conv_logits"
