"""A gateway in front of the tests' server, and what is sent to it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from decode_engine.gateway.serving import HttpPort
from decode_engine.rpc.server import DecodeServer
from tests.support.serving.front import both_of

MODEL = "model"


@pytest.fixture(scope="session")
def gateway(server: DecodeServer, pytestconfig: pytest.Config) -> Iterator[HttpPort]:
    with both_of(server, pytestconfig) as (_, served):
        yield served


@pytest.fixture
def web(gateway: HttpPort) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, timeout=300) as client:
        yield client


@pytest.fixture
def official(gateway: HttpPort) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client
