"""The pipelines that have a name."""

from __future__ import annotations

PRESETS = {
    "exact": ("the two passes that change least", "canonicalize,fold-affine"),
    "inference": (
        "everything exact that makes inference cheaper",
        "propagate-constants,settle-norms,absorb-scales,fold-batchnorm,fold-embedding-norm,merge-norms,"
        "canonicalize,fold-affine{final=true},layernorm-to-rmsnorm",
    ),
    "quantize": (
        "outlying channels spread before quantisation",
        "propagate-constants,untie,settle-norms,absorb-scales,fold-batchnorm,fold-embedding-norm,merge-norms,"
        "canonicalize,fold-affine{final=true},layernorm-to-rmsnorm,rotate-stream",
    ),
    "fp16": ("values that overflow fp16", "absorb-scales,rescale-stream{fit=fp16}"),
}
"""What a preset is for, and the pipeline that it stands for."""

TARGETS = {
    **{name: (name, "") for name in ("pre", "post", "peri", "output", "none", "mix")},
    "sub": ("pre", "norm-writers"),
    "lns": ("pre", "scale-norms"),
}
"""What a network can be converted to: where `place` puts its norms, and the pass behind it, if any."""
