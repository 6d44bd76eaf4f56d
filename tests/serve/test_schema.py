"""Requests made up from the OpenAPI document, right and wrong ones, find no error of the server."""

from __future__ import annotations

from contextlib import suppress
from unittest import SkipTest

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.serve.conftest import serving


@pytest.fixture(scope="module")
def short_server(engine, loaded, tmp_path_factory):
    """A reply may take a fifth of a second, so that no made-up request takes long."""
    with serving(engine, loaded, tmp_path_factory.mktemp("schema"), request_timeout=0.2) as server:
        yield server


@pytest.fixture(scope="module")
def api(short_server):
    return schemathesis.openapi.from_dict(short_server.get("/openapi.json").json())


def test_no_made_up_request_is_an_error_of_the_server(short_server, api):
    for result in api.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:
            with suppress(Unsatisfiable, SkipTest):  # where nothing can be wrong
                try_requests(operation.as_strategy(generation_mode=mode), short_server.url)


def try_requests(cases, url: str) -> None:
    @settings(
        max_examples=3,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case) -> None:
        response = case.call(base_url=url, timeout=30)
        expected = response.status_code < 500 or response.status_code in (503, 504)
        assert expected, f"{case.as_curl_command()}: {response.text}"

    check()
