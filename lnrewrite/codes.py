"""Every code has a page: `lnrewrite explain LN101`."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import Code, unknown


@dataclass(frozen=True, slots=True)
class Page:
    """Explain one code: a title and a paragraph that tells a user what happened and what to do."""

    title: str
    text: str


CATALOGUE: dict[str, Page] = {}


def page(code: str, title: str, text: str) -> None:
    """Enter a code; codes are never reused."""
    if code in CATALOGUE:
        raise ValueError(f"{code} is taken by {CATALOGUE[code].title!r}")
    CATALOGUE[code] = Page(title, " ".join(text.split()))


def explain(code: str) -> str:
    """Return what a diagnostic code means and what to do about it.

    Raises UsageError LN001 for a code that is not in the catalogue.
    """
    found = CATALOGUE.get(code.upper())
    if found is None:
        unknown(Code.LN001, "code", code, CATALOGUE)
    return f"{code.upper()}: {found.title}\n\n{found.text}"


# LN0xx: the command line, files and data
page(
    "LN001",
    "unknown name",
    "A pass, preset, code or command of that name does not exist. The message names the nearest.",
)
page(
    "LN002",
    "pipeline text",
    """A pipeline is `pass{option=value other=value},pass,...`, of at most 256 passes; the message gives the column.""",
)
page(
    "LN003",
    "option",
    """The command or pass has no such option, misses one, or the value is of the wrong kind or out of its bounds: seeds
     are 0 to 2^63 - 1, tolerances finite and not negative.""",
)
page(
    "LN004",
    "block selection",
    """`--blocks` takes name globs, an index (3), a range (0-5), `first:25%`, `last:2`,
     `attention` or `mlp`, joined by `;`. A selection that names no block is an error.""",
)
page("LN010", "model not found", "There is no file, folder, demo or importable callable of that name.")
page("LN011", "not a model", "The content is none of the forms that lnrewrite opens; `inspect --help` lists them.")
page(
    "LN012",
    "pickle refused",
    """Loading this file would run code that it names. lnrewrite reads pickles only with
     --trust-pickle. Better: save a state dict as safetensors and give --factory, or torch.export.save the program.""",
)
page(
    "LN013",
    "factory needed",
    """The file holds weights without the network that they belong to. Give
     `--factory pkg.module:callable` that returns the module; the weights are loaded into it.""",
)
page(
    "LN014",
    "TorchScript",
    """TorchScript graphs are recognised and not read. Go back to the Python module and give
     it as `pkg.module:callable`, or save it with torch.export.save.""",
)
page(
    "LN015",
    "damaged file",
    """The file starts like a model and cannot be read to its end, or does not hold together: weights that are declared
     and not there, a program that contradicts itself, more than the writer writes. Fetch or save it again.""",
)
page(
    "LN016",
    "weights do not fit",
    """The factory's module and the file disagree on names or shapes, or a config asks for a network far larger than the
     weights that stand beside it.""",
)
page("LN017", "remote code refused", "This checkpoint brings Python code of its own; --trust-remote-code runs it.")
page("LN018", "missing package", "Reading this form needs a package that is not installed.")
page(
    "LN019",
    "factory failed",
    """The callable could not be imported, raised, left Python (SystemExit, whose exit code is not passed on), or did
     not return a torch.nn.Module.""",
)
page(
    "LN020",
    "inputs needed",
    """The inputs could not be inferred. Give each as `--input name=dtype[d0,d1]` (a named
     dimension stays dynamic) or as an .npz or .pt file.""",
)
page(
    "LN021",
    "input specification",
    "`--input` is `name=dtype[d0,d1,...]`, of at most 32 axes, or an .npz or .pt file of named arrays.",
)
page(
    "LN022",
    "calibration data",
    """DATA does not fit the model: wrong names, shapes or dtype, an unreadable file, or
     text for a model that has no tokenizer.""",
)
page(
    "LN023",
    "not exportable",
    """torch.export could not capture the module; the message says why. Usual cures: pass
     use_cache=False, fix data-dependent control flow, give inputs that take the path that you mean.""",
)
page("LN024", "bad weights", "A parameter holds NaN or infinite values, so nothing computed from it can be trusted.")
page(
    "LN025",
    "output path",
    """The output exists (use --force), its folder does not, the disk is full, or OUT names nothing that could be
     written. --force replaces a file, or a folder that holds a checkpoint and nothing else; where a folder holds more,
     the message names it. A link is replaced, never what it leads to. What stood there stays whole until the new output
     takes its place in one step.""",
)
page("LN026", "non-finite activations", "Running the model on the calibration data gave NaN or infinite values.")
page(
    "LN039",
    "too large",
    """A file asks for more than can be looked at in reasonable time and memory: a graph of very many nodes, once its
     functions are inlined, or values of very many numbers. The message says what, and how many are taken.""",
)
# LN1xx: a pass addresses a site and something blocks it
page(
    "LN101",
    "consumer is not linear",
    """A norm's gain and bias can be folded only if *every* consumer of its output is
     a linear map. One here is not: the norm keeps its affine.""",
)
page(
    "LN102",
    "shared parameter",
    """The parameter is used in several places (tied weights, a block applied several
     times), so that an edit for one use would change the others.""",
)
page(
    "LN103",
    "bias cannot be folded",
    """The reader has no place for a shift: gathered expert weights, or a convolution
     with zero padding, where the shift is missing at the border.""",
)
page(
    "LN104",
    "weights out of reach",
    """The edit needs to change weights that are quantised, wrapped by an adapter
     (LoRA), computed, or behind something that is no linear map. Merge or
     dequantise first where it is one of these.""",
)
page("LN105", "computed gain", "The gain is computed from its parameter in a way that has no inverse to write back to.")
page("LN110", "placement not reachable", "The block's structure leaves no place for the norm that the target needs.")
page("LN111", "kind of norm", "The pass is defined for layer and rms norms; this is another kind.")
page("LN112", "dead branch", "The branch writes zeros on the calibration data, so no gain can be fitted.")
page("LN113", "parallel branches", "Branches of one sum share their trunk norm and must be converted together.")
page(
    "LN114",
    "skip is not bare",
    "The trunk is scaled or transformed between blocks, in a way the conversion cannot carry.",
)
page(
    "LN120",
    "the stream is seen elsewhere",
    """Something reads the stream's state as it is: an output, a pooling, a linear map
     without a norm. A change of basis would be seen there.""",
)
page(
    "LN121",
    "gain brings a mean in",
    """Behind this norm its gain or bias stands before the stream, so that what enters
     the stream cannot have zero mean.""",
)
page(
    "LN122",
    "gain does not rotate",
    """A gain per channel does not commute with a rotation. Fold it first; a gain before
     an add (output norms) cannot be folded.""",
)
page(
    "LN123",
    "a factor per channel beside the stream",
    "A LayerScale or the like mixes differently after a change of basis. absorb-scales takes it into weights.",
)
page("LN124", "blocks do not fill the width", "The size of a rotation's blocks must divide the number of channels.")
page(
    "LN125",
    "a factor per channel before a norm",
    "One number that multiplies what a norm reads goes into its eps; one per channel changes what the norm sees.",
)
page(
    "LN126",
    "trunk factors stay",
    """The trunk's factors can be absorbed only where nothing but norms and linears sees
     the stream's size, they are positive, and their product stays within 1e-2 to 1e2.""",
)
page("LN127", "not the rows of one table", "A norm can be folded into a table only if it reads nothing but its rows.")
page(
    "LN128",
    "a gain between two norms",
    "A norm of a norm merges only if what stands between them is one number for all channels.",
)
page(
    "LN129",
    "asymptotic only",
    "LayerNorm of RMSNorm is one LayerNorm only as eps goes to 0; `asymptotic=true` accepts that error.",
)
page(
    "LN130",
    "beyond fp16",
    """This value inside a branch is larger than fp16 holds, and no linear arm leads
     there from which a factor could be taken.""",
)
# LN2xx: detection
page("LN201", "no residual stream", "No add joins a value with something computed from that same value by weights.")
page(
    "LN202",
    "nested skip",
    """A skip spans a whole chain of residual blocks (U-Net, MobileBERT, funnel). Streams inside
     streams are beyond the picture; nothing of them is converted.""",
)
page(
    "LN203",
    "hyper-connection or attention residual",
    """Several copies of the stream are mixed by data-dependent weights between blocks, or blocks read a mixture of
     earlier states.""",
)
page("LN204", "projected skip", "The skip passes through a linear map or a convolution: the stream changes its basis.")
page(
    "LN205",
    "looks like a norm",
    """A value is divided by a size of its own (a deviation, a length, a mean square), goes through a map that
     saturates, with a learned slope and a gain, or has its mean taken off before a gain, and running it on random data
     did not give any norm that is known. It is left alone, and conversions may put norms beside it; the message says
     where it is, and what it was compared with where it could be run.""",
)
page("LN206", "eps is zero", "The norm has no eps (or it underflowed in low precision); zero rows would give NaN.")
page("LN207", "reversible or coupled streams", "Two streams read and write each other in turn (reversible networks).")
page(
    "LN208",
    "not as it looks",
    """The picture was tried on the model: a norm written anew, a branch's readers or writers in another size, a sum
     added up again. The outputs moved, so what looks like that norm, that edge or that sum is something else. Passes
     that cannot be proved, and reports, take it as a barrier. This is a fault of ours: please report it.""",
)
# LN3xx, LN4xx: apply and verify
page(
    "LN301",
    "edit does not fit",
    "The graph is not what the plan was made for. This is a fault of ours: please report it.",
)
page(
    "LN302", "no effect", "A placement was to change and the output did not. This is a fault of ours: please report it."
)
page(
    "LN310",
    "no place in the module",
    """A living module keeps its Python: something can be put between its parts only where a value enters or leaves a
     child module that is called once, or at a sum or product that a forward's source shows. The message says what lies
     elsewhere. The exported route has no such limits: lnr.convert without live=True, or -o OUT.pt2. A rewritten model
     is saved whole, and only where an auto class of transformers opens its class: others could not be built again.""",
)
page(
    "LN314",
    "cannot be undone",
    """`unrewrite` puts back what the last `rewrite` of this very module (or of the one it was copied from) changed. It
     needs the old values (undo=True), and parameters and structure as `rewrite` left them: it would lose training.""",
)
page(
    "LN312",
    "wrapped module",
    """The module is compiled, sharded or quantised already, so that its parameters or calls are not its own. Rewrite
     first, then compile, shard or quantise.""",
)
page(
    "LN313",
    "not as planned",
    """A rewritten module, or a folder that was loaded again, does not compute what was planned; everything was put
     back. Some modules look at a norm beyond calling it (at its weight dtype, say). The exported route works there.""",
)
page("LN401", "verification failed", "The two models differ by more than the tolerance; nothing was written.")
page(
    "LN404",
    "edit without proof",
    """What an exact pass made is run against the model that it was made of, in float64 at two batch sizes and lengths.
     An edit with which the outputs differ by more than the rounding of stored weights is left out and refused. It is a
     fault of lnrewrite in that it was proposed: please report the model. --no-verify leaves the proof out.""",
)
page(
    "LN405",
    "result not finite",
    """A conversion gave a model whose outputs are NaN or infinite: nothing was written. Leave out blocks (--blocks), or
     give data that the model was made for (--calibrate).""",
)
page("LN402", "not comparable", "The models take other inputs or give other outputs; give --input for both.")
# LN005, LN006: plugins
page(
    "LN005",
    "pass cannot be loaded",
    """The pass is registered, or named as `package.module:Class`, but importing it
     failed or gave something that is no pass: a frozen dataclass with name, exactness, needs_data and propose.""",
)
page(
    "LN006",
    "two passes of one name",
    """Two installed packages register a pass under the same name. Uninstall one,
     or write `package.module:Class` in the pipeline.""",
)
# LN027 to LN029: opening models
page(
    "LN027",
    "ONNX too new or too old",
    """The model declares an IR version or an operator set that the installed onnx or onnxruntime does not know.
     Install newer ones, or export the model again with an opset that they take (11 and later are read).""",
)
page(
    "LN028",
    "reads outside its folder",
    """The checkpoint points to a file outside its own folder (an absolute path,
     `..`, or a link that leads out). lnrewrite reads only the folder that it was given; copy the file into it.""",
)
page(
    "LN029",
    "pickle cannot be rebuilt",
    """Unpickling was allowed and failed: usually the code that defines the module
     cannot be imported here, or has changed. Run where it is importable, or save the weights alone and give
     --factory.""",
)
# LN03x: ONNX files
page(
    "LN030",
    "invalid ONNX model",
    """The file is ONNX and breaks its rules: a value that nothing makes, a cycle, a tensor whose size and content
     disagree, an operator of an unknown domain. Check it with onnx.checker, or export it again. Where ONNX Runtime's
     process dies on it, the file shows a fault of ONNX Runtime; so may a file of which nothing is wrong.""",
)
page(
    "LN031",
    "external data",
    """An ONNX model may keep its weights in files beside it. One is missing, too short, or named by a path that
     leads out of the model's folder (absolute, `..`, or a link), which is never read. Put it beside the model.""",
)
page(
    "LN032",
    "no torch module",
    """The model came from an ONNX file: it can be run, rewritten and written as ONNX, but not trained or saved as .pt2.
     Start from the PyTorch model for that.""",
)
page(
    "LN033",
    "path fixed by data",
    """The model chooses what it computes by looking at its data (an `if`, a loop or a number read out of a tensor), or
     differs from what was captured of it in another way; a captured program follows one path, that of its example
     inputs, and fails on inputs that take another. convert, opt, export and heal write such a model only with
     --accept-fixed-paths. Better: choose by torch.where or torch.cond. Data given must take the captured path;
     --input captures another.""",
)
# LN5xx: export and bench
page(
    "LN403",
    "written model failed its proof",
    """The ONNX model that was made does not load, or gives other numbers than its source: nothing was kept.
     Another --opset, --dtype or --optimize none may work; please report it.""",
)
page(
    "LN501",
    "not exportable to ONNX",
    "torch.onnx has no translation for an operator of the model, or failed on it; the message says which.",
)
page("LN502", "precision", "The model holds values or operators that the dtype that was asked for does not take.")
page("LN503", "target", "What was asked for cannot be written: the message says which form, dtype or opset is lacking.")
page("LN520", "session", "ONNX Runtime does not load or run a model on the target; bench can give no time for it.")
page(
    "LN530",
    "kernels",
    """A model holds operators of lnrewrite (it was exported with --fuse custom), and the library of their kernels is
     not built here, or does not load. `lnrewrite kernels build` makes it, with a C++ compiler and, where there is
     nvcc, for CUDA; LNREWRITE_KERNELS may name the file. Without it plain ONNX Runtime still runs such a model, by the
     definitions that it brings along: the numbers are the same, the speed is not.""",
)
page(
    "LN531",
    "kernels not built",
    """The library of kernels could not be compiled: no C++17 compiler was found (g++, clang++, or what CXX names), nvcc
     was asked for and is not there (CUDA_HOME names its folder), or one of them failed, as the message says.""",
)
# LN6xx: healing
page(
    "LN601",
    "no teacher and student",
    """Healing compares a converted model with the one that it was made of: the same inputs, the same vocabulary, the
     same residual blocks. Give the model and what `lnrewrite convert` made of it, both as torch models.""",
)
page(
    "LN602",
    "no exact start",
    """A progressive healing starts at the teacher exactly and ends at the new placement exactly. That is possible
     inside the branches (any norm may come or go), from pre to post, from post to pre or peri, and for a final norm
     that only linear maps of its own read. Heal everything else without progressive, from the calibrated student.""",
)
page(
    "LN604",
    "NaN in training",
    """A loss or a gradient became NaN or infinite; the message names the step and the first block whose state is not
     finite. No weight was changed by that step, and the last checkpoint is kept: lower the learning rate, look at the
     data, or train without bfloat16, then go on with --resume.""",
)
page(
    "LN605",
    "run folder",
    """The folder of a healing run holds another run, one that did not end, or one that another process is at; or there
     is none to --resume; or its files are not what a run writes. Go on with --resume and the options that it was
     started with, name another folder with --run, or remove it.""",
)
