"""Records the steps of the models that the cost model prices, and writes them where `simulate` finds them.

python -m tests.roofline.packaged [MODEL ...]
"""

import json
import sys
import tempfile
from pathlib import Path

from moe_serve.eplb.cost.step_record import to_json
from moe_serve.models.families.registry import read_spec
from moe_serve.models.spec import ModelSpec
from moe_serve.roofline.record import record_model
from tests.models.published import PRICED

FOLDER = Path(__file__).parents[2] / "moe_serve" / "eplb" / "cost" / "profiles" / "steps"
WIRE = {"DeepSeek-V3": "fp8", "Kimi-K2": "fp8"}  # as in their profiles; of others the compute dtype


def spec_of(name: str, folder: Path) -> ModelSpec:
    """Returns the spec of a published model. folder: for its config.json"""
    (folder / "config.json").write_text(json.dumps(PRICED[name]), encoding="utf-8")
    return read_spec(folder)


def main() -> None:
    for name in sys.argv[1:] or PRICED:
        with tempfile.TemporaryDirectory() as folder:
            spec = spec_of(name, Path(folder))
        steps = record_model(spec, name, WIRE.get(name, "auto"))
        (FOLDER / f"{name}.json").write_text(to_json(steps), encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main()
