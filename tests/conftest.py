"""For every test: eight simulated CPU devices, no network; rank promotion and wrong array annotations are errors."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
install_import_hook("memjax.models", "beartype.beartype")
