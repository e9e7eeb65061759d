"""Shipped passes: one idea, one file, flat. Imported as `lnrewrite.passes`, found through entry points like anyone's.

A pass is a frozen dataclass on the base `lnrewrite.pipeline.Pass`: its fields are its options, it has `name`,
`exactness` and `plan(stream, context) -> Proposal`. It imports the picture and its edits (`lnrewrite.ir`), and nothing
of torch or ONNX. To add one: copy the file nearest to your idea, draw before and after in the docstring (a test runs
the picture), add its entry-point line, run the tests.
"""

if __name__ != "lnrewrite.passes":
    raise ImportError(f"the folder `passes` is the package lnrewrite.passes and cannot be imported as {__name__!r}")
