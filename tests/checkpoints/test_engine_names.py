"""vLLM's own classes take every key of our stream: none is unknown, none is skipped.

`benchmarks/engine_names.py` has recorded what vLLM does with each key. The keys of today's stream
must be the recorded ones.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures.models import tiny

from hf_moe_ep import hub_tensors, patch

TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("engine_names.json").read_text()
)
ROWS = [(engine, kind) for engine, rows in TABLE.items() for kind in rows]


def test_the_table_has_the_types_that_people_train() -> None:
    assert {"qwen3_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "mixtral"} <= {k for _, k in ROWS}


@pytest.mark.parametrize(("engine", "model_type"), ROWS)
def test_the_engine_takes_every_key(engine: str, model_type: str) -> None:
    row = TABLE[engine][model_type]
    assert row["skipped"] == [] and row["unfilled"] == []
    model = tiny(model_type, dtype=torch.bfloat16)
    keys = sorted(info.key for info in hub_tensors(patch(model)).metadata())
    assert len(keys) == row["keys"]
    assert hashlib.sha256("\n".join(keys).encode()).hexdigest() == row["sha256"]
