"""The picture as text: what tests, the command line, the docs and bug reports speak.

    stream model width=64
      source @wte.weight:1(uses=2,table) @wpe.weight:1(table)
      block h.0.attn attention pre
        in     layer(eps=1e-05 gamma=@h.0.ln_1.weight beta=@h.0.ln_1.bias) -> @h.0.attn.c_attn.weight:0
        writes @h.0.attn.c_proj.weight:1+@h.0.attn.c_proj.bias
      final  layer(eps=1e-05 gamma=@ln_f.weight beta=@ln_f.bias) -> @wte.weight:1(uses=2)
    elsewhere inner rms(eps=1e-06 gamma=1+@q_norm.weight) -> taps mul_3

`@p` is a parameter, `%n` a node that computes a gain, `@w:0+@b` a linear map with the axis that runs over the channels
and its bias; a block `adds` what its sum takes beside skip and branches, a `barrier` is what no linear edit passes;
`head` and `exits` say what reads its last state bare. A name with other characters stands in
JSON quotes. Defaults are not printed: a block without a `reads` line has the readers of its in norm. Indentation and
lines that start with `#` mean nothing. `parse(render(n)) == n` for every field that takes part in equality.
"""

from .parser import parse
from .printer import digest, render, render_stream

__all__ = ["digest", "parse", "render", "render_stream"]
