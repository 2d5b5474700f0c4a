"""Settings: known names, refused values, sizes with units."""

import pytest

from transom_core import config
from transom_core.errors import ConfigError
from transom_core.settings.byte_sizes import parse_bytes
from transom_core.settings.settings import Settings


def test_the_wires_settings_are_variables_of_ucx() -> None:
    given = Settings.parse(model="m", kv_transfer_devices="lo", kv_transfer_ports="30000-30999").engine_config()
    assert given.transfer.ucx == (("UCX_NET_DEVICES", "lo"), ("UCX_TCP_PORT_RANGE", "30000-30999"))
    for ports in ("30000", "0-9", "30999-30000", "60000-65536"):
        with pytest.raises(ConfigError, match=r"kv[-_]transfer[-_]ports"):
            Settings.parse(model="m", kv_transfer_ports=ports)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_paralel_size": 2}, "tensor_paralel_size is not a setting"),
        ({"port": 70000}, "port is 70000"),
        ({"worker_wait_s": 0}, "worker_wait_s"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),  # no prompt could have an answer
        ({"window_pattern": "SXF", "window": 8}, "window-pattern is 'SXF'"),
        ({"sinks": 4}, "need --window"),
        ({"chunk": 32}, "--chunk is 32 and --window-pattern 'S'"),
        ({"window_pattern": "CF"}, "--chunk is None and --window-pattern 'CF'"),
        ({"chunk": 32, "window_pattern": "SCF"}, "need --window"),
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes is 'lots'"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"disk_cache": "/x", "enable_prefix_caching": False}, "--disk-cache keeps cached prefixes"),
        ({"max_lora_rank": 12}, "--max-lora-rank is 12; give one of 8, 16"),
        ({"lora_modules": "a=b"}, "needs --enable-lora"),
        ({"enable_lora": True, "lora_modules": ["a"]}, "--lora-modules is 'a'"),
        ({"enable_lora": True, "lora_modules": ["m=x"]}, "has the name 'm'"),
        ({"enable_lora": True, "lora_modules": ["a=x", "a=y"]}, "has the name 'a'"),
        ({"disk_space": "much"}, "disk_space is 'much'"),
        ({"disk_space": 0}, "disk_space is 0"),
        ({"disk_cache": ""}, "--disk-cache is empty"),
        ({"swap_space": "inf"}, "swap_space is inf"),
        ({"swap_space": "9e400"}, "swap_space is inf"),
        ({"swap_space": -1}, "swap_space is -1"),
        ({"preemption_mode": "swap"}, "there is none; give --swap-space"),
        ({"swap_space": 1, "worker_group": ["preemption_mode=swap"]}, "preemption_mode is not a setting"),
        ({"kv_policy": '{"type": ["window"]}'}, "its type must be one of full, window, adaptive, heavy"),
        ({"kv_policy": '["window"]'}, "its type must be one of full, window, adaptive, heavy"),
        ({"kv_policy": '{"type": "lru"}'}, "its type must be one of full, window, adaptive, heavy"),
        ({"kv_policy": "window"}, "--kv-policy is not JSON"),
        ({"kv_policy": '{"type": "window"}'}, "--kv-policy window: missing 1 required keyword-only argument: 'window'"),
        ({"kv_policy": '{"type": "window", "window": 0}'}, "kv_policy.window is 0; it must be a whole number of at"),
        (
            {"kv_policy": '{"type": "adaptive", "min_window": 1, "max_window": 9, "threshold": NaN}'},
            "kv_policy.threshold is nan",
        ),
        ({"kv_policy": '{"type": "window", "window": 8, "sink": 4}'}, "unexpected keyword argument 'sink'"),
    ],
)
def test_wrong_settings_name_themselves(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.parse(model="m", **values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2GB", 2_000_000_000), ("7 k", 7000),
        ("1TiB", 1 << 40),
    ],
)  # fmt: skip
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, name="x") == expected
    assert Settings.parse(model="m", kv_cache_memory_bytes=text).kv_cache_memory_bytes == expected


def test_a_disk_tier_has_a_host_tier() -> None:
    cache = Settings.parse(model="m", disk_cache="/x", disk_space="2GiB").engine_config().cache
    assert (cache.disk_cache, cache.disk_space_bytes, cache.swap_space_bytes) == ("/x", 2 << 30, 1 << 30)
    cache = Settings.parse(model="m", disk_cache="/x", swap_space="3GiB").engine_config().cache
    assert (cache.disk_space_bytes, cache.swap_space_bytes) == (100 << 30, 3 << 30)
    assert Settings.parse(model="m").engine_config().cache.swap_space_bytes == 0


def test_adapters_in_every_form() -> None:
    assert Settings.parse(model="m", max_loras=2).engine_config().lora is None
    for given in (["a=/x", "b=o/r@v"], {"a": "/x", "b": "o/r@v"}, (("a", "/x"), ("b", "o/r@v"))):
        settings = Settings.parse(model="m", enable_lora=True, max_lora_rank=64, lora_modules=given)
        assert settings.server_config().lora_modules == (("a", "/x"), ("b", "o/r@v"))
        assert settings.engine_config().lora == config.LoraConfig(max_loras=4, max_lora_rank=64)


def test_parsers_go_to_routers_and_other_names_are_refused_with_the_list() -> None:
    given = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_auto_tool_choice": False}
    server = Settings.parse(model="m", **given).server_config()
    assert {name: getattr(server, name) for name in given} == given
    for name in ("tool_call_parser", "reasoning_parser"):
        Settings.parse(model="m", **{name: "none"})
        with pytest.raises(ConfigError, match=r"'gpt_9'; there are .*mistral"):
            Settings.parse(model="m", **{name: "gpt_9"})


def test_origins_in_every_form() -> None:
    def origins(given: object) -> tuple[str, ...]:
        return Settings.parse(model="m", allowed_origins=given).server_config().allowed_origins

    page, local = "https://chat.example.com", "http://127.0.0.1:3000"
    assert Settings.parse(model="m").server_config().allowed_origins == ()
    assert origins("*") == ("*",)
    assert origins([page, local]) == origins((page, local)) == origins(f'["{page}", "{local}"]') == (page, local)
    for wrong in ("chat.example.com", f"{page}/", "", "null", "[", '["x"]'):
        with pytest.raises(ConfigError, match="allowed-origins"):
            origins([wrong])
