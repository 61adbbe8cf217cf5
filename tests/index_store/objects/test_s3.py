"""The same against S3, as moto's server plays it over loopback."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from index_store.errors import ObjectsUnavailableError
from index_store.objects.bucket import Bucket, ObjectMissingError
from index_store.objects.records import look
from tests.index_store.objects.sites import Site
from tests.support.store import SyntheticContext, synthetic_context


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty one."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/contexts", method="PUT")).close()
    made = Bucket.open("s3://contexts/below")
    made.delete([each.key for each in made.list("contexts/")])
    return made


def test_the_verbs(bucket: Bucket) -> None:
    assert bucket.put_new("contexts/a", b"one")
    assert bucket.put_new("contexts/a", b"one")
    assert not bucket.put_new("contexts/a", b"two")
    large = bytes(range(256)) * (80 << 10)
    bucket.put("contexts/b", iter([large[:100], large[100:]]), len(large))  # in parts
    assert bucket.size("contexts/b") == len(large)
    assert bucket.read("contexts/b", 1000, 5000) == large[1000:6000]
    assert [each.key for each in bucket.list("contexts/")] == ["contexts/a", "contexts/b"]

    def failing() -> Iterator[bytes]:
        yield large
        raise KeyError("what was read is damaged")

    with pytest.raises(KeyError):
        bucket.put("contexts/c", failing(), 2 * len(large))
    with pytest.raises(ObjectMissingError):
        bucket.get("contexts/c")
    bucket.delete(["contexts/a", "contexts/b", "contexts/none"])
    assert bucket.list("contexts/") == []


def test_two_sites(bucket: Bucket, tmp_path: Path, context: SyntheticContext) -> None:
    here, there = Site.at(tmp_path / "here", bucket), Site.at(tmp_path / "there", bucket)
    large = synthetic_context(tokens=3000, seed=4, name="large")
    context.write(here.store)
    large.write(there.store)
    here.settle()
    there.settle()
    here.settle()
    for site in (here, there):
        for each in (context, large):
            site.store.bring(each.id)
            assert site.store.verify(each.id) == []
    here.store.delete(context.id)
    here.settle()
    there.settle()
    assert [each.id for each in there.store.list()] == [large.id]
    assert len(look(bucket)) == 2


def test_a_store_that_is_not_there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("index_store.objects.bucket._RETRIES", 0)
    with pytest.raises(ObjectsUnavailableError, match="cannot be used now"):
        Bucket.open("s3://contexts/below").list("contexts/")
