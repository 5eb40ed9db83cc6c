"""Hangs low-rank adapters on a decoder, and folds them into its weights.

`lora_targets` names matrices by parts of their published paths: `q_proj` everywhere, `self_attn` for all
matrices of both attentions, `shared_experts.up_proj`, `experts`. `kv_b_proj` is the latent's expansion to
keys and values, which the absorbed form reads too.
"""

from collections.abc import Iterable, Iterator

from flax import nnx

from MaxText.common.errors import ConfigError, did_you_mean
from MaxText.configs.schema import Config
from MaxText.layers.attention_mla import GatedLatentAttention
from MaxText.layers.latent_moe import EXPERT_MATRICES, Experts
from MaxText.layers.lora import Adapter, ExpertAdapter, LoRAParam
from MaxText.layers.projection import Projection

_PLACES = ("layers", "cycles", "epilogue")


def attach(decoder: nnx.Module, cfg: Config, rngs: nnx.Rngs) -> None:
  """Adds an adapter to every matrix that `cfg.lora_targets` names, in place; their B are 0.

  Args:
    decoder: a decoder or a part of one, concrete or inside a trace, without adapters.
    cfg: states `lora_rank`, `lora_alpha`, `lora_targets` and `lora_experts`.
    rngs: for the A matrices.

  Raises:
    ConfigError: no rank, or a target that names no matrix of this model.
  """
  if not cfg.lora_rank:
    raise ConfigError("lora_rank: got 0, adapters need a rank of 1 or more")
  found = list(_matrices(decoder))
  for target in cfg.lora_targets:
    if not any(_named_by(target, name) for name, *_ in found):
      known = {part for name, *_ in found for part in name.split(".")}
      raise ConfigError(
        f"lora_targets: '{target}' names no matrix of {cfg.model_name}{did_you_mean(target, known)} "
        f"(known: {', '.join(sorted(known))})"
      )
  for name, module, kind, weight in found:
    if any(_named_by(target, name) for target in cfg.lora_targets):
      setattr(module, kind, _adapter(module, cfg, kind, weight, rngs))


def has_adapters(decoder: nnx.Module) -> bool:
  """Whether any adapter hangs on `decoder`."""
  return bool(nnx.to_flat_state(nnx.state(decoder, LoRAParam)))


def adapts_experts(paths: Iterable[str]) -> bool:
  """Whether adapters of routed experts are among the parameters of these dotted paths."""
  return any(".experts." in path and "_lora." in path for path in paths)


def merged[ModuleT: nnx.Module](decoder: ModuleT, *, keep_on_packed: bool = False) -> ModuleT:
  """Returns a decoder whose weights hold what the adapters add, without adapters; `decoder` is left alone.

  Args:
    decoder: a decoder or a part of one, with adapters or without.
    keep_on_packed: leave the adapters of packed experts where they hang.

  Raises:
    ConfigError: adapters of experts whose weights are packed MXFP4 bytes, which have no room for a change.
  """
  decoder = nnx.clone(decoder)
  for name, module, kind, weight in list(_matrices(decoder)):
    packed = isinstance(module, Experts) and weight is None
    if not hasattr(module, kind) or (packed and keep_on_packed):
      continue
    if packed:
      raise ConfigError(
        f"{name}: adapters do not merge into packed experts; load with expert_weights=dequantized"
      )
    change = getattr(module, kind).change()
    if isinstance(module, GatedLatentAttention):
      for half, part in zip((module.k_up, module.v_up), module.split_heads(change)):
        half.set_value((half[...] + part).astype(half[...].dtype))
    else:
      weight.set_value((weight[...] + change).astype(weight[...].dtype))
    delattr(module, kind)
  return decoder


def _matrices(decoder) -> Iterator[tuple[str, nnx.Module, str, nnx.Variable | None]]:
  """Yields (name, module, attribute of its adapter, weight or None) of every matrix that may have one."""
  for path, module in nnx.iter_modules(decoder):
    name = ".".join(str(part) for part in (path[2:] if path and path[0] in _PLACES else path))
    if isinstance(module, Projection):
      yield name, module, "lora", module.weight
    elif isinstance(module, GatedLatentAttention):
      yield f"{name}.kv_b_proj", module, "kv_b_lora", None
    elif isinstance(module, Experts):
      for matrix in EXPERT_MATRICES:
        yield f"{name}.{matrix}", module, f"{matrix}_lora", getattr(module, matrix, None)


def _named_by(target: str, name: str) -> bool:
  return f".{target}." in f".{name}."


def _adapter(module, cfg, kind, weight, rngs):
  if isinstance(module, GatedLatentAttention):
    (*stack, heads, keys, rank), values = module.k_up.get_value().shape, module.v_up.get_value().shape[-2]
    *names, head_axis, _, rank_axis = module.k_up.get_metadata("axes")
    shape = (*stack, heads * (keys + values), rank)
    return Adapter(cfg, shape, (*names, head_axis, rank_axis), rngs=rngs)
  if isinstance(module, Experts):
    return ExpertAdapter(cfg, *module.matrix(kind.removesuffix("_lora")), rngs=rngs)
  return Adapter(cfg, weight.get_value().shape, weight.get_metadata("axes"), rngs=rngs)
