"""Run a model with NumPy and the compiled library, without PyTorch.

    adalog pack model.safetensors -o model.adalog
    python examples/deploy_without_pytorch.py model.adalog [IMAGE.npy]

IMAGE.npy: a float32 array (1, 3, H, W), prepared as the model expects; noise if it is not given. `adalog pack` needs
PyTorch; this script does not import it.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

import adalog.run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pack", type=Path)
    parser.add_argument("image", type=Path, nargs="?")
    options = parser.parse_args()

    model = adalog.run.load(options.pack)
    (shape,) = model.inputs.values()
    noise = np.random.default_rng(0).standard_normal((1, *shape), dtype=np.float32)
    logits = model(np.load(options.image) if options.image else noise)
    print(f"{model.level} kernels, {model.nbytes:,} bytes of memory")
    print("largest output:", int(logits.argmax()), "PyTorch imported:", "torch" in sys.modules)


if __name__ == "__main__":
    main()
