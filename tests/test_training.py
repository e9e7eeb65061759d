"""What researchers do with a rewritten module afterwards: a Trainer, LoRA, sharding with FSDP2 over two processes."""

from __future__ import annotations

import copy
import os
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

import lnrewrite as lnr
import zoo
from commands import started
from tiers import rows
from zoo import families

BLOCKS = {"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block", "t5": "T5Block"}


def rewritten(name: str, to: str) -> tuple[Any, dict[str, Tensor]]:
    """Return one of BLOCKS, rewritten in place, and inputs with labels."""
    model, inputs = zoo.build(name, depth=1, head=True)
    model.config.decoder_start_token_id = 0
    lnr.rewrite(model, to=to, kwargs=inputs)
    return model, {"input_ids": inputs["input_ids"], "labels": inputs["input_ids"]}


@pytest.mark.parametrize("name", rows(BLOCKS, sample=["gpt2"]))
def test_twenty_steps_of_a_trainer(name: str, tmp_path: Path) -> None:
    model, _ = rewritten(name, "peri")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    ids = torch.randint(1, families.VOCAB, (64, 8), generator=torch.Generator().manual_seed(0))
    how = {"max_steps": 20, "per_device_train_batch_size": 16, "learning_rate": 1e-2, "logging_steps": 5}
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = transformers.Trainer(model, transformers.TrainingArguments(str(tmp_path), **how, **quiet), None, rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if "norm_out" in n)


@pytest.mark.parametrize("name", rows(BLOCKS, sample=["llama"]))
def test_lora_on_top(name: str) -> None:
    """It starts at the rewritten model, trains, and merges into it: the norms stay behind what was adapted."""
    model, inputs = rewritten(name, "peri")
    start = model(**inputs).logits
    conv1d = name == "gpt2"
    layers = ["c_attn", "c_proj"] if conv1d else "all-linear"
    config = peft.LoraConfig(r=2, target_modules=layers, fan_in_fan_out=conv1d)
    adapted = peft.get_peft_model(model, config)
    assert torch.allclose(adapted(**inputs).logits, start, atol=1e-5)
    adapted(**inputs).loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    with torch.no_grad():
        for n, p in adapted.named_parameters():
            if "lora_B" in n:
                p.normal_(std=0.1)
    moved = adapted.eval()(**inputs).logits
    assert not torch.allclose(moved, start, atol=1e-2)
    assert torch.allclose(adapted.merge_and_unload()(**inputs).logits, moved, atol=1e-4)


def sharded(rank: int, world: int, name: str, to: str) -> None:
    """Train with every block sharded, and beside it a copy in one piece; both must stay the same."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getppid() % 1000))
    init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model, inputs = rewritten(name, to)
    whole = copy.deepcopy(model)
    for block in model.modules():
        if type(block).__name__ == BLOCKS[name]:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    one, two = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, whole))
    for _ in range(2):
        model(**{k: v[rank : rank + 1] for k, v in inputs.items()}).loss.backward()
        losses = [whole(**{k: v[r : r + 1] for k, v in inputs.items()}).loss for r in range(world)]
        (sum(losses) / world).backward()
        for optimizer in (one, two):
            optimizer.step()
            optimizer.zero_grad()
    for (key, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.allclose(ours.full_tensor(), theirs, atol=1e-5), key
    destroy_process_group()


@pytest.mark.parametrize(("name", "to"), rows(product(BLOCKS, ("peri", "post")), sample=[]))
def test_sharded_over_two_processes(name: str, to: str) -> None:
    both = [started(sharded, rank, 2, name, to) for rank in range(2)]
    for process in both:
        process.join(300)
    assert [process.exitcode for process in both] == [0, 0]
