"""Model type -> decoder, concrete or abstract."""

import jax
from flax import nnx

from MaxText.common.errors import ConfigError
from MaxText.configs.schema import Config
from MaxText.models import adapters, initialization
from MaxText.models.kimi_k3 import KimiDecoder, scans
from MaxText.models.layer_plan import LayerPlan
from MaxText.models.layer_plan import layer_plan as _layer_plan

DECODERS = {"kimi_k3": KimiDecoder, "kimi_linear": KimiDecoder}


def build(cfg: Config, rngs: nnx.Rngs) -> KimiDecoder:
  """Returns a decoder with freshly drawn weights, drawn by one compiled program."""
  decoder = abstract(cfg)
  graph, _ = nnx.split(decoder)
  draw = jax.jit(lambda key: nnx.state(initialization.draw(decoder, key)))
  return nnx.merge(graph, draw(rngs.params()))


def abstract(cfg: Config) -> KimiDecoder:
  """Returns a decoder whose leaves are `jax.ShapeDtypeStruct`: shapes of any size, nothing allocated."""
  return nnx.eval_shape(lambda: _declared(cfg))


def _declared(cfg: Config) -> KimiDecoder:
  """The decoder with its adapters, drawn for nothing: only its shapes are wanted."""
  rngs = nnx.Rngs(jax.random.key(0))
  decoder = _decoder(cfg)(cfg, rngs=rngs)
  if cfg.lora_rank:
    adapters.attach(decoder, cfg, rngs)
  return decoder


def layer_plan(cfg: Config) -> LayerPlan:
  """Returns how `build` splits the depth of `cfg` on this machine."""
  return _layer_plan(cfg, scans(cfg))


def _decoder(cfg: Config) -> type[KimiDecoder]:
  if cfg.model_type not in DECODERS:
    raise ConfigError(f"model_type: no decoder for '{cfg.model_type}', known: {', '.join(DECODERS)}")
  return DECODERS[cfg.model_type]
