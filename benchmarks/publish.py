"""Where a benchmark's figures go: printed as one JSON object, and saved whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adalog.files import write_whole

RESULTS = Path(__file__).parent / "results"


def publish(result: Mapping[str, Any], path: Path) -> None:
    text = json.dumps(result, indent=1) + "\n"
    write_whole(path, text.encode())
    print(text, end="")
