"""What a published checkpoint was like where the tables leave a choice, so that export restores its bytes.

A manifest is small: it states differences from the table, not the table. It travels with an Orbax checkpoint.
"""

import dataclasses
import json
from collections.abc import Iterable

from MaxText.checkpoints.names import TensorSpec, published_prefix
from MaxText.configs.schema import Config


@dataclasses.dataclass(frozen=True)
class Manifest:
  """Stored form of a published checkpoint.

  Attributes:
    prefix: what stood before the decoder's tensors.
    stored: name -> (safetensors type, shape) of tensors that differ from the published table.
    a_log_tails: name -> hexadecimal bytes behind the live heads of `A_log`, where they are not all zero.
    odd_experts: stems (names without `.weight`) stored the other way than the configuration says: plain in an
      MXFP4 model, packed in a plain one.
    metadata: `__metadata__` of the file.
  """

  prefix: str
  stored: dict[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
  a_log_tails: dict[str, str] = dataclasses.field(default_factory=dict)
  odd_experts: frozenset[str] = frozenset()
  metadata: dict[str, str] | None = None

  @classmethod
  def published(cls, cfg: Config) -> "Manifest":
    """Returns the manifest of a checkpoint as the family was released, which other loaders expect."""
    return cls(published_prefix(cfg), metadata={"format": "pt"})

  def packed(self, stem: str, cfg: Config) -> bool:
    """Whether the expert matrix `stem` is stored as MXFP4."""
    return (cfg.expert_quantization == "mxfp4") != (stem in self.odd_experts)

  def to_json(self) -> str:
    """Returns one JSON object."""
    fields = dataclasses.asdict(self) | {"odd_experts": sorted(self.odd_experts)}
    return json.dumps(fields)

  @classmethod
  def from_json(cls, text: str) -> "Manifest":
    """Reads what `to_json` wrote."""
    fields = json.loads(text)
    stored = {name: (dtype, tuple(shape)) for name, (dtype, shape) in fields["stored"].items()}
    return cls(**fields | {"stored": stored, "odd_experts": frozenset(fields["odd_experts"])})


def stored_form(spec: TensorSpec, manifest: Manifest) -> tuple[str, tuple[int, ...]]:
  """Returns (safetensors type, shape) that `spec` is stored as."""
  return manifest.stored.get(spec.name, (spec.dtype, spec.shape))


def differences(specs: Iterable[TensorSpec], found: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
  """Returns name -> (type, shape) of file entries `found` that are not stored as the table says."""
  forms = ((spec, (found[spec.name].dtype, found[spec.name].shape)) for spec in specs)
  return {spec.name: form for spec, form in forms if form != (spec.dtype, spec.shape)}
