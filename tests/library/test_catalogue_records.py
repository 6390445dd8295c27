"""Results of the catalogue follow the schemas of their records."""

from __future__ import annotations

import jsonschema
import pytest

import rooftop
from rooftop.core.records import Record, schema
from rooftop.library.catalogue import ChipRecord, SliceRecord
from rooftop.library.results import Result
from rooftop.plan.catalogue import ModelRecord


@pytest.mark.parametrize(
    ("record", "result"),
    [
        (ChipRecord, rooftop.chip("v5p")),
        (ChipRecord, rooftop.chip("h100")),
        (SliceRecord, rooftop.chip("v5p:16x16x16")),
        (SliceRecord, rooftop.chip("h100:8x4")),
        (ModelRecord, rooftop.model("deepseek-v3")),
        (ModelRecord, rooftop.model("gpt-oss-20b")),
    ],
)
def test_results_follow_their_schemas(record: type[Record], result: Result) -> None:
    jsonschema.validate(result.to_json(), schema(record))
