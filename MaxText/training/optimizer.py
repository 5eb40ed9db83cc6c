"""Which parameters muon orthogonalises and which ones decay, told by our names.

maxtext decides both by the names of its own layers, under which ours would be taken for matrices of another
orientation, short convolutions among them.
"""

from collections.abc import Sequence

from optax.contrib import MuonDimensionNumbers

# vectors and taps: pulling them towards zero is no regularisation. Searched for in the path of a parameter
NOT_DECAYED = (r"(^|/)(scale|A_log|dt_bias|proj|qkv_conv1d)(/|$)",)
_EXPERTS = ("w1", "w2", "w3")
_HEAD_STACKS = ("k_up", "v_up")
# the head and the write strengths are no maps between hidden states; the convolution has a tap per channel
_NO_MATRIX = ("lm_head", "b_proj", "qkv_conv1d")


def muon_dimensions(
  path: Sequence[str | int], shape: tuple[int, ...] | None = None, include_routers: bool = True
) -> MuonDimensionNumbers | None:
  """Says along which axes a parameter is a matrix, or None for what Adam updates.

  Weights are stored [..., out, in]; leading axes are layers of a stack and experts, each a matrix of its own.
  The heads of an MLA up-projection are one matrix together.

  Args:
    path: keys from the model to the parameter.
    shape: unread; the name decides.
    include_routers: whether routers are orthogonalised.
  """
  names = [str(key) for key in path]
  if _HEAD_STACKS[0] in names or _HEAD_STACKS[1] in names:
    return MuonDimensionNumbers(reduction_axis=(-1,), output_axis=(-3, -2))
  if "experts" in names and names[-1] in _EXPERTS:
    return MuonDimensionNumbers(reduction_axis=(-1,), output_axis=(-2,))
  owner = names[-2] if len(names) > 1 else ""
  is_matrix = names[-1] == "weight" and owner not in _NO_MATRIX and (include_routers or owner != "gate")
  return MuonDimensionNumbers(reduction_axis=(-1,), output_axis=(-2,)) if is_matrix else None
