"""Small configurations and filled modules that the layer and model tests share."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx

from MaxText.configs.published import from_published
from MaxText.configs.schema import Config
from tests.reference.generator import k3_config_json, kimi_linear_config_json


def k3_config(published: Mapping = {}, **ours) -> Config:
  """A small K3: `published` overrides keys of config.json, `ours` overrides keys of the schema."""
  return from_published(k3_config_json(**published)).model_copy(update=ours)


def kimi_linear_config(published: Mapping = {}, **ours) -> Config:
  """A small Kimi-Linear, overridden as `k3_config`."""
  return from_published(kimi_linear_config_json(**published)).model_copy(update=ours)


def fill(module: nnx.Module, values: Mapping[str, np.ndarray]) -> None:
  """Sets parameters by dotted path; every parameter has to be named, and its shape has to fit."""
  flat = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(module))}
  assert sorted(flat) == sorted(values)
  for path, variable in flat.items():
    value = jnp.asarray(values[path], variable[...].dtype)
    assert value.shape == variable[...].shape, path
    variable.set_value(value)
  nnx.update(
    module, nnx.from_flat_state([(tuple(_key(k) for k in p.split(".")), v) for p, v in flat.items()])
  )


def _key(part: str) -> str | int:
  return int(part) if part.isdigit() else part
