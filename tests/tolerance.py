"""Every tolerance of the tests, each with its reason. Moving one is a change to explain.

Integer bookkeeping, pure data movement and everything in `batch_invariant` compare with torch.equal, not with these.
"""

import torch
from torch import Tensor

FLOAT32 = 1e-5  # one operation in float32 against a float32 reference: another order of accumulation
LOGITS = 1e-4  # a whole model in float32 against transformers
BFLOAT16 = 4e-3  # one operation on bfloat16 inputs: half a unit in the last of 8 bits
BFLOAT16_LOGITS = 4e-2  # a whole tiny model in bfloat16: every layer rounds
FP8_WIRE = 4e-2  # one rounding to e4m3 with a scale per block
INT8_EXPERT = 2e-2  # one int8 product, ||error|| / ||result||: weights and rows each lose about 0.8 % (measured: 1.2 %)
FP8_EXPERT_LOGITS = 5e-2  # a tiny model's logits, FP8 experts kept against dequantised: rows in e4m3 (measured: 3.4 %)
INT8_EXPERT_LOGITS = 2e-2  # the demo model's logits, int8 experts against dense ones (measured: 1.2 %)
GROUPS_BY_INT8 = 1.2e-1  # a tiny model's logits, weights in groups with int8 rows against float ones (measured: 9.6 %)
INT4_EXPERT_LOGITS = 5e-2  # the same of int4 experts, with activations in int8 or in float32 (measured: 2.8 %)
LOGPROB = 1e-6  # a log probability against a softmax in float64, absolute and relative: it is rounded to float32
GREEDY_GAP = 1e-4  # in `fast`, tokens are compared up to the first position whose two best logits are closer


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Returns max |got - wanted| / max |wanted|, in float64; 0 for empty tensors."""
    assert got.shape == wanted.shape, f"{tuple(got.shape)} against {tuple(wanted.shape)}"
    if not wanted.numel():
        return 0.0
    assert torch.isfinite(got.double()).all(), "not finite"
    error = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30)
    return float(error)
