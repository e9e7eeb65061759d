"""Convert a transformers GPT-2 to peri-LN from Python: the module in, a trainable module and a report out.

    python examples/convert_gpt2.py

The weights are random, so that nothing is downloaded: put GPT2LMHeadModel.from_pretrained(...) and real token
ids in their place, and the drift becomes a figure about your model.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lnrewrite as lnr

torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
batches = [{"input_ids": torch.randint(0, 256, (4, 32))} for _ in range(8)]  # the last one measures

program = lnr.capture(model, kwargs=batches[0])
result = lnr.Pipeline.parse("place{to=peri}").run(program, batches)
print(result.report)

peri = lnr.convert(model, to="peri", kwargs=batches[0], calibrate=batches)  # the same in one call, module only
logits = peri(**batches[0]).logits
logits.square().mean().backward()  # it trains: the new norms are parameters like the others
print(f"\nlogits {tuple(logits.shape)}, {sum(p.grad is not None for p in peri.parameters())} parameters with gradient")
