"""Stock architectures of transformers that hold what a conversion makes, so that every server takes the result.

A host is data: how its config is made from a network's numbers (`known/`, a file each). What its network computes, and
how its weights are called, is seen in its own picture. `numbers` reads the numbers of a source, `matching` compares two
pictures stream by stream and block by block, `cores` compares by running what stands between readers and writers,
`carrying` takes the weights over, `writing` writes the folder and proves it.
"""
