"""A rewritten model of transformers opens as what it is, whatever opens it: the same numbers, or an error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

import lnrewrite as lnr
from lnrewrite.recipe.modeling import FILE
from tiers import rows
from zoo.norms import randomise

IDS = torch.arange(16).reshape(2, 8) + 5
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
SOURCES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig),
    "minilm": (transformers.BertModel, transformers.BertConfig),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config),
}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
TEXT = "w7 w8 w9 w10"


class Room:
    """Make small checkpoints, each with a tokenizer, and convert them, once each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def source(self, name: str) -> Path:
        path = self.folder / name
        if not path.exists():
            made, config = SOURCES[name]
            torch.manual_seed(0)
            randomise(made(config(**(T5 | {"vocab_size": 64} if name == "t5" else SIZES)))).save_pretrained(path)
            ids = {"[PAD]": 0, "[MASK]": 1, **{f"w{i}": i for i in range(2, 64)}}
            words = Tokenizer(models.WordLevel(ids, "[PAD]"))
            words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            words.add_special_tokens(["[PAD]", "[MASK]"])
            words.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
            fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")
            fast.save_pretrained(path)
        return path

    def converted(self, name: str, to: str = "peri") -> Path:
        path = self.folder / f"{name}-{to}"
        if not path.exists():
            lnr.rewrite_file(str(self.source(name)), f"place{{to={to}}}", path)
        return path

    def living(self, name: str, to: str = "peri") -> tuple[Any, dict[str, Tensor]]:
        module = SOURCES[name][0].from_pretrained(self.source(name)).eval()
        inputs = given(module)
        lnr.rewrite(module, to=to, kwargs=inputs)
        return module, inputs


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("heads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(folder / "modules"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Room(folder)


def given(module: Any) -> dict[str, Tensor]:
    inputs = {"input_ids": IDS}
    return inputs | {"decoder_input_ids": IDS} if hasattr(module, "decoder") else inputs


def content(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def states(module: Any) -> Tensor:
    """Return what the base network gives."""
    with torch.no_grad():
        return module.base_model(**given(module.base_model))[0]


def opened(folder: Path, auto: str = "", **how: Any) -> Any:
    """Open a folder through an auto class, else through the one for what was converted."""
    held = content(folder)
    own = f"modeling_lnrewrite.{held['architectures'][0]}"
    auto = auto or next(name for name, ref in held["auto_map"].items() if ref == own)
    return getattr(transformers, auto).from_pretrained(folder, **{"trust_remote_code": True} | how).eval()


def known(name: str) -> dict[str, str]:
    """Return the auto classes that open a source as it is, with its weights where its class looks for them."""
    made, config = SOURCES[name]
    found = {}
    for auto in (n for n in dir(transformers) if n.startswith("AutoModel")):
        mapping = getattr(getattr(transformers, auto), "_model_mapping", None)
        if mapping is not None and config in mapping:
            cls = mapping[config][0] if isinstance(mapping[config], tuple) else mapping[config]
            found |= {auto: cls.__name__} if cls.base_model_prefix == made.base_model_prefix else {}
    return found


CASES = (
    ("llama", "peri"), ("llama", "post"), ("bert", "peri"), ("bert", "pre"), ("minilm", "peri"), ("minilm", "none"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "to"), rows(CASES, sample=(("llama", "peri"),)))
def test_every_auto_class_opens_the_rewritten_network(name: str, to: str, room: Room) -> None:
    folder = room.converted(name, to)
    whole, unchanged = opened(folder), SOURCES[name][0].from_pretrained(room.source(name)).eval()
    want = states(whole)
    assert (want - states(unchanged)).abs().max() > 1e-2 * want.abs().max()
    held = content(folder)
    autos = known(name)
    assert held["auto_map"].keys() - {"AutoConfig", "AutoBackbone"} == autos.keys() >= {"AutoModel"}
    for auto, cls in autos.items():
        model = opened(folder, auto)
        assert type(model).__name__ == f"Lnrewrite{cls}" and not hasattr(transformers, type(model).__name__)
        assert torch.equal(states(model), want), auto
    for auto in {"AutoModelForMaskedLM", "AutoModelForQuestionAnswering", "AutoModelForImageClassification"} - {*autos}:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            opened(folder, auto)
    assert not any(hasattr(transformers, cls) for cls in held["architectures"])


def test_nothing_opens_unless_its_code_is_trusted(room: Room) -> None:
    folder = room.converted("llama")
    for auto in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        with pytest.raises(ValueError, match="contains custom code"):
            opened(folder, auto, trust_remote_code=False)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    again = transformers.AutoModel.from_pretrained(folder, config=config).eval()  # its code has run
    assert torch.equal(states(again), states(opened(folder)))


def test_pipelines_and_sentence_transformers(room: Room) -> None:
    """The words of TEXT are ids, so that what a pipeline gives can be compared with the model's own outputs."""
    ids = torch.tensor([[7, 8, 9, 10]])
    for name in ("llama", "minilm"):
        folder, task = str(room.converted(name)), {"trust_remote_code": True, "device": "cpu"}
        model = opened(Path(folder), "AutoModel")
        with torch.no_grad():
            want = model(ids).last_hidden_state[0]
        features = transformers.pipeline("feature-extraction", model=folder, **task)
        assert torch.allclose(torch.tensor(features(TEXT))[0], want, atol=1e-5)
        labels = transformers.pipeline("text-classification", model=folder, **task)
        assert type(labels.model.base_model).__name__.endswith(type(model).__name__.removeprefix("Lnrewrite"))
        assert torch.equal(states(labels.model), states(model))
        with pytest.raises(ValueError, match="contains custom code"):
            transformers.pipeline("feature-extraction", model=folder, trust_remote_code=False)
    whole = opened(room.converted("llama"))
    write = transformers.pipeline("text-generation", model=str(room.converted("llama")), **task)
    got = write(TEXT, max_new_tokens=4, do_sample=False, return_tensors=True)
    own = whole.generate(ids, max_new_tokens=4, do_sample=False)
    assert got[0]["generated_token_ids"][-4:] == own[0, 4:].tolist()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert "LnrewriteLlamaForCausalLM" in names.values()  # the Trainer shifts labels of these
    sentences = pytest.importorskip("sentence_transformers").SentenceTransformer
    encoder = sentences(folder, trust_remote_code=True, device="cpu")
    assert torch.allclose(encoder.encode(TEXT, convert_to_tensor=True), want.mean(0), atol=1e-5)


@pytest.mark.parametrize("name", rows(["t5"], sample=[]))
def test_a_head_that_has_no_decoder(name: str, room: Room) -> None:
    folder = room.converted(name)
    whole = opened(folder, "AutoModelForSeq2SeqLM")
    with torch.no_grad():
        want = whole.encoder(IDS)[0]
        for auto in ("AutoModel", "AutoModelForTextEncoding"):
            assert torch.equal(opened(folder, auto).encoder(IDS)[0], want)
        alone = opened(folder, "AutoModelForSequenceClassification")
        assert torch.equal(alone.transformer.encoder(IDS)[0], want)


def test_another_head_saved_and_rewritten_again(room: Room, tmp_path: Path) -> None:
    """What opened with another head is saved as that, and takes a second rewrite, on disk and in memory."""
    model = opened(room.converted("llama"), "AutoModelForSequenceClassification")
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path / "one")
    again = opened(tmp_path / "one")
    with torch.no_grad():
        want = model(IDS).logits
        assert torch.equal(again(IDS).logits, want)
    assert content(tmp_path / "one")["architectures"] == ["LnrewriteLlamaForSequenceClassification"]
    model.base_model.save_pretrained(tmp_path / "base")
    assert content(tmp_path / "base")["architectures"] == ["LnrewriteLlamaModel"]
    assert torch.equal(states(opened(tmp_path / "base")), states(model))
    lnr.rewrite(again, to="output", kwargs={"input_ids": IDS})
    again.save_pretrained(tmp_path / "two")
    held = content(tmp_path / "two")
    assert held["lnrewrite"]["pipeline"].endswith("to=output}") and held["architectures"] == [type(model).__name__]
    third = opened(tmp_path / "two")
    with torch.no_grad():
        assert torch.equal(third(IDS).logits, again(IDS).logits)
        assert torch.equal(states(opened(tmp_path / "two", "AutoModel")), states(again))


# ---- living modules ----

LIVING = (*CASES[:3], *CASES[4:], ("t5", "peri"))


@pytest.mark.parametrize(("name", "to"), rows(LIVING, sample=(("llama", "post"),)))
def test_a_rewritten_module_saves_itself_as_what_it_is(name: str, to: str, room: Room, tmp_path: Path) -> None:
    module, inputs = room.living(name, to)
    kind, config = type(module), module.config
    copied = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.01)
        want, other = module(**inputs)[0], copied(**inputs)[0]
    module.save_pretrained(tmp_path / "one")
    copied.save_pretrained(tmp_path / "two")
    assert type(module) is kind and module.config is config and config.model_type == kind.config_class.model_type
    for folder, expected in (("one", want), ("two", other)):
        with torch.no_grad():
            assert torch.equal(opened(tmp_path / folder)(**inputs)[0], expected)
    if name != "t5":  # whose class with a head is its own base
        assert torch.equal(states(opened(tmp_path / "one", "AutoModel")), states(module))
    assert lnr.load(str(tmp_path / "one")).inspect()["placement"] == to
    opened(tmp_path / "one").save_pretrained(tmp_path / "three")
    assert (tmp_path / "three" / FILE).read_text() == (tmp_path / "one" / FILE).read_text()
    if module.base_model is not module:
        with pytest.raises(lnr.LnrewriteError, match=f"LN310 .* part of a {kind.__name__} that was rewritten"):
            module.base_model.save_pretrained(tmp_path / "part")
        assert not (tmp_path / "part").exists()


