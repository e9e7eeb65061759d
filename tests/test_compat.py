"""The private names of torch and transformers that we use: each still is what it was, and none stands elsewhere."""

from __future__ import annotations

import ast
import io
import operator
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lnrewrite
import lnrewrite.compat.torch as names
from lnrewrite.compat import transformers as families

aten = torch.ops.aten
ROOT = Path(lnrewrite.__file__).parent


class Two(nn.Module):
    """(a, {"b": b}) -> {"sum": a + b}."""

    def forward(self, a: Tensor, held: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": a + held["b"]}


def program() -> torch.export.ExportedProgram:
    x = torch.ones(2)
    return torch.export.export(Two(), (x, {"b": x}))


def trees() -> None:
    module, x = program().module(), torch.ones(2)
    a, b = names.pytree.tree_leaves(names.pytree.treespec_tuple([]).children()), names.input_tree(module).children()
    assert not a and [side.num_leaves for side in b] == [2, 0]
    found = names.output_tree(module)
    assert found is not None and found.type is dict and found.context == ["sum"]
    names.set_trees(module, outputs=names.pytree.treespec_dict({"total": found.children()[0]}))
    module.recompile()
    assert list(module(x, {"b": x})) == ["total"]
    plain = names.TreeSpec(tuple, None, [names.pytree.treespec_tuple(b[0].children()[:1]), b[1]])
    names.set_trees(module, names=["a"], inputs=plain)
    assert names.input_tree(module) == plain


def nested() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    tree = ({"a": [x, 3]}, y, None)
    leaves, spec = names.pytree.tree_flatten(tree)
    assert leaves == [x, 3, y, None] and names.pytree.tree_unflatten(leaves, spec) == tree
    assert names.tensors_in(tree) == [x, y]
    assert names.pytree.tree_map_only(Tensor, lambda t: t.item(), tree) == ({"a": [1.0, 3]}, 0.0, None)
    assert names.pytree.arg_tree_leaves(1, [2], a=3) == [1, 2, 3]


def operators() -> None:
    schema = names.schema_of(aten.add_.Tensor)
    assert schema is not None and schema.is_mutable and [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert schema.name == "aten::add_" and schema.arguments[0].alias_info is not None
    assert names.operator_name(aten.layer_norm.default) == "layer_norm"
    assert names.operator_name(operator.getitem) == "getitem" and names.schema_of(operator.getitem) is None
    assert not names.operator_name("alias")
    assert isinstance(aten.add.Tensor, names.OpOverload)


def graphs() -> None:
    held = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module(check_guards=False)
    assert vars(held).keys() - {*dir(nn.Module())} <= names.GRAPH_ATTRIBUTES
    assert "graph" in names.GRAPH_ATTRIBUTES and not {"weight", "training"} & names.GRAPH_ATTRIBUTES


def maps() -> None:
    with pytest.raises(ZeroDivisionError), names.closing_maps():
        torch._C._functorch._vmap_increment_nesting(2, "error")
        raise ZeroDivisionError
    assert not torch._C._functorch.get_dynamic_layer_stack_depth()


def shards() -> None:
    assert names.storage_info().__module__ == "torch.distributed.checkpoint.filesystem"
    assert names.storage_info()(relative_path="__0_0.distcp", offset=1, length=2).relative_path == "__0_0.distcp"


def archive() -> None:
    stream = io.BytesIO()
    torch.save({"w": torch.ones(3)}, stream)
    with zipfile.ZipFile(stream) as held:
        members = {name.partition("/")[2] for name in held.namelist()}
    stream.seek(0)
    assert set(names.record_offsets(stream)) == members
    with pytest.raises(RuntimeError):
        names.record_offsets(io.BytesIO(b"no archive"))


def asserted() -> None:
    names.assert_true(torch.tensor(True), "")
    with pytest.raises(AssertionError, match="why"):
        names.assert_true(torch.tensor(False), "why")


def fake() -> None:
    with names.FakeTensorMode(allow_non_fake_inputs=True):
        assert (torch.ones(2, device="meta") + 1).shape == (2,)


def modules() -> None:
    assert dict(names.slots(nn.Linear(2, 2, bias=False)))["bias"] is None
    assert hasattr(torch.compile(nn.Linear(2, 2), backend="eager"), names.COMPILED)
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, names.BatchNorm) for kind in kinds)
    assert all(issubclass(kind, names.Convolution) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d))


def guarded() -> None:
    class Short(nn.Module):
        """Double at most four rows."""

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] <= 4 else x

    sizes = {"x": {0: torch.export.Dim.AUTO}}
    module = torch.export.export(Short(), (torch.ones(3, 2),), dynamic_shapes=sizes).module()
    assert "4" in str(names.guards(module)) and not names.guards(program().module())


HELD: dict[Callable[[], None], set[str]] = {
    trees: {"TreeSpec", "input_tree", "output_tree", "set_trees"}, nested: {"pytree", "tensors_in"},
    operators: {"OpOverload", "operator_name", "schema_of"}, archive: {"record_offsets"},
    shards: {"storage_info"}, asserted: {"assert_true"}, fake: {"FakeTensorMode"},
    modules: {"BatchNorm", "COMPILED", "Convolution", "slots"}, guarded: {"guards"},
    graphs: {"GRAPH_ATTRIBUTES"}, maps: {"closing_maps"},
}  # fmt: skip


@pytest.mark.parametrize("held", HELD, ids=lambda held: held.__name__)
def test_a_private_name_of_torch_is_what_it_was(held: Callable[[], None]) -> None:
    held()


def test_names_that_pickles_hold() -> None:
    assert {"torch.FloatStorage", "collections.OrderedDict"} <= names.allowed_globals()
    assert "os.system" not in names.allowed_globals()
    assert names.get_layout("torch.strided") is torch.strided


def test_every_name_of_torch_is_tested() -> None:
    assert set(names.__all__) == {n for held in HELD.values() for n in held} | {"allowed_globals", "get_layout"}


def test_names_of_transformers() -> None:
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=1)
    assert families.model_classes(transformers.AutoModelForCausalLM)[type(config)] is transformers.LlamaForCausalLM
    assert not families.model_classes(transformers.AutoConfig)
    families.batch_experts(config)
    assert config._experts_implementation == "batched_mm"
    assert families.config_of(nn.Linear(1, 1)) is None
    assert hasattr(transformers.PretrainedConfig, "_auto_class") and families.NotCopied._auto_class is None


# ---- none stands elsewhere ----


def private(path: Path) -> Iterator[str]:
    """Yield what a file takes of another package under a name with an underscore; names of operators are public."""
    tree = ast.parse(path.read_text())
    own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in sys.stdlib_module_names:
                continue
            case ast.ImportFrom(module=str(module), names=found, level=0):
                yield from (f"{module}.{a.name}" for a in found if hidden(f"{module}.{a.name}"))
            case ast.Import(names=found):
                yield from (a.name for a in found if hidden(a.name))
            case ast.Attribute(attr=attr) if hidden(attr) and attr not in own | {"_fields", "_replace"}:
                whole = ast.unparse(node)
                if not whole.startswith(("self.", "cls.", "aten.", "torch.ops.", "sys.")):
                    yield whole


def hidden(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_private_names_stand_in_compat_alone() -> None:
    """`recipe` ships without us, and goes by public names alone."""
    files = [p for p in ROOT.rglob("*.py") if not {"compat", "passes"} & set(p.relative_to(ROOT).parts)]
    found: dict[str, Any] = {str(p.relative_to(ROOT)): list(private(p)) for p in files}
    assert {name: rows for name, rows in found.items() if rows} == {}
