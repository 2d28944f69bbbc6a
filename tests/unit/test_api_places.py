"""Where a refused body is at fault: by the names that its caller wrote, not by those of the validation."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ficc.controller.api.strict import _of_validation
from ficc.inference.schema import Specification
from support.specifications import document


def param_of(body: dict[str, Any]) -> str | None:
    with pytest.raises(ValidationError) as caught:
        Specification.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    return _of_validation(RequestValidationError(errors, body=body)).param


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"gpu_layers": -1}, "gpu_layers"),
        ({"gpu_layers": "some"}, "gpu_layers"),
        ({"gpu_layers": [1]}, "gpu_layers"),
        ({"runtime": []}, "runtime"),
        ({"tensor_split": [1, -1]}, "tensor_split[1]"),
        ({"placements": [{}]}, "placements[0].node_id"),
        ({"placements": [{"node_id": "x"}]}, "placements[0].node_id"),
        ({"unheard": 1}, "unheard"),
        ({"context": "many"}, "context"),
    ],
)
def test_g20_a_fault_is_named_by_the_path_that_was_written(changes: dict[str, Any], param: str) -> None:
    assert param_of(document(**changes)) == param


def test_a_member_that_is_missing_is_named() -> None:
    body = document()
    del body["alias"]
    assert param_of(body) == "alias"
