"""API keys: which routes need one, where keys come from, and clients that share no cached prefix."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from typer.testing import CliRunner

from tests.cluster.conftest import make_router, running_api
from tests.cluster.stub_worker import StubWorker
from transom_cluster.cli import app
from transom_cluster.commands.serve import START_FAILED
from transom_cluster.http.api import build_api
from transom_cluster.http.api_keys import FILE_CHECK_PERIOD_S, ApiKeys, current_keys, read_key_file
from transom_cluster.serve.start_checks import check_api_keys
from transom_core.errors import ConfigError
from transom_core.kv_cache.hashing import chain_root
from transom_core.settings.settings import Settings

KEYS = ("first", "second", "dritter Schlüssel")
VARIABLES = ("TRANSOM_API_KEY_FILE", "TRANSOM_ADMIN_API_KEY_FILE")
OPEN = {"/health", "/blocks", "/blocks/assets/{name}"}  # as in docs/security.md


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def refused(response: httpx.Response) -> bool:
    if response.status_code != 401:
        return False
    if response.request.method != "HEAD":
        error = response.json()["error"]
        assert error.get("code", "invalid_api_key") == "invalid_api_key"  # Anthropic's errors have no code
        assert error["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"
    return True


async def test_every_route_needs_a_key_except_the_documented_ones():
    async with running_api(api_keys=KEYS) as api:
        routes = build_api(make_router(StubWorker())).routes
        assert len(routes) >= 12
        for route in routes:
            assert isinstance(route, Route)
            path = route.path.replace("{model_id:path}", "stub")
            for method in (*(route.methods or ()), "OPTIONS", "TRACE"):
                response = await api.client.request(method, path)
                assert refused(response) == (path not in OPEN), (method, path, response.status_code)
        for path in ("/v1/nothing", "/health/", "//health", "/health/../v1/models", "/HEALTH", "/health%2f"):
            assert refused(await api.client.post(path, json={"prompt": "x"})), path
        assert api.worker.submitted == []
        counted = api.router.metrics.registry.get_sample_value
        labels = {"model": "stub", "router": "r0", "status": "401"}
        # POST, OPTIONS and TRACE
        assert counted("transom_router_requests_total", labels | {"endpoint": "/v1/completions"}) == 3
        assert counted("transom_router_requests_total", labels | {"endpoint": "/v1/nothing"}) is None


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", "Basic first", "first", "é", "Bearer first second", "Bearer FIRST"],
)
async def test_wrong_authorization_headers_are_refused(authorization):
    async with running_api(api_keys=KEYS) as api:
        assert refused(await api.client.get("/v1/models", headers={b"authorization": authorization.encode()}))


async def test_any_of_the_keys_opens():
    async with running_api(api_keys=KEYS) as api:
        for key, scheme in zip(KEYS, ("Bearer", "bearer", "BEARER"), strict=True):
            for path in ("/v1/models", "/metrics", "/docs"):
                headers = {b"authorization": f"{scheme} {key}".encode()}
                assert (await api.client.get(path, headers=headers)).status_code == 200


async def test_a_key_file_opens_too(tmp_path):
    path = key_file(tmp_path, "# ours\n\n  from a file \n")
    async with running_api(api_keys=("given",), api_key_file=str(path)) as api:
        for key in ("given", "from a file"):
            assert (await api.client.get("/v1/models", headers=bearer(key))).status_code == 200
        for key in ("# ours", "ours"):
            assert refused(await api.client.get("/v1/models", headers=bearer(key)))


async def test_a_key_has_a_weight(tmp_path):
    async with running_api(api_key_file=str(key_file(tmp_path, "light\nheavy   weight=2.5\n"))) as api:
        for key in ("light", "heavy"):
            response = await api.client.post("/v1/completions", json={"prompt": "x"}, headers=bearer(key))
            assert response.status_code == 200
        assert refused(await api.client.get("/v1/models", headers=bearer("heavy weight=2.5")))
        assert [request.client_weight for request in api.worker.submitted] == [1.0, 2.5]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("key\n", 0o604, "chmod 600"),
        ("key weight=0\n", 0o600, "weight=0; give"),
        ("key weight=two\n", 0o600, "weight=two"),
        ("# none\n\n", 0o600, "has no key"),
        ("\udcff", 0o600, "not UTF-8"),
    ],
)
def test_wrong_key_files_are_refused(tmp_path, text, mode, said):
    path = tmp_path / "keys"
    path.write_bytes(text.encode(errors="surrogateescape"))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        read_key_file(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(str(tmp_path / "missing"))


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path):
    now_s = 0.0
    path = key_file(tmp_path, "old\n")
    keys = ApiKeys((), str(path), clock=lambda: now_s)
    assert keys.owner_of(b"old")
    path.write_text("new\nnewer\n")
    assert keys.owner_of(b"new") is None  # the file is not checked at every request
    now_s += FILE_CHECK_PERIOD_S
    assert keys.owner_of(b"new")
    assert keys.owner_of(b"old") is None
    for breaking in (lambda: path.write_text(""), lambda: path.chmod(0o644), path.unlink):
        breaking()
        now_s += FILE_CHECK_PERIOD_S
        assert keys.owner_of(b"new")
        assert keys.owner_of(b"") is None
    key_file(tmp_path, "back\n")
    now_s += FILE_CHECK_PERIOD_S
    assert keys.owner_of(b"back")
    assert keys.owner_of(b"new") is None


def test_every_key_is_compared_by_a_digest_of_the_same_length(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    keys = ApiKeys(("a", "b" * 100, "c"))
    for presented in (b"a", b"b" * 100, b"x" * 5000):
        compared.clear()
        keys.owner_of(presented)
        assert [len(digest) for pair in compared for digest in pair] == [32] * 6


async def salts_of(api, key: str, **body) -> list[Any]:
    api.worker.submitted.clear()
    fields = {"prompt": "hi", "max_tokens": 1, **body}
    assert (await api.client.post("/v1/completions", json=fields, headers=bearer(key))).status_code == 200
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **body}
    assert (await api.client.post("/v1/chat/completions", json=fields, headers=bearer(key))).status_code == 200
    return [request.cache_salt for request in api.worker.submitted]


async def test_workers_learn_which_client_sends_a_request_and_not_its_key():
    async with running_api(api_keys=("a", "b")) as api:
        clients = []
        for key in ("a", "b", "a"):
            await salts_of(api, key)
            clients += [request.client for request in api.worker.submitted]
        assert clients[0:2] == clients[4:6] != clients[2:4]
        assert {len(client) for client in clients} == {32}
    async with running_api() as api:
        await salts_of(api, "")
        assert {len(request.client) for request in api.worker.submitted} == {32}  # a digest of the address


async def test_with_salt_by_key_each_client_has_its_own_salt():
    async with running_api(api_keys=("a", "b"), salt_by_key=True) as api:
        first, again = await salts_of(api, "a")
        assert first == again
        salts = {first, *await salts_of(api, "b")}
        salts |= {*await salts_of(api, "a", cache_salt="x"), *await salts_of(api, "b", cache_salt="x")}
        salts |= {*await salts_of(api, "b", cache_salt=first)}  # another's salt is no way to another's cache
        assert len(salts) == len({chain_root(16, cache_salt=salt) for salt in salts}) == 5
        assert not any(salt.startswith(("a", "b:")) and len(salt) < 10 for salt in salts)


@pytest.mark.parametrize("config", [{}, {"api_keys": ("a",)}], ids=["no keys", "keys"])
async def test_without_salt_by_key_the_requests_salt_is_unchanged(config):
    async with running_api(**config) as api:
        assert await salts_of(api, "a") == [None, None]
        assert await salts_of(api, "a", cache_salt="x") == ["x", "x"]


@pytest.mark.parametrize(
    ("environment", "keys"),
    [
        ({"TRANSOM_API_KEY": "a"}, ("a",)),
        ({"TRANSOM_API_KEYS": "a b"}, ("a", "b")),
        ({"TRANSOM_API_KEY_FILE": "FILE"}, ("from-a-file",)),
        ({"TRANSOM_API_KEY": "a", "TRANSOM_API_KEY_FILE": "FILE"}, ("a", "from-a-file")),
    ],
)
def test_keys_come_from_the_environment_too(tmp_path, served_settings, environment, keys):
    path = key_file(tmp_path, "from-a-file\n")
    env = {name: str(path) if value == "FILE" else value for name, value in environment.items()}
    assert CliRunner().invoke(app, ["serve", "smollm2"], env=env).exit_code == 0
    assert current_keys(served_settings[0][0].server_config()) == keys


@pytest.mark.parametrize("variable", [*VARIABLES, "TRANSOM_API_KEY", "TRANSOM_API_KEYS"])
@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.usefixtures("without_ray")
def test_a_variable_that_is_empty_opens_nothing(variable, value):
    """As after `TRANSOM_API_KEY="$A_SECRET_THAT_IS_MISSING" transom serve ...`."""
    result = CliRunner().invoke(app, ["serve", "smollm2", "--port", "0"], env={variable: value})
    assert result.exit_code == START_FAILED
    assert "is empty" in result.output


@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-api-key-file"])
@pytest.mark.parametrize(("text", "said"), [(None, "is empty"), ("", "has no key"), ("# none yet\n\n", "has no key")])
@pytest.mark.usefixtures("without_ray")
def test_a_file_without_keys_opens_nothing(tmp_path, flag, text, said):
    path = "" if text is None else str(key_file(tmp_path, text))
    result = CliRunner().invoke(app, ["serve", "smollm2", "--port", "0", flag, path])
    assert result.exit_code == START_FAILED
    assert f"{flag} {path}".rstrip() + f" {said}" in result.output


@pytest.mark.parametrize("variable", [*VARIABLES, "TRANSOM_API_KEY"])
def test_an_app_does_not_ignore_variables_that_it_does_not_read(monkeypatch, variable):
    monkeypatch.setenv(variable, "something")
    with pytest.raises(ConfigError, match=f"{variable} is set, but only `transom serve` reads it"):
        check_api_keys(Settings.parse(model="smollm2"))


def test_variables_are_no_matter_where_the_settings_have_keys(tmp_path, monkeypatch):
    path = str(key_file(tmp_path, "key\n"))
    for variable in (*VARIABLES, "TRANSOM_API_KEY"):
        monkeypatch.setenv(variable, "")
    check_api_keys(Settings.parse(model="smollm2", api_key_file=path, admin_api_key_file=path))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"api_key_file": None}, "^api_key_file has no value"),  # left blank in YAML
        ({"admin_api_key_file": None}, "admin_api_key_file has no value"),
        ({"api_key": ("a", " ")}, "api-key"),
        ({"api_key": ("a", "")}, "api-key"),
        ({"api_key_file": "/no/such"}, "api-key"),
    ],
)
def test_blank_keys_are_refused_before_anything_starts(fields, said):
    with pytest.raises(ConfigError, match=said):
        check_api_keys(Settings.parse(model="smollm2", **fields))