@pytest.mark.exhaustive
def test_undone_and_weights_only(room: Room, tmp_path: Path) -> None:
    """What is an architecture of transformers is saved as that."""
    module, inputs = room.living("llama")
    lnr.unrewrite(module)
    module.save_pretrained(tmp_path / "undone")
    module.base_model.save_pretrained(tmp_path / "base")
    lnr.rewrite(module, "fold-affine", kwargs=inputs)
    module.save_pretrained(tmp_path / "folded")
    for folder in ("undone", "folded"):
        assert content(tmp_path / folder)["model_type"] == "llama" and not (tmp_path / folder / FILE).exists()
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        with torch.no_grad():
            assert (plain(IDS).logits - module(IDS).logits).abs().max() <= 1e-4


@pytest.mark.exhaustive
def test_the_module_that_heal_gives_back(room: Room, tmp_path: Path) -> None:
    teacher = SOURCES["llama"][0].from_pretrained(room.source("llama")).eval()
    student, inputs = room.living("llama")
    batches = [{"input_ids": (IDS + i) % 60} for i in range(12)]
    healed = lnr.heal(teacher, student, batches, kwargs=inputs, steps=1, batch_size=2, length=8, control=False).module
    healed.save_pretrained(tmp_path / "healed")
    with torch.no_grad():
        assert torch.equal(opened(tmp_path / "healed")(IDS).logits, healed(IDS).logits)

    class Own(transformers.LlamaForCausalLM):
        """A class of other code: it cannot be rebuilt from transformers alone."""

    healed.__class__ = Own
    with pytest.raises(lnr.LnrewriteError, match="LN310 Own: model is not a class of transformers"):
        healed.save_pretrained(tmp_path / "own")
    assert not list(tmp_path.glob("own/*.safetensors"))
